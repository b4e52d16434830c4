"""Read and write YAML for configuration files: plain data with line numbers.

Scalars follow the core schema of YAML 1.2: ``1e-4`` is a number, ``no``, ``on`` and ``12:30`` are strings. Only
mappings, lists, strings, numbers, booleans and null exist: a tag cannot name a Python object, and the size, depth and
number of values are limited, so a hostile file costs little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from vqclip.errors import ConfigError, printable

MAX_BYTES = 1 << 18
MAX_VALUES = 20_000
MAX_DEPTH = 64
MAX_DIGITS = 100
_SHOWN = 80
"""Characters of a key in a message."""

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


@dataclass(frozen=True)
class Origin:
    """Place that a value comes from: a file and line, or an override."""

    source: str
    line: int | None = None
    is_override: bool = False

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass
class Node:
    """A configuration value, with the line or override that it comes from."""

    value: Any
    """A scalar, a ``list[Node]`` or a ``dict[str, Node]``."""
    origin: Origin
    is_default: bool = False
    """Whether the value is a default, added so that an override can change a part of it."""

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, part: str | int) -> Node | None:
        """Return the value under a key or index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(part)
        if isinstance(self.value, list) and isinstance(part, int) and 0 <= part < len(self.value):
            return self.value[part]
        return None


def node_from_plain(value: Any, origin: Origin, is_default: bool = False) -> Node:
    """Wrap plain dicts, lists and scalars, all with the same origin."""
    if isinstance(value, dict):
        value = {key: node_from_plain(child, origin, is_default) for key, child in value.items()}
    elif isinstance(value, (list, tuple)):
        value = [node_from_plain(child, origin, is_default) for child in value]
    return Node(value, origin, is_default)


@dataclass
class Problem:
    """One line of a configuration error."""

    origin: Origin
    path: tuple[str | int, ...]
    message: str

    def __str__(self) -> str:
        where = [str(self.origin), path_text(self.path)]
        return ": ".join([part for part in where if part] + [self.message])


def path_text(path: tuple[str | int, ...]) -> str:
    """Return a key path as users write it: ``quantizer.levels[2]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        key = printable(part if len(part) <= _SHOWN else part[: _SHOWN - 3] + "...", one_line=True)
        text += f".{key}" if text else key
    return text


class _TooMuch(Exception):
    """Limit of values or levels exceeded; its arguments are the line, from 1, and the limit in words."""


class _Loader(yaml.SafeLoader):
    """YAML loader that composes nodes only; `_Reader` makes the Python values.

    It stops at the limits, so that a large document takes neither time nor memory.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    NON_PRINTABLE = re.compile(rf"(?![\udc80-\udcff]){yaml.SafeLoader.NON_PRINTABLE.pattern}")  # type: ignore[misc]
    """PyYAML's, but for surrogates that stand for bytes which are not UTF-8, in a path on a command line."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and all nodes below it."""
        self._values += 1
        self._depth += 1
        if self._values > 2 * MAX_VALUES or self._depth > MAX_DEPTH + 2:  # keys count here, and not in `_Reader`
            limit = f"{MAX_VALUES} values" if self._depth <= MAX_DEPTH + 2 else f"{MAX_DEPTH} levels"
            raise _TooMuch(self.line + 1, limit)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes every string which YAML 1.1 or 1.2 would read as another type."""

    # Copied, so that the additions below stay here.
    yaml_implicit_resolvers = {first: list(rest) for first, rest in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice in full each time."""
        return True


for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})\Z"), _first)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    flat = not any(isinstance(value, (dict, list)) for value in values)
    return dumper.represent_sequence(_TAG + "seq", values, flow_style=flat)


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Only in double quotes are line breaks and invisible characters escaped, and so kept.
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)


def dump_yaml(tree: Any) -> str:
    """Return plain data as YAML: in its order, short lists on one line."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


@dataclass
class _Reader:
    source: str
    first_line: int | None
    problems: list[Problem]
    is_override: bool = False
    values: int = field(default=0)

    def origin(self, node: yaml.Node) -> Origin:
        line = None if self.first_line is None else self.first_line + node.start_mark.line
        return Origin(self.source, line, self.is_override)

    def read(self, node: yaml.Node, path: tuple[str | int, ...], origin: Origin | None = None) -> Node:
        origin = origin or self.origin(node)
        self.values += 1
        if self.values > MAX_VALUES or len(path) > MAX_DEPTH:
            limit = f"{MAX_VALUES} values" if self.values > MAX_VALUES else f"{MAX_DEPTH} levels"
            raise _too_much(origin, limit)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self.mapping(node, path), origin)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Node([self.read(child, (*path, i)) for i, child in enumerate(node.value)], origin)
        if isinstance(node, yaml.ScalarNode):
            try:
                return Node(_scalar(node.tag, node.value), origin)
            except KeyError:
                pass
            except ValueError as error:
                self.problems.append(Problem(origin, path, f"cannot be read: {error}"))
                return Node(None, origin)
        tag = node.tag.replace(_TAG, "!!")[:_SHOWN]
        self.problems.append(Problem(origin, path, f"tag {tag!r} is not allowed; write plain values"))
        return Node(None, origin)

    def mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, Node]:
        result: dict[str, Node] = {}
        for key_node, value_node in node.value:
            origin = self.origin(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                shown = key_node.value[:_SHOWN] if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self.problems.append(Problem(origin, path, f"key {shown!r} is not a string; put it in quotes"))
                continue
            key = key_node.value
            if not key.isascii() and any("\ud800" <= character <= "\udfff" for character in key):
                self.problems.append(Problem(origin, (*path, key), "half a character (a lone surrogate) in a key"))
                continue
            if key in result:
                first = f" (first on line {result[key].origin.line})" if result[key].origin.line else ""
                self.problems.append(Problem(origin, (*path, key), f"given twice{first}; remove one"))
            result[key] = self.read(value_node, (*path, key), origin)
        return result


def _too_much(origin: Origin, limit: str) -> ConfigError:
    return ConfigError(f"{origin}: more than {limit}; a configuration is smaller (check its aliases)")


def _scalar(tag: str, text: str) -> Any:
    """Convert a scalar.

    Raises:
        KeyError: the tag is unknown.
        ValueError: the text does not fit its tag.
    """
    kind = tag.removeprefix(_TAG)
    if kind == "str":
        if re.search("[\ud800-\udc7f\udd00-\udfff]", text):  # all but those of bytes that are not UTF-8
            raise ValueError("half a character (a lone surrogate)")  # which could not be written back
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "int":
        if len(text) > MAX_DIGITS:
            raise ValueError(f"an integer of {len(text)} digits; at most {MAX_DIGITS} are read")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise KeyError(tag)


def read_yaml(
    text: str, source: str, problems: list[Problem], *, path: tuple[str | int, ...] = (), is_override: bool = False
) -> Node:
    """Read one YAML document.

    Args:
        text: the document.
        source: its name in messages.
        problems: errors that do not end the reading (a duplicate key, a forbidden tag) are added here.
        path: key path of the document in the whole configuration.
        is_override: True if the text is the value of an override, which has no line numbers.

    Raises:
        ConfigError: the text is not valid YAML, or exceeds a limit.
    """
    origin = Origin(source, None, is_override)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: {len(text)} characters; a configuration has at most {MAX_BYTES}")
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Origin(source, mark.line + 1) if mark and not is_override else origin
        detail = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: not valid YAML: {detail}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except _TooMuch as error:
        line, limit = error.args
        raise _too_much(origin if is_override else Origin(source, line), limit) from None
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply; a configuration has at most {MAX_DEPTH} levels") from error
    if node is None:
        return Node(None, origin)
    return _Reader(source, None if is_override else 1, problems, is_override).read(node, path)
