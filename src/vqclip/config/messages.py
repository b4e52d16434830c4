"""Put pydantic's errors in words: got, expected, and the key that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vqclip.config.base import INT64
from vqclip.config.types import (
    SchemaLocation,
    descend,
    describe,
    is_model,
    join_quoted,
    kinds_of,
    locate,
    members,
    show,
    unwrap,
)
from vqclip.config.yaml import Node, Problem, path_text

MAX_PROBLEMS = 200
"""Problems in one error; more are only counted."""
_MAX_WORD = 120
"""Characters of a word that another one is suggested for."""


def describe_problems(schema: type[BaseModel], root: Node, error: ValidationError) -> list[Problem]:
    """Return one problem for each key that pydantic reports an error for."""
    found: dict[tuple[Any, ...], Problem] = {}
    plain = root.plain()
    for detail in error.errors(include_url=False):
        if _ignores_invalid_elements(detail):
            continue
        if len(found) > MAX_PROBLEMS:  # each takes time, and no one reads more
            break
        place = locate(schema, detail["loc"], plain)
        if place is None:
            continue
        problem = _describe_problem(place, root, detail)
        found.setdefault(problem.path, problem)
    return list(found.values())


def _ignores_invalid_elements(error: ErrorDetails) -> bool:
    """Return whether a list is too short only because pydantic does not count its invalid elements."""
    value = error["input"]
    return error["type"] == "too_short" and isinstance(value, list) and len(value) >= error["ctx"]["min_length"]


def _describe_problem(place: SchemaLocation, root: Node, error: ErrorDetails) -> Problem:
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
    if reached and kind in ("missing", "extra_forbidden") and len(members(place.annotation)) > 1:
        message = f"{_describe_got(node)}; expected {_describe_expected(place, kind)}"  # of one member of the union
    elif kind == "extra_forbidden":
        message = _describe_unknown_key(place, owner, node)
    elif kind in ("missing", "union_tag_not_found"):
        message = f"missing; expected {_describe_expected(place, kind)}"
    elif kind in ("value_error", "assertion_error"):
        message = str(error.get("ctx", {}).get("error") or error["msg"])
        if reached and not isinstance(node.value, (dict, list)):
            message = f"{_describe_got(node)}; {message}"
    else:
        hint = _suggest_value(place, node, kind.startswith("union_tag"))
        message = f"{_describe_got(node)}; expected {_describe_expected(place, kind, error)}{hint}"
    return Problem(node.origin, path, message)


def _describe_got(node: Node) -> str:
    value = node.plain()
    return f"got {show(value)}" + ("" if value is None else f" ({type(value).__name__})")


def _describe_expected(place: SchemaLocation, kind: str, error: ErrorDetails | None = None) -> str:
    if kind.startswith("union_tag"):
        return f"one of {join_quoted(list(kinds_of(place.annotation)))}"
    if kind == "finite_number":
        return "a finite number"
    words = describe(place.annotation, place.metadata)
    if error is not None and words in ("Any", "object"):
        return error["msg"]
    limit = error.get("ctx", {}).get("le") if error is not None else None
    if limit == INT64["le"]:
        words += f"{' and' if '=' in words or '>' in words else ''} <= {limit}"
    return words.rstrip(",")


def did_you_mean(words: Sequence[str]) -> str:
    """Return the end of a message that suggests words; empty without words."""
    return f"; did you mean {join_quoted(words, 'or')}?" if words else ""


def _suggest_closest(word: str, allowed: Sequence[Any]) -> str:
    if len(word) > _MAX_WORD:
        return ""
    return did_you_mean(difflib.get_close_matches(word, [name for name in allowed if isinstance(name, str)], n=1))


def _suggest_value(place: SchemaLocation, node: Node, is_kind: bool) -> str:
    if not isinstance(node.value, str):
        return ""
    if len(node.value) <= _MAX_WORD and not is_kind:
        item = descend(place, 0).annotation if len(members(place.annotation)) == 1 else Any
        if section := _write_section(item, node.value):
            return f"; did you mean [{section}]?"
        if section := _write_section(place.annotation, node.value):
            return f"; did you mean {section}?"
    allowed: list[Any] = list(kinds_of(place.annotation))
    for member in members(place.annotation):
        allowed += getattr(member, "__args__", ())
    return _suggest_closest(node.value, allowed)


def _write_section(annotation: Any, word: str) -> str:
    """Return the section that a word probably stands for, by its kind or its path; empty if there is none."""
    kinds = kinds_of(annotation)
    close = difflib.get_close_matches(word, kinds, n=1)
    fields = kinds[close[0]].model_fields if close else {}
    needed = [name for name, field in fields.items() if field.is_required() and name != "kind"]
    if any("path" in each.model_fields for each in kinds.values()) and (needed or not close):
        return f"{{path: {word}}}"
    return f"{{{', '.join([f'kind: {close[0]}', *(f'{name}: ...' for name in needed)])}}}" if close else ""


def _describe_unknown_key(place: SchemaLocation, owner: Node, node: Node) -> str:
    allowed = list(place.owner.model_fields) if place.owner else []
    close = _suggest_closest(str(place.path[-1]), allowed)
    if not close and place.owner and len(place.path) == 1:
        close = did_you_mean(suggest_keys(place.owner, str(place.path[0])))
    message = "unknown key" + (close or f"; expected one of {', '.join(allowed)}")
    kind = owner.child("kind")
    if kind is not None and kind.origin.is_override and not node.origin.is_override:
        section = path_text(place.path[:-1])
        message += f' (kind is "{kind.value}" by override; {section}={{kind: {kind.value}}} replaces the whole section)'
    return message


def suggest_keys(schema: type[BaseModel], name: str) -> list[str]:
    """Return the key paths that a user may mean by ``lr`` or ``batch-size``.

    The shortest paths that end in this word, otherwise in a similar one, at most three. Paths inside lists are not
    considered; empty if nothing matches.
    """
    word = name.replace("-", "_")
    if not word or len(word) > _MAX_WORD:
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
