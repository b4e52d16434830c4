"""Look up types, keys and limits in a schema, and describe them in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class SchemaLocation:
    """Location in a schema, with its type."""

    path: KeyPath
    """Key path, without the labels that pydantic adds for members of unions."""
    annotation: Any = Any
    metadata: tuple[Any, ...] = ()
    owner: type[BaseModel] | None = None
    """The model whose field (or unknown key) the last part of the path is."""


def members(annotation: Any) -> list[Any]:
    """Return the members of a union without null; for any other annotation, the annotation."""
    annotation, _ = unwrap(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [found for member in typing.get_args(annotation) for found in members(member)]
    return [] if annotation in (None, types.NoneType) else [annotation]


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Remove ``Annotated`` and named type aliases; return the bare annotation and the metadata."""
    metadata: tuple[Any, ...] = ()
    while True:
        if typing.get_origin(annotation) is Annotated:
            metadata += annotation.__metadata__
            annotation = annotation.__origin__
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation, metadata


def is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether the annotation is a section: a pydantic model."""
    # On Python 3.10 `tuple[int]` is an instance of `type`, but no class.
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return is_class and issubclass(annotation, BaseModel)


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the members of a union of sections by ``kind``; empty for any other annotation."""
    found: dict[str, type[BaseModel]] = {}
    options = members(annotation)
    if len(options) < 2:
        return found
    for member in options:
        field = member.model_fields.get("kind") if is_model(member) else None
        if field is None:
            return {}
        found.update(dict.fromkeys(typing.get_args(field.annotation), member))
    return found


def model_of(annotation: Any, kind: Any) -> type[BaseModel] | None:
    """Return the model of an annotation; in a union, the one of this `kind`."""
    options = members(annotation)
    if len(options) == 1:
        return options[0] if is_model(options[0]) else None
    return kinds_of(annotation).get(kind) if isinstance(kind, str) else None


def descend(place: SchemaLocation, part: str | int) -> SchemaLocation:
    """Return the location one key or index below; `place.annotation` must not be a union, except with null."""
    path = (*place.path, part)
    options = members(place.annotation)
    bare = options[0] if len(options) == 1 else Any
    if is_model(bare):
        field = bare.model_fields.get(str(part))
        if field is None:
            return SchemaLocation(path, owner=bare)
        inner, metadata = unwrap(field.annotation)
        return SchemaLocation(path, inner, (*field.metadata, *metadata), bare)
    args = typing.get_args(bare)
    origin = typing.get_origin(bare)
    item: Any = Any
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(args) == 2:
        item = args[1]
    elif origin is tuple and isinstance(part, int) and Ellipsis not in args:
        item = args[part] if part < len(args) else Any
    elif isinstance(origin, type) and issubclass(origin, Sequence) and args:
        item = args[0]
    inner, metadata = unwrap(item)
    return SchemaLocation(path, inner, metadata)


def section_meant(annotation: Any, keys: Iterable[str]) -> type[BaseModel] | None:
    """Return the only section of a union without ``kind`` that has one of these keys, or None."""
    sections = [] if kinds_of(annotation) else [each for each in members(annotation) if is_model(each)]
    found = [section for section in sections if section.model_fields.keys() & set(keys)]
    return found[0] if len(found) == 1 else None


def locate(schema: type[BaseModel], location: Sequence[str | int], root: Any = None) -> SchemaLocation | None:
    """Return the location of a pydantic error.

    Inside a union pydantic adds the name of the chosen member to the location of an error. Names of kinds are removed.
    In any other union each member reports its own errors. If the value's keys are those of one section alone, its
    errors count, and the result for those of the other members is None; otherwise the location is that of the union.

    Args:
        schema: of the configuration.
        location: of the error.
        root: the configuration as plain dicts, lists and scalars.
    """
    place = SchemaLocation((), schema)
    parts = list(location)
    while parts:
        if len(members(place.annotation)) > 1:
            kinds = kinds_of(place.annotation)
            chosen = kinds.get(str(parts[0]))
            if chosen is None:
                value = _value_at(root, place.path)
                chosen = section_meant(place.annotation, value) if isinstance(value, dict) else None
                if chosen is None:
                    break
                if parts[0] != chosen.__name__:
                    return None
            parts.pop(0)
            place = SchemaLocation(place.path, chosen, (), place.owner)
            continue
        if parts[0] == "[key]":
            break
        place = descend(place, parts.pop(0))
    return place


def _value_at(root: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            root = root[part]
        except (KeyError, IndexError, TypeError):
            return None
    return root


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Describe an annotation in words: ``an integer >= 2``, ``one of "fsq", "lfq"``."""
    annotation, inner = unwrap(annotation)
    limits = _limits((*metadata, *inner))
    return f"{_describe_bare(annotation)} {limits}".rstrip()


def _describe_bare(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = kinds_of(annotation)
        if kinds:
            words = [f"a section whose kind is {join_quoted(list(kinds), 'or')}"]
        else:
            words = [describe(arg) for arg in args if arg is not types.NoneType]
        return " or ".join(words + (["null"] if types.NoneType in args else []))
    if origin is Literal:
        return f"one of {join_quoted(args)}" if len(args) > 1 else join_quoted(args)
    if is_model(annotation):
        return f"a section with keys {', '.join(annotation.model_fields)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if origin is tuple and Ellipsis not in args:
        return f"a list of {len(args)}: " + ", ".join(describe(arg) for arg in args)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list" + (f", each {describe(args[0])}," if args else "")
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(metadata: tuple[Any, ...]) -> str:
    words: list[str] = []
    for item in _flat(metadata):
        for sign, name in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le"), ("a multiple of", "multiple_of")):
            if getattr(item, name, None) is not None:
                words.append(f"{sign} {getattr(item, name)}")
        if getattr(item, "min_length", None):
            words.append(f"of length >= {item.min_length}")
        if getattr(item, "max_length", None) is not None:
            words.append(f"of length <= {item.max_length}")
        if getattr(item, "pattern", None):
            words.append(f"that matches {item.pattern}")
    return " and ".join(words)


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(item.metadata)
        elif isinstance(item, annotated_types.GroupedMetadata):
            yield from _flat(item)
        else:
            yield item


def join_quoted(values: Sequence[Any], last: str = ",") -> str:
    """Return ``"a", "b"``: strings in quotes, other values as in YAML."""
    words = [f'"{value}"' if isinstance(value, str) else show(value) for value in values]
    if last == "," or len(words) < 2:
        return ", ".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def show(value: Any, limit: int = 80) -> str:
    """Return a value as in YAML for a message, shortened to ``limit`` characters."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
