"""Read a configuration from a YAML file and ``section.key=value`` overrides.

read the file -> apply the overrides in order -> validate the tree -> on errors, one line for every problem:

my.yaml:12: optim.warmup_step: unknown key; did you mean "warmup_steps"?
my.yaml:15: model.image.quantizer.levels[2]: got 1 (int); expected an integer >= 2 and <= 1000
override "optim.lr=abc": optim.lr: got 'abc' (str); expected a number > 0
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vqclip.config.messages import MAX_PROBLEMS, SchemaLocation, descend, describe_problems, model_of, show
from vqclip.config.yaml import MAX_BYTES, Node, Origin, Problem, node_from_plain, path_text, read_yaml
from vqclip.errors import ConfigError
from vqclip.io.files import read_bounded

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_MAX_SHOWN = 120
"""Characters of an override in a message."""
_INDEX = r"[0-9]{1,9}"
_KEY = r"[^\s.\[\]=]+"
_OVERRIDE = re.compile(rf"({_KEY}(?:\.{_KEY}|\[{_INDEX}\])*)=(.*)", re.DOTALL)


def load_config(
    schema: type[ConfigT],
    source: str | Path | Mapping[str, Any] | ConfigT | None = None,
    overrides: Sequence[str] = (),
) -> ConfigT:
    """Read a configuration from a YAML file, plain data or another configuration, and overrides.

    Args:
        schema: the model of the whole tree.
        source: a YAML file; or nested dicts and lists, which may contain sections as objects; or a configuration, which
            is returned as it is without overrides. None starts from the defaults.
        overrides: ``section.key=value`` or ``section.list[0].key=value``, applied in order before anything is
            validated. The value is read as YAML. An override of a section that the file does not contain changes
            a part of the section's default.

    Raises:
        ConfigError: one line for every problem found in the file and the overrides.
    """
    if isinstance(source, schema) and not overrides:
        return source
    if not isinstance(source, (str, Path)):
        return parse_config(schema, {} if source is None else source, overrides)
    problems: list[Problem] = []
    return _load(schema, read_file(Path(source), problems), overrides, problems)


def parse_config(
    schema: type[ConfigT], values: Mapping[str, Any] | BaseModel, overrides: Sequence[str] = (), origin: str = ""
) -> ConfigT:
    """Return a configuration made of plain values and of overrides, as `load_config` makes one of a file.

    Args:
        schema: the model of the whole tree.
        values: dicts, lists and scalars, which may contain sections as objects.
        overrides: as for `load_config`.
        origin: place that the values come from, for messages.

    Raises:
        ConfigError: one line for every problem found.
    """
    return _load(schema, _read_data(values, origin), overrides, [])


def _load(schema: type[ConfigT], file: Node, overrides: Sequence[str], problems: list[Problem]) -> ConfigT:
    """Return the configuration; raise ConfigError for these problems and all that are found."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the string {overrides!r}; expected a list of strings")
    config, found = _validate(schema, file, overrides)
    problems += _blame_overrides(schema, file, overrides, found)
    if problems or config is None:
        # Problems of the file in the order of its lines, then those of the overrides.
        problems.sort(key=lambda p: (p.origin.is_override, p.origin.line or 0))
        lines = list(dict.fromkeys(str(problem) for problem in problems[:MAX_PROBLEMS]))
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise ConfigError("\n".join(lines + more))
    return config


def _validate(schema: type[ConfigT], file: Node, overrides: Sequence[str]) -> tuple[ConfigT | None, list[Problem]]:
    """Apply overrides to the contents of a file, and validate the result."""
    root, problems = copy.deepcopy(file), list[Problem]()
    for override in overrides:
        try:
            _apply_override(schema, root, override, problems)
        except ConfigError as error:
            problems.append(Problem(Origin("", is_override=True), (), str(error)))
    try:
        return schema.model_validate(root.plain()), problems
    except ValidationError as error:
        return None, problems + describe_problems(schema, root, error)


def _blame_overrides(
    schema: type[BaseModel], file: Node, overrides: Sequence[str], found: list[Problem]
) -> list[Problem]:
    """Name the overrides that cause a problem of a whole section, instead of the file."""
    if all(problem.origin.is_override for problem in found):
        return found
    without = [_validate(schema, file, [*overrides[:n], *overrides[n + 1 :]])[1] for n in range(len(overrides))]
    for problem in found:
        causes = [each for each, left in zip(overrides, without, strict=True) if problem not in left]
        # An unknown key is in the file; its message already names an override of `kind`.
        if causes and not problem.origin.is_override and not problem.message.startswith("unknown key"):
            problem.origin = Origin(", ".join(map(_label, causes)), is_override=True)
    return found


def _label(override: str) -> str:
    """Return the name of an override in messages."""
    return f'override "{override if len(override) <= _MAX_SHOWN else override[: _MAX_SHOWN - 3] + "..."}"'


def _apply_override(schema: type[BaseModel], root: Node, override: str, problems: list[Problem]) -> None:
    """Set one value in the tree; add problems of the value to ``problems``.

    Raises:
        ConfigError: the override is malformed, or its key does not fit the tree.
    """
    label = _label(override)
    match = _OVERRIDE.fullmatch(override.strip())
    if match is None:
        raise ConfigError(f"{label}: expected section.key=value or section.list[0]=value")
    origin = Origin(label, is_override=True)
    node, place = root, SchemaLocation((), schema)
    *parents, last = parts = re.findall(r"[^.\[\]]+", match[1])
    path = tuple(int(part) if re.fullmatch(_INDEX, part) else part for part in parts)
    text = f'"{match[2]}"' if match[2] in ("|", ">", ",") else match[2]  # for YAML, the beginning of something longer
    value = read_yaml(text, label, problems, path=path, is_override=True)
    for part in parents:
        node, place = _descend(node, place, part, origin)
    key = _checked_part(node, place, last, origin)
    if key == "kind" and isinstance(node.value, dict) and _kind(node) != value.value:
        # Another kind has other keys: drop those that come from the default.
        node.value = {name: child for name, child in node.value.items() if not child.is_default}
    node.is_default = False
    node.value[key] = value


def _descend(node: Node, place: SchemaLocation, part: str, origin: Origin) -> tuple[Node, SchemaLocation]:
    """Go one key towards the value to set; add the section if it is missing."""
    key = _checked_part(node, place, part, origin)
    node.is_default = False
    model = model_of(place.annotation, _kind(node))
    place = descend(place if model is None else SchemaLocation(place.path, model), key)
    child = node.child(key)
    if child is None:
        child = node.value[key] = _default(model, str(key), origin)
    elif child.value is None:
        child.value = {}
    return child, place


def _default(model: type[BaseModel] | None, key: str, origin: Origin) -> Node:
    field = model.model_fields.get(key) if model else None
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    value = to_jsonable_python(default)
    return node_from_plain(value if isinstance(value, (dict, list)) else {}, origin, is_default=True)


def _checked_part(node: Node, place: SchemaLocation, part: str, origin: Origin) -> str | int:
    """Return the part as a key of `node` or an index into it."""
    where = f"{origin}: {path_text(place.path)}"
    if isinstance(node.value, dict):
        return part
    if isinstance(node.value, list):
        size = len(node.value)
        if not re.fullmatch(_INDEX, part) or int(part) >= size:
            allowed = f"an index from 0 to {size - 1}" if size else "no index, because the list is empty"
            raise ConfigError(f"{where}: a list; got {show(part)}, expected {allowed}")
        return int(part)
    raise ConfigError(f"{where}: is {show(node.value)} ({type(node.value).__name__}), which has no {show(part)} to set")


def _kind(node: Node | None) -> Any:
    kind = node.child("kind") if node is not None and isinstance(node.value, dict) else None
    return kind.value if kind is not None else None


def _read_data(values: Any, origin: str) -> Node:
    """Wrap nested dicts and lists; raise ConfigError for objects that are neither plain nor sections."""
    try:  # in two steps, as in `to_yaml`
        plain = to_jsonable_python(_what_was_set(values))
    except (PydanticSerializationError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"configuration: not plain data ({error}); expected dicts, lists, texts, numbers and sections"
        ) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"configuration: got {type(values).__name__}; expected a file, a dict or a configuration")
    return node_from_plain(plain, Origin(origin))


def _what_was_set(values: Any) -> Any:
    """Return sections as dicts of the keys that were set: a default stays one, which may follow from other settings."""
    if isinstance(values, BaseModel):
        names = [name for name in type(values).model_fields if name in values.model_fields_set or name == "kind"]
        return {name: _what_was_set(getattr(values, name)) for name in names}
    if isinstance(values, Mapping):
        return {name: _what_was_set(value) for name, value in values.items()}
    return [_what_was_set(each) for each in values] if isinstance(values, (list, tuple)) else values


def packaged_file(name: str) -> Path:
    """Return the path of a configuration of this package, ``configs/NAME.yaml``: the wheel's, or the checkout's."""
    package = Path(__file__).parents[1]
    return (package if (package / name).is_file() else package.parents[1]) / name


def read_file(path: Path, problems: list[Problem]) -> Node:
    """Read a YAML file; errors that do not end the reading are added to ``problems``.

    ``configs/NAME.yaml`` is that of the current folder, or else that of this package.

    Raises:
        ConfigError: it cannot be read, or is no mapping of keys.
    """
    if path.parent == Path("configs") and not path.exists() and packaged_file(str(path)).is_file():
        path = packaged_file(str(path))
    try:
        data = read_bounded(path, 4 * MAX_BYTES)  # a character has at most four bytes
        if len(data) > 4 * MAX_BYTES:
            raise ConfigError(f"{path}: more than {4 * MAX_BYTES} bytes; a configuration has fewer")
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file (looked in {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    root = read_yaml(text, str(path), problems)
    if root.value is None:
        root.value = {}
    if not isinstance(root.value, dict):
        kind = type(root.value).__name__
        raise ConfigError(f"{path}: got {show(root.plain())} ({kind}) at the top; expected `key: value` lines")
    return Node(root.value, Origin(str(path)))
