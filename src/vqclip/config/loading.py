"""Read a configuration from a YAML file and ``section.key=value`` overrides.

read the file -> apply the overrides in order -> validate the tree -> on errors, one line for every problem:

my.yaml:12: optim.warmup_step: unknown key; did you mean "warmup_steps"?
my.yaml:15: model.image.quantizer.levels[2]: got 1 (int); expected an integer >= 2 and <= 1000
override "optim.lr=abc": optim.lr: got 'abc' (str); expected a number > 0
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vqclip.config.base import Config
from vqclip.config.messages import MAX_PROBLEMS, describe_problems
from vqclip.config.overrides import apply_override, override_label
from vqclip.config.types import show
from vqclip.config.yaml import MAX_BYTES, Node, Origin, Problem, node_from_plain, read_yaml
from vqclip.errors import ConfigError
from vqclip.io.files import read_bounded

ConfigT = TypeVar("ConfigT", bound=Config)


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
    return _load(schema, _read_file(Path(source), problems), overrides, problems)


def parse_config(
    schema: type[ConfigT], values: Mapping[str, Any] | Config, overrides: Sequence[str] = (), origin: str = ""
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
            apply_override(schema, root, override, problems)
        except ConfigError as error:
            problems.append(Problem(Origin("", is_override=True), (), str(error)))
    try:
        return schema.model_validate(root.plain()), problems
    except ValidationError as error:
        return None, problems + describe_problems(schema, root, error)


def _blame_overrides(schema: type[Config], file: Node, overrides: Sequence[str], found: list[Problem]) -> list[Problem]:
    """Name the overrides that cause a problem of a whole section, instead of the file."""
    if all(problem.origin.is_override for problem in found):
        return found
    without = [_validate(schema, file, [*overrides[:n], *overrides[n + 1 :]])[1] for n in range(len(overrides))]
    for problem in found:
        causes = [each for each, left in zip(overrides, without, strict=True) if problem not in left]
        # An unknown key is in the file; its message already names an override of `kind`.
        if causes and not problem.origin.is_override and not problem.message.startswith("unknown key"):
            problem.origin = Origin(", ".join(map(override_label, causes)), is_override=True)
    return found


def _read_data(values: Any, origin: str) -> Node:
    """Wrap nested dicts and lists; raise ConfigError for objects that are neither plain nor sections."""
    try:  # in two steps, as in `to_yaml`
        plain = to_jsonable_python(values.model_dump() if isinstance(values, Config) else values)
    except (PydanticSerializationError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"configuration: not plain data ({error}); expected dicts, lists, texts, numbers and sections"
        ) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"configuration: got {type(values).__name__}; expected a file, a dict or a configuration")
    return node_from_plain(plain, Origin(origin))


def _read_file(path: Path, problems: list[Problem]) -> Node:
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
