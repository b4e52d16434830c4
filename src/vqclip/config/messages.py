"""Put pydantic's errors in words: got, expected, and the key that was probably meant.

The first half looks up types, keys and limits in a schema, and describes them; the second half describes problems.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vqclip.config.base import INT64
from vqclip.config.yaml import Node, Problem, path_text

MAX_PROBLEMS = 200
"""Problems in one error; more are only counted."""
_MAX_WORD = 120
"""Characters of a word that another one is suggested for."""
_SYNONYMS = {
    "lr": "learning_rate base_lr peak_lr max_lr",
    "steps": "epochs num_epochs max_epochs num_train_epochs max_steps num_steps total_steps iterations iters",
    "batch_size": "bs batch batchsize per_device_train_batch_size global_batch_size train_batch_size",
    "micro_batches": "accum_freq accum_steps gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "weight_decay": "wd",
    "schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "final_lr_ratio": "min_lr lr_min eta_min",
    "clip_grad_norm": "max_grad_norm grad_clip grad_clip_norm gradient_clip_val gradient_clipping clip_grad",
    "workers": "num_workers dataloader_num_workers",
    "precision": "amp dtype mixed_precision bf16 fp16",
    "report_every": "log_every log_every_n_steps logging_steps log_interval",
    "checkpoint_every": "save_steps save_every save_interval save_frequency",
    "evaluate_every": "eval_steps eval_every eval_interval val_frequency val_check_interval",
    "folder": "output_dir out_dir save_dir logs",
    "sources": "train_data data_path dataset datasets train_files",
    "activation_checkpointing": "grad_checkpointing gradient_checkpointing",
}
"""Our keys → words of other programs."""

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
        problem = _describe_problem(schema, place, root, detail)
        found.setdefault(problem.path, problem)
    return list(found.values())


def _ignores_invalid_elements(error: ErrorDetails) -> bool:
    """Return whether a list is too short only because pydantic does not count its invalid elements."""
    value = error["input"]
    return error["type"] == "too_short" and isinstance(value, list) and len(value) >= error["ctx"]["min_length"]


def _describe_problem(schema: type[BaseModel], place: SchemaLocation, root: Node, error: ErrorDetails) -> Problem:
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
        message = _describe_unknown_key(schema, place, owner, node)
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
    """Return the section that a word probably stands for, by its kind; empty if there is none."""
    kinds = kinds_of(annotation)
    close = difflib.get_close_matches(word, kinds, n=1)
    fields = kinds[close[0]].model_fields if close else {}
    needed = [name for name, field in fields.items() if field.is_required() and name != "kind"]
    return f"{{{', '.join([f'kind: {close[0]}', *(f'{name}: ...' for name in needed)])}}}" if close else ""


def _describe_unknown_key(schema: type[BaseModel], place: SchemaLocation, owner: Node, node: Node) -> str:
    allowed = list(place.owner.model_fields) if place.owner else []
    message = "unknown key" + suggest_key(place.path, allowed, _key_paths(schema))
    kind = owner.child("kind")
    if kind is not None and kind.origin.is_override and not node.origin.is_override:
        section = path_text(place.path[:-1])
        message += f' (kind is "{kind.value}" by override; {section}={{kind: {kind.value}}} replaces the whole section)'
    return message


def suggest_key(path: KeyPath, allowed: Sequence[str], paths: Iterable[str]) -> str:
    """Return the end of a message about an unknown key: keys that may be meant, or all that are allowed.

    Args:
        path: of the key; of one that a user looks up, a single part with its dots.
        allowed: keys of its section.
        paths: paths of all keys.
    """
    word = str(path[-1])
    last = word.rpartition(".")[2]
    if (meant := _synonym(last)) in allowed:
        return did_you_mean([meant])
    close = _suggest_closest(last, allowed)
    if not close and (len(path) == 1 or "kind" not in allowed):  # a section of another kind has other keys
        close = did_you_mean(suggest_keys(paths, word))
    return close or f"; expected one of {', '.join(allowed)}"


def _synonym(word: str) -> str:
    """Return our key for a word of another program; the word itself if it is none."""
    bare = word.replace("_", "").lower()
    found = (key for key, words in _SYNONYMS.items() if bare in words.replace("_", "").split())
    return next(found, word)


def suggest_keys(paths: Iterable[str], name: str) -> list[str]:
    """Return the key paths that a user may mean by ``lr`` or ``batch-size``.

    The shortest paths that end in this word, otherwise in a similar one, at most three; empty if nothing matches.
    """
    word = name.replace("-", "_")
    if not word or len(word) > _MAX_WORD:
        return []
    paths, last, found = list(dict.fromkeys(paths)), word.rpartition(".")[2], list[str]()
    for each in (word, _synonym(last)):
        found = found or [path for path in paths if f".{path}".endswith(f".{each}")]
    if not found:
        close = difflib.get_close_matches(last, {path.rpartition(".")[2] for path in paths}, n=1, cutoff=0.75)
        found = [path for path in paths if path.rpartition(".")[2] in close]
    least = min((path.count(".") for path in found), default=0)
    return [path for path in found if path.count(".") == least][:3]


def _key_paths(model: type[BaseModel], prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for member in members(unwrap(field.annotation)[0]):
            if is_model(member) and member not in above:
                yield from _key_paths(member, f"{prefix}{name}.", (*above, model))
