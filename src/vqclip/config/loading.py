"""Read a configuration from a YAML file and ``section.key=value`` overrides.

read the file -> apply the overrides in order -> validate the tree -> on errors, one line for every problem:

my.yaml:12: optim.warmup_step: unknown key; did you mean "warmup_steps"?
my.yaml:15: model.image.quantizer.levels[2]: got 1 (int); expected an integer >= 2 and <= 1000
override "optim.lr=abc": optim.lr: got 'abc' (str); expected a number > 0
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vqclip.config.messages import MAX_PROBLEMS, SchemaLocation, descend, describe_problems, model_of, show
from vqclip.config.yaml import MAX_BYTES, KeyPath, Origin, Origins, Problem, path_text, read_yaml
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
    return _load(schema, *read_file(Path(source), problems), overrides, problems)


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
    try:  # in two steps, as in `to_yaml`
        plain = to_jsonable_python(_what_was_set(values))
    except (PydanticSerializationError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"configuration: not plain data ({error}); expected dicts, lists, texts, numbers and sections"
        ) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"configuration: got {type(values).__name__}; expected a file, a dict or a configuration")
    return _load(schema, plain, dict.fromkeys(_paths(plain), Origin(origin)), overrides, [])


def _what_was_set(values: Any) -> Any:
    """Return sections as dicts of the keys that were set: a default stays one, which may follow from other settings."""
    if isinstance(values, BaseModel):
        names = [name for name in type(values).model_fields if name in values.model_fields_set or name == "kind"]
        return {name: _what_was_set(getattr(values, name)) for name in names}
    if isinstance(values, Mapping):
        return {name: _what_was_set(value) for name, value in values.items()}
    return [_what_was_set(each) for each in values] if isinstance(values, (list, tuple)) else values


def _paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the key paths of a tree and of all its parts."""
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from _paths(child, (*path, key))


def _load(
    schema: type[ConfigT], plain: Any, origins: Origins, overrides: Sequence[str], problems: list[Problem]
) -> ConfigT:
    """Return the configuration; raise ConfigError for these problems and all that are found."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the string {overrides!r}; expected a list of strings")
    config, found = _validate(schema, plain, origins, overrides)
    if any(not problem.origin.is_override for problem in found):
        _blame_overrides(schema, plain, origins, overrides, found)
    problems += found
    if problems or config is None:
        # Problems of the file in the order of its lines, then those of the overrides.
        problems.sort(key=lambda p: (p.origin.is_override, p.origin.line or 0))
        lines = list(dict.fromkeys(str(problem) for problem in problems[:MAX_PROBLEMS]))
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise ConfigError("\n".join(lines + more))
    return config


def _validate(
    schema: type[ConfigT], plain: Any, origins: Origins, overrides: Sequence[str]
) -> tuple[ConfigT | None, list[Problem]]:
    """Apply overrides to a copy of the contents of a file, and validate the result."""
    plain, origins, problems = copy.deepcopy(plain), dict(origins), list[Problem]()
    for override in overrides:
        try:
            apply_override(schema, plain, origins, override, problems)
        except ConfigError as error:
            problems.append(Problem(Origin("", is_override=True), (), str(error)))
    try:
        return schema.model_validate(plain), problems
    except ValidationError as error:
        return None, problems + describe_problems(schema, plain, origins, error)


def _blame_overrides(
    schema: type[BaseModel], plain: Any, origins: Origins, overrides: Sequence[str], found: list[Problem]
) -> None:
    """Name the overrides that cause a problem of a whole section, instead of the file."""
    rest = [[*overrides[:number], *overrides[number + 1 :]] for number in range(len(overrides))]
    without = [_validate(schema, plain, origins, each)[1] for each in rest]
    for problem in found:
        causes = [each for each, left in zip(overrides, without, strict=True) if problem not in left]
        # An unknown key is in the file; its message already names an override of `kind`.
        if causes and not problem.origin.is_override and not problem.message.startswith("unknown key"):
            problem.origin = Origin(", ".join(map(_label, causes)), is_override=True)


def _label(override: str) -> str:
    """Return the name of an override in messages."""
    return f'override "{override if len(override) <= _MAX_SHOWN else override[: _MAX_SHOWN - 3] + "..."}"'


def apply_override(
    schema: type[BaseModel] | None, plain: Any, origins: Origins, override: str, problems: list[Problem]
) -> None:
    """Set one value in a tree; add problems of the value to ``problems``.

    Args:
        schema: of the tree, whose defaults a section that is not there begins with; None: it begins empty.
        plain: the tree, which is changed.
        origins: places of its values, which are changed.
        override: ``section.key=value``.
        problems: errors that do not end the reading.

    Raises:
        ConfigError: the override is malformed, or its key does not fit the tree.
    """
    origin = Origin(_label(override), is_override=True)
    match = _OVERRIDE.fullmatch(override.strip())
    if match is None:
        raise ConfigError(f"{origin}: expected section.key=value or section.list[0]=value")
    node, place, path = plain, SchemaLocation((), schema), KeyPath()
    *parents, last = re.findall(r"[^.\[\]]+", match[1])
    for part in parents:
        key = _key_in(node, path, part, origin)
        path = (*path, key)
        model = model_of(place.annotation, node.get("kind") if isinstance(node, dict) else None)
        place = descend(place if model is None else SchemaLocation(place.path, model), key)
        if isinstance(node, dict) and key not in node:
            node[key] = _default(model, str(key))
        origins.setdefault(path, origin)
        node[key] = {} if node[key] is None else node[key]
        node = node[key]
    key = _key_in(node, path, last, origin)
    text = f'"{match[2]}"' if match[2] in ("|", ">", ",") else match[2]  # for YAML, the beginning of something longer
    value, places = read_yaml(text, origin.source, problems, path=(*path, key), is_override=True)
    if key == "kind" and isinstance(node, dict) and node.get("kind") != value:
        # Another kind has other keys: drop those that come from the default.
        for other in [other for other in node if (*path, other) not in origins]:
            del node[other]
    for each in [each for each in origins if each[: len(path) + 1] == (*path, key)]:
        del origins[each]
    node[key] = value
    origins |= places


def _default(model: type[BaseModel] | None, key: str) -> Any:
    """Return the default of a section; an empty one if it has none."""
    field = model.model_fields.get(key) if model else None
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    value = to_jsonable_python(default)
    return value if isinstance(value, (dict, list)) else {}


def _key_in(node: Any, path: KeyPath, part: str, origin: Origin) -> str | int:
    """Return the part of an override's key as a key of a node or an index into it."""
    if isinstance(node, dict):
        return part
    where = f"{origin}: {path_text(path)}"
    if isinstance(node, list):
        if re.fullmatch(_INDEX, part) and int(part) < len(node):
            return int(part)
        allowed = f"an index from 0 to {len(node) - 1}" if node else "no index, because the list is empty"
        raise ConfigError(f"{where}: a list; got {show(part)}, expected {allowed}")
    raise ConfigError(f"{where}: is {show(node)} ({type(node).__name__}), which has no {show(part)} to set")


def packaged_file(name: str) -> Path:
    """Return the path of a configuration of this package, ``configs/NAME.yaml``: the wheel's, or the checkout's."""
    package = Path(__file__).parents[1]
    return (package if (package / name).is_file() else package.parents[1]) / name


def read_file(path: Path, problems: list[Problem]) -> tuple[dict[str, Any], Origins]:
    """Read a YAML file as plain data and their places; errors that do not end the reading are added to ``problems``.

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
    plain, origins = read_yaml(text, str(path), problems)
    plain = {} if plain is None else plain
    if not isinstance(plain, dict):
        kind = type(plain).__name__
        raise ConfigError(f"{path}: got {show(plain)} ({kind}) at the top; expected `key: value` lines")
    return plain, origins | {(): Origin(str(path))}
