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

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vqclip.config.base import INT64
from vqclip.config.yaml import KeyPath, Origins, Problem, origin_of, path_text

MAX_PROBLEMS = 200
"""Problems in one error; more are only counted."""
_MISSING = object()
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


@dataclass(frozen=True)
class SchemaLocation:
    """Location in a schema, with its type."""

    path: KeyPath
    """Key path, without the labels that pydantic adds for members of unions."""
    annotation: Any = Any
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
        return SchemaLocation(path, Any if field is None else field.rebuild_annotation(), bare)
    items = [each for each in typing.get_args(bare) if each is not Ellipsis] or [Any]
    is_fixed = typing.get_origin(bare) is tuple and isinstance(part, int) and part < len(items)
    return SchemaLocation(path, items[int(part)] if is_fixed else items[-1])


def section_meant(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the only section of a union without ``kind`` that has one of the keys of a value, or None."""
    sections = [] if kinds_of(annotation) else [each for each in members(annotation) if is_model(each)]
    keys = value.keys() if isinstance(value, dict) else set[str]()
    found = [section for section in sections if section.model_fields.keys() & keys]
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
    for part in location:
        if len(members(place.annotation)) > 1:
            of_kind = kinds_of(place.annotation).get(str(part))
            chosen = of_kind or section_meant(place.annotation, _value_at(root, place.path))
            if chosen is None:
                break
            if of_kind is None and part != chosen.__name__:
                return None
            place = SchemaLocation(place.path, chosen, place.owner)
        elif part == "[key]":
            break
        else:
            place = descend(place, part)
    return place


def _value_at(root: Any, path: KeyPath) -> Any:
    """Return the value at a path of plain data; `_MISSING` if there is none."""
    for part in path:
        if isinstance(root, str):  # has no parts of its own
            return _MISSING
        try:
            root = root[part]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return root


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}


_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}
_LIMITS |= {"min_length": "of length >=", "max_length": "of length <=", "pattern": "that matches"}


def describe(annotation: Any) -> str:
    """Describe an annotation in words: ``an integer >= 2``, ``one of "fsq", "lfq"``."""
    annotation, metadata = unwrap(annotation)
    parts = [part for each in metadata for part in getattr(each, "metadata", [each])]  # those of Field(...)
    found = [(words, getattr(part, name, None)) for part in parts for name, words in _LIMITS.items()]
    limits = " and ".join(f"{words} {limit}" for words, limit in found if limit is not None)
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


def describe_problems(schema: type[BaseModel], plain: Any, origins: Origins, error: ValidationError) -> list[Problem]:
    """Return one problem for each key of plain data that pydantic reports an error for."""
    found: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        value, context = detail["input"], detail.get("ctx", {})
        if detail["type"] == "too_short" and isinstance(value, list) and len(value) >= context["min_length"]:
            continue  # only because pydantic does not count its invalid elements
        if len(found) > MAX_PROBLEMS:  # each takes time, and no one reads more
            break
        if (place := locate(schema, detail["loc"], plain)) is not None:
            problem = _describe_problem(schema, place, plain, origins, detail)
            found.setdefault(problem.path, problem)
    return list(found.values())


def _describe_problem(
    schema: type[BaseModel], place: SchemaLocation, plain: Any, origins: Origins, error: ErrorDetails
) -> Problem:
    kind = error["type"]
    path = (*place.path, "kind") if kind in ("union_tag_invalid", "union_tag_not_found") else place.path
    value = _value_at(plain, path)
    found = error.get("ctx", {}).get("tag", error["input"]) if value is _MISSING else value  # a validator made it
    got = f"got {show(found)}" + ("" if found is None else f" ({type(found).__name__})")
    is_one_of_many = value is not _MISSING and len(members(place.annotation)) > 1
    if kind == "extra_forbidden" and not is_one_of_many:
        message = _describe_unknown_key(schema, place, plain, origins)
    elif kind in ("missing", "union_tag_not_found") and not is_one_of_many:
        message = f"missing; expected {_describe_expected(place, kind)}"
    elif kind in ("value_error", "assertion_error"):
        message = str(error.get("ctx", {}).get("error") or error["msg"])
        if not isinstance(value, (dict, list)) and value is not _MISSING and not message.startswith("got "):
            message = f"{got}; {message}"
    else:
        hint = _suggest_value(place, kind.startswith("union_tag"), found) if isinstance(found, str) else ""
        message = f"{got}; expected {_describe_expected(place, kind, error)}{hint}"
    return Problem(origin_of(origins, path), path, message)


def _describe_expected(place: SchemaLocation, kind: str, error: ErrorDetails | None = None) -> str:
    if kind.startswith("union_tag"):
        return f"one of {join_quoted(list(kinds_of(place.annotation)))}"
    if kind == "finite_number":
        return "a finite number"
    words = describe(place.annotation)
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


def _suggest_value(place: SchemaLocation, is_kind: bool, word: str) -> str:
    """Return the end of a message about a wrong word: the section, kind or value of a literal that may be meant."""
    options = members(place.annotation)
    of_items = kinds_of(descend(place, 0).annotation) if len(options) == 1 else {}
    kinds = of_items or kinds_of(place.annotation)
    close = difflib.get_close_matches(word[:_MAX_WORD], kinds, n=1)
    if is_kind or not close:
        return _suggest_closest(word, [*kinds, *(value for each in options for value in getattr(each, "__args__", ()))])
    fields = kinds[close[0]].model_fields
    needed = [f", {name}: ..." for name, field in fields.items() if field.is_required() and name != "kind"]
    section = f"{{kind: {close[0]}{''.join(needed)}}}"
    return f"; did you mean {f'[{section}]' if of_items else section}?"


def _describe_unknown_key(schema: type[BaseModel], place: SchemaLocation, plain: Any, origins: Origins) -> str:
    allowed, above = list(place.owner.model_fields) if place.owner else [], place.path[:-1]
    message = "unknown key" + suggest_key(place.path, allowed, _key_paths(schema))
    kind, of_kind = _value_at(plain, (*above, "kind")), origin_of(origins, (*above, "kind"))
    if isinstance(kind, str) and of_kind.is_override and not origin_of(origins, place.path).is_override:
        section = path_text(above)
        message += f' (kind is "{kind}" by override; {section}={{kind: {kind}}} replaces the whole section)'
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
