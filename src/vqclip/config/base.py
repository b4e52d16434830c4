"""Typed configuration: a tree of pydantic models, read from YAML and from ``section.key=value`` overrides.

A section is a subclass of `Config` that stands beside the class it builds. A choice between sections is a union whose
members carry a literal ``kind``. A configuration is read as a whole or not at all, and every problem in it is reported
at once:

    my.yaml:12: optim.warmup_step: unknown key; did you mean "warmup_steps"?
    my.yaml:15: model.image.quantizer.levels[2]: got 1 (int); expected an integer >= 2 and <= 1000
    override "optim.lr=abc": optim.lr: got 'abc' (str); expected a number > 0
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, to_jsonable_python

from vqclip.config.types import (
    Place,
    describe,
    is_model,
    kinds_of,
    locate,
    members,
    model_of,
    quoted,
    show,
    step,
    unwrap,
)
from vqclip.config.yaml import MAX_BYTES, Node, Origin, Problem, dump_yaml, node_from_plain, path_text, read_yaml
from vqclip.errors import ConfigError
from vqclip.io.files import read_bounded

__all__ = ["Config", "json_schema", "load_config", "to_yaml"]

ConfigT = TypeVar("ConfigT", bound="Config")

_MAX_PROBLEMS = 200
_MAX_SHOWN = 120
"""Characters of an override in a message, and of a word that another one is suggested for."""
_INT64 = {"ge": -(2**63), "le": 2**63 - 1}
"""Range of an integer whose field sets no bound of its own; torch and numpy take no others."""


def _make_scalars_strict(schema: Any) -> None:
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _make_scalars_strict(item)
    elif isinstance(schema, dict):
        if schema.get("type") in ("int", "float", "str", "bool"):
            schema["strict"] = True
        if schema.get("type") == "int":
            lower = {} if "gt" in schema else {"ge": _INT64["ge"]}
            upper = {} if "lt" in schema else {"le": _INT64["le"]}
            schema.update(lower | upper | schema)
        for key, item in schema.items():
            if key not in ("default", "metadata", "expected"):
                _make_scalars_strict(item)


class Config(BaseModel):
    """Base of every section of the configuration.

    Unknown keys, NaN and infinity are refused; instances are frozen; a docstring under a field documents it. Scalars
    are strict: ``"3"`` and ``true`` are no integers, though an integer is a fine number; lists become tuples and
    strings become paths.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler, /) -> CoreSchema:
        # pydantic's own `strict` would refuse lists for tuples, strings for paths and dicts for sections as well, in
        # whatever is built from Python.
        schema = handler(source)
        _make_scalars_strict(handler.resolve_ref_schema(schema))
        return schema


def load_config(schema: type[ConfigT], path: str | Path | None = None, overrides: Sequence[str] = ()) -> ConfigT:
    """Reads a configuration from a YAML file and overrides.

    Args:
        schema: the model of the whole tree.
        path: YAML file; None starts from the defaults.
        overrides: ``section.key=value`` or ``section.list[0].key=value``, applied in order before anything is
            validated. The value is read as YAML. Where the file says nothing about a section, its default is what
            an override changes a part of.

    Raises:
        ConfigError: one line for every problem found in the file and the overrides.
    """
    problems: list[Problem] = []
    file = _read_file(Path(path), problems) if path is not None else Node({}, Origin(""))
    config, found = _validated(schema, file, overrides)
    problems += _blamed_on_overrides(schema, file, overrides, found)
    if problems or config is None:
        # In the order of the file, then the overrides.
        problems.sort(key=lambda p: (p.origin.is_override, p.origin.line or 0))
        lines = list(dict.fromkeys(str(problem) for problem in problems[:_MAX_PROBLEMS]))
        more = [f"... and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        raise ConfigError("\n".join(lines + more))
    return config


def _validated(schema: type[ConfigT], file: Node, overrides: Sequence[str]) -> tuple[ConfigT | None, list[Problem]]:
    """Applies overrides to what a file holds, and validates the result."""
    root, problems = copy.deepcopy(file), list[Problem]()
    for override in overrides:
        try:
            _apply(schema, root, override, problems)
        except ConfigError as error:
            problems.append(Problem(Origin("", is_override=True), (), str(error)))
    try:
        return schema.model_validate(root.plain()), problems
    except ValidationError as error:
        return None, problems + _problems(schema, root, error)


def _blamed_on_overrides(
    schema: type[Config], file: Node, overrides: Sequence[str], found: list[Problem]
) -> list[Problem]:
    """Names the overrides without which a problem of a whole section would not exist, in place of the file."""
    if all(problem.origin.is_override for problem in found):
        return found
    without = [_validated(schema, file, [*overrides[:n], *overrides[n + 1 :]])[1] for n in range(len(overrides))]
    for problem in found:
        causes = [each for each, left in zip(overrides, without, strict=True) if problem not in left]
        # An unknown key is a line of the file; its message tells of an override of `kind`.
        if causes and not problem.origin.is_override and not problem.message.startswith("unknown key"):
            problem.origin = Origin(", ".join(map(_label, causes)), is_override=True)
    return found


def suggest_keys(schema: type[BaseModel], name: str) -> list[str]:
    """Finds the key paths, outside of lists, that a word such as ``lr`` or ``batch-size`` may stand for.

    Returns:
        The shortest paths that end in the word, else in a word like it; empty for none.
    """
    word = name.replace("-", "_")
    if not word or len(word) > _MAX_SHOWN:
        return []
    paths = list(dict.fromkeys(_key_paths(schema)))
    found = [path for path in paths if f".{path}".endswith(f".{word}")]
    if not found:
        close = difflib.get_close_matches(
            word.rpartition(".")[2], {path.rpartition(".")[2] for path in paths}, n=1, cutoff=0.75
        )
        found = [path for path in paths if path.rpartition(".")[2] in close]
    least = min((path.count(".") for path in found), default=0)
    return [path for path in found if path.count(".") == least][:3]


def _key_paths(model: type[BaseModel], prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for member in members(unwrap(field.annotation)[0]):
            if is_model(member) and member not in above:
                yield from _key_paths(member, f"{prefix}{name}.", (*above, model))


def to_yaml(config: Config, change: Callable[[Any], Any] | None = None) -> str:
    """The whole tree, defaults included, as YAML that `load_config` reads back to an equal one.

    Args:
        config: the tree.
        change: what to make of it, as plain data, before; such as leaving credentials out.
    """
    # In two steps: pydantic 2.10's JSON mode writes the list of a `Path | tuple[Path, ...]` as one string.
    plain = to_jsonable_python(config.model_dump())
    return dump_yaml(plain if change is None else change(plain))


def json_schema(schema: type[Config]) -> dict[str, Any]:
    """JSON schema of a configuration, for editors that check and complete YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema.model_json_schema()}


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


# --- overrides --------------------------------------------------------------------------------------------------------

_KEY = r"[^\s.\[\]=]+"
_INDEX = re.compile(r"[0-9]{1,9}")
_OVERRIDE = re.compile(rf"({_KEY}(?:\.{_KEY}|\[{_INDEX.pattern}\])*)=(.*)", re.DOTALL)


def _label(override: str) -> str:
    return f'override "{override if len(override) <= _MAX_SHOWN else override[: _MAX_SHOWN - 3] + "..."}"'


def _apply(schema: type[Config], root: Node, override: str, problems: list[Problem]) -> None:
    """Sets one value in the tree."""
    label = _label(override)
    match = _OVERRIDE.fullmatch(override.strip())
    if match is None:
        raise ConfigError(f"{label}: expected section.key=value or section.list[0]=value")
    origin = Origin(label, is_override=True)
    node, place = root, Place((), schema)
    *parents, last = parts = re.findall(r"[^.\[\]]+", match[1])
    path = tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)
    value = read_yaml(match[2], label, problems, path=path, is_override=True)
    for part in parents:
        node, place = _descend(node, place, part, origin)
    key = _checked_part(node, place, last, origin)
    if key == "kind" and isinstance(node.value, dict) and _kind(node) != value.value:
        # Another kind has other keys: forget those that only the default had.
        node.value = {name: child for name, child in node.value.items() if not child.is_default}
    node.is_default = False
    node.value[key] = value


def _descend(node: Node, place: Place, part: str, origin: Origin) -> tuple[Node, Place]:
    """One step towards the value to set; makes the section where there is none."""
    key = _checked_part(node, place, part, origin)
    node.is_default = False
    model = model_of(place.annotation, _kind(node))
    place = step(place if model is None else Place(place.path, model), key)
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


def _checked_part(node: Node, place: Place, part: str, origin: Origin) -> str | int:
    """The part as a key of `node` or an index into it; an error where `node` has neither."""
    where = f"{origin}: {path_text(place.path)}"
    if isinstance(node.value, dict):
        return part
    if isinstance(node.value, list):
        size = len(node.value)
        if not _INDEX.fullmatch(part) or int(part) >= size:
            allowed = f"an index from 0 to {size - 1}" if size else "no index, for the list is empty"
            raise ConfigError(f"{where}: a list; got {show(part)}, expected {allowed}")
        return int(part)
    raise ConfigError(f"{where}: is {show(node.value)} ({type(node.value).__name__}), which has no {show(part)} to set")


def _kind(node: Node | None) -> Any:
    kind = node.child("kind") if node is not None and isinstance(node.value, dict) else None
    return kind.value if kind is not None else None


# --- wording ----------------------------------------------------------------------------------------------------------


def _problems(schema: type[Config], root: Node, error: ValidationError) -> list[Problem]:
    """Puts pydantic's errors in our words, one for every place."""
    found: dict[tuple[Any, ...], Problem] = {}
    for detail in error.errors(include_url=False):
        if _counts_good_ones(detail):
            continue
        if len(found) > _MAX_PROBLEMS:  # nobody reads more of them, and each takes time
            break
        place = locate(schema, detail["loc"])
        problem = _problem(place, root, detail)
        found.setdefault(problem.path, problem)
    return list(found.values())


def _counts_good_ones(error: ErrorDetails) -> bool:
    """Whether a list is said to be too short only because pydantic does not count its elements that are wrong."""
    value = error["input"]
    return error["type"] == "too_short" and isinstance(value, list) and len(value) >= error["ctx"]["min_length"]


def _problem(place: Place, root: Node, error: ErrorDetails) -> Problem:
    path, node, reached = place.path, root, True
    kind = error["type"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, "kind")
    owner = root
    for part in path:
        child = node.child(part)
        if child is None:
            reached = False
            break
        owner, node = node, child
    if kind == "extra_forbidden":
        message = _unknown_key(place, owner, node)
    elif kind in ("missing", "union_tag_not_found"):
        message = f"missing; expected {_expected(place, kind)}"
    elif kind in ("value_error", "assertion_error"):
        message = str(error.get("ctx", {}).get("error") or error["msg"])
        if reached and not isinstance(node.value, (dict, list)):
            message = f"{_got(node)}; {message}"
    else:
        message = f"{_got(node)}; expected {_expected(place, kind, error)}{_did_you_mean(place, node)}"
    return Problem(node.origin, path, message)


def _got(node: Node) -> str:
    value = node.plain()
    return f"got {show(value)}" + ("" if value is None else f" ({type(value).__name__})")


def _expected(place: Place, kind: str, error: ErrorDetails | None = None) -> str:
    if kind.startswith("union_tag"):
        return f"one of {quoted(list(kinds_of(place.annotation)))}"
    if kind == "finite_number":
        return "a finite number"
    words = describe(place.annotation, place.metadata)
    if error is not None and words in ("Any", "object"):
        return error["msg"]
    limit = error.get("ctx", {}).get("le") if error is not None else None
    if limit == _INT64["le"]:
        words += f"{' and' if '=' in words or '>' in words else ''} <= {limit}"
    return words.rstrip(",")


def did_you_mean(words: Sequence[str]) -> str:
    """The end of a message that suggests some words; empty for none."""
    return f"; did you mean {quoted(words, 'or')}?" if words else ""


def _closest(word: str, allowed: Sequence[Any]) -> str:
    if len(word) > _MAX_SHOWN:
        return ""
    return did_you_mean(difflib.get_close_matches(word, [name for name in allowed if isinstance(name, str)], n=1))


def _did_you_mean(place: Place, node: Node) -> str:
    if not isinstance(node.value, str):
        return ""
    allowed: list[Any] = list(kinds_of(place.annotation))
    for member in members(place.annotation):
        allowed += getattr(member, "__args__", ())
    return _closest(node.value, allowed)


def _unknown_key(place: Place, owner: Node, node: Node) -> str:
    allowed = list(place.owner.model_fields) if place.owner else []
    close = _closest(str(place.path[-1]), allowed)
    if not close and place.owner and len(place.path) == 1:
        close = did_you_mean(suggest_keys(place.owner, str(place.path[0])))
    message = "unknown key" + (close or f"; expected one of {', '.join(allowed)}")
    kind = owner.child("kind")
    if kind is not None and kind.origin.is_override and not node.origin.is_override:
        section = path_text(place.path[:-1])
        message += f' (kind is "{kind.value}" by override; {section}={{kind: {kind.value}}} replaces the whole section)'
    return message
