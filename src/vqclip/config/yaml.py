"""Read and write YAML for configuration files: plain data with line numbers.

Scalars follow the core schema of YAML 1.2: ``1e-4`` is a number, ``no``, ``on`` and ``12:30`` are strings. Only
mappings, lists, strings, numbers, booleans and null exist: a tag cannot name a Python object, and the size, depth and
number of values are limited, so a hostile file costs little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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


KeyPath = tuple[str | int, ...]
Origins = dict[KeyPath, Origin]
"""Places of the values of a configuration: key path → place; a value without one is part of a default."""


def origin_of(origins: Origins, path: KeyPath) -> Origin:
    """Return the place of a value, or of the nearest section above it that has one."""
    return next(origins[path[:length]] for length in range(len(path), -1, -1) if path[:length] in origins)


@dataclass
class Problem:
    """One line of a configuration error."""

    origin: Origin
    path: KeyPath
    message: str

    def __str__(self) -> str:
        where = [str(self.origin), path_text(self.path)]
        return ": ".join([part for part in where if part] + [self.message])


def path_text(path: KeyPath) -> str:
    """Return a key path as users write it: ``quantizer.levels[2]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        key = printable(part if len(part) <= _SHOWN else part[: _SHOWN - 3] + "...", one_line=True)
        text += f".{key}" if text else key
    return text


class _Loader(yaml.SafeLoader):
    """YAML loader that composes nodes only; `_Reader` makes the Python values."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    NON_PRINTABLE = re.compile(rf"(?![\udc80-\udcff]){yaml.SafeLoader.NON_PRINTABLE.pattern}")  # type: ignore[misc]
    """PyYAML's, but for surrogates that stand for bytes which are not UTF-8, in a path on a command line."""


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


class _Reader:
    """Makes the plain value of a document, and finds the place of each part of it."""

    def __init__(self, source: str, is_override: bool, problems: list[Problem]):
        self.source, self.is_override, self.problems = source, is_override, problems
        self.origins: Origins = {}
        self.values = 0  # more than there are origins if a key is given twice

    def origin(self, node: yaml.Node) -> Origin:
        return Origin(self.source, None if self.is_override else 1 + node.start_mark.line, self.is_override)

    def read(self, node: yaml.Node, path: KeyPath, origin: Origin) -> Any:
        self.values += 1
        if self.values > MAX_VALUES or len(path) > MAX_DEPTH:
            limit = f"{MAX_VALUES} values" if self.values > MAX_VALUES else f"{MAX_DEPTH} levels"
            raise ConfigError(f"{origin}: more than {limit}; a configuration is smaller (check its aliases)")
        self.origins[path] = origin
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.read(each, (*path, i), self.origin(each)) for i, each in enumerate(node.value)]
        problem = f"tag {node.tag.replace(_TAG, '!!')[:_SHOWN]!r} is not allowed; write plain values"
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node.tag, node.value)
            except KeyError:
                pass
            except ValueError as error:
                problem = f"cannot be read: {error}"
        self.problems.append(Problem(origin, path, problem))
        return None

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            origin, key = self.origin(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                shown = key[:_SHOWN] if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self.problems.append(Problem(origin, path, f"key {shown!r} is not a string; put it in quotes"))
                continue
            below = (*path, key)
            if not key.isascii() and any("\ud800" <= character <= "\udfff" for character in key):
                self.problems.append(Problem(origin, below, "half a character (a lone surrogate) in a key"))
                continue
            if key in result:
                line = self.origins[below].line
                first = f" (first on line {line})" if line else ""
                self.problems.append(Problem(origin, below, f"given twice{first}; remove one"))
            result[key] = self.read(value_node, below, origin)
        return result


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
    text: str, source: str, problems: list[Problem], *, path: KeyPath = (), is_override: bool = False
) -> tuple[Any, Origins]:
    """Read one YAML document; return it as plain dicts, lists and scalars, and the place of each of them.

    Args:
        text: the document.
        source: its name in messages.
        problems: errors that do not end the reading (a duplicate key, a forbidden tag) are added here.
        path: key path of the document in the whole configuration.
        is_override: True if the text is the value of an override, which has no line numbers.

    Raises:
        ConfigError: the text is not valid YAML, or exceeds a limit.
    """
    origin, reader = Origin(source, None, is_override), _Reader(source, is_override, problems)
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
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply; a configuration has at most {MAX_DEPTH} levels") from error
    value = None if node is None else reader.read(node, path, reader.origin(node))
    return value, reader.origins | {path: reader.origins.get(path, origin)}
