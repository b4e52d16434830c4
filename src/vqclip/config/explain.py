"""Descriptions of the keys of a run: on a terminal, as comments of YAML; and a check of keys that needs no torch.

The classes of the sections are beside those that they build, which import torch. ``keys.json`` beside this file has
what `scripts/keys.py` reads from them: a key is looked up, and a wrong one refused, at once. A test compares both.

    {"tasks": {"contrastive": "TrainConfig", ...},
     "sections": {"OptimConfig": {"text": "Optimizer, ...", "keys": {"lr": {"value": "a number > 0; default 0.001",
                                  "text": "Highest learning rate, ...", "sections": {}, "is_list": false}, ...}}, ...}}

``sections`` of a key are those that its value, or an item of it, may be: kind (or name) → name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from vqclip.config.loading import apply_override, read_file
from vqclip.config.messages import suggest_key
from vqclip.config.yaml import KeyPath, Origin, Problem, dump_yaml, origin_of
from vqclip.errors import ConfigError

KEYS_FILE = Path(__file__).with_name("keys.json")
_COLUMNS = 100


def one_line(described: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((described or "").partition("\n\n")[0].split())


@functools.cache
def stored_sections() -> dict[str, Any]:
    """Return the content of ``keys.json``."""
    found: dict[str, Any] = json.loads(KEYS_FILE.read_text(encoding="utf-8"))
    return found


def explain(path: str) -> str:
    """Return what a key of a contrastive run is, or the keys of a section, in lines.

    Args:
        path: such as ``optim.lr``; a kind may choose a section, as in ``model.image.quantizer.fsq``.

    Raises:
        ConfigError: there is no such key.
    """
    known, lines = stored_sections(), list[str]()
    found = {"": known["tasks"]["contrastive"]}
    for part in re.sub(r"\[\d*\]", "", path).split("."):
        owners = [keys for name in found.values() if part in (keys := known["sections"][name]["keys"])]
        if part in found:
            found = {part: found[part]}
        elif owners:
            lines = [f"{path}: {owners[0][part]['value']}", f"  {owners[0][part]['text']}".rstrip()]
            found = {kind: name for keys in owners for kind, name in keys[part]["sections"].items()}
        else:
            allowed = [key for name in found.values() for key in known["sections"][name]["keys"]]
            raise ConfigError(f"{path}: unknown key{suggest_key((path,), allowed, key_paths())}")
    for kind, name in found.items():
        section = known["sections"][name]
        lines += ["", f"{f'kind {kind}: ' if kind != name else ''}{section['text']}"]
        lines += [f"  {key + ':':<24}  {each['value']}. {each['text']}" for key, each in section["keys"].items()]
    return "\n".join(lines)


def key_paths(task: str = "contrastive") -> list[str]:
    """Return the paths of all keys of a task, but for those inside lists."""
    known, paths = stored_sections(), list[str]()

    def walk(name: str, prefix: str, above: tuple[str, ...]) -> None:
        for key, each in known["sections"][name]["keys"].items():
            paths.append(prefix + key)
            for inner in {} if each["is_list"] else dict.fromkeys(each["sections"].values()):
                if inner not in above:
                    walk(inner, f"{prefix}{key}.", (*above, inner))

    walk(known["tasks"][task], "", ())
    return [*dict.fromkeys(paths)]


def require_known_keys(path: Path | None, overrides: Sequence[str]) -> None:
    """Refuse a file of a run that cannot be read, and unknown keys in it and in overrides.

    Values are left to the classes of the sections; so are kinds that are not of this package.

    Raises:
        ConfigError: a line for each problem found, as `load_config` writes them.
    """
    unread, problems, known = list[Problem](), list[Problem](), stored_sections()
    plain, origins = ({}, {(): Origin("")}) if path is None else read_file(path, unread)
    for override in overrides:
        with contextlib.suppress(ConfigError):  # left to the classes
            apply_override(None, plain, origins, override, unread)
    task = plain.get("task", "contrastive")
    if unread or not isinstance(task, str) or task not in known["tasks"]:
        return
    values: dict[KeyPath, Any] = {(): plain}
    sections: dict[KeyPath, dict[str, str]] = {(): {task: known["tasks"][task]}}  # of a value, or of an item of a list
    for (*above, key), origin in [each for each in origins.items() if each[0]]:
        parent = tuple(above)
        here, value, inner = (*parent, key), values[parent][key], sections[parent]
        if isinstance(key, str):
            keys = [known["sections"][name]["keys"] for name in inner.values()]
            inner = {kind: name for each in keys if key in each for kind, name in each[key]["sections"].items()}
            if keys and not any(key in each for each in keys) and not key.isdecimal():  # an index into a default list
                allowed = [*dict.fromkeys(name for each in keys for name in each)]
                problems.append(Problem(origin, here, f"unknown key{suggest_key(here, allowed, key_paths(task))}"))
        kind = value.get("kind") if isinstance(value, dict) else None
        if kind is not None and origin_of(origins, (*here, "kind")).is_override and not origin.is_override:
            kind = ""  # left to the classes, whose message names this override
        values[here] = value
        sections[here] = {each: name for each, name in inner.items() if kind is None or each in (name, kind)}
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


def commented_yaml(config: BaseModel) -> str:
    """Return the whole tree as YAML with the description of each key above it; `load_config` reads it back."""
    return "\n".join(_comment(config, to_jsonable_python(config.model_dump()), "")) + "\n"


def _comment(section: BaseModel, plain: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value, tree, comment = getattr(section, name), plain[name], f"{indent}# "
        yield from textwrap.wrap(
            one_line(field.description),
            _COLUMNS,
            initial_indent=comment,
            subsequent_indent=comment,
            break_on_hyphens=False,
        )
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _comment(value, tree, f"{indent}  ")
        elif isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value):
            yield f"{indent}{name}:"
            for each, inner in zip(value, tree, strict=True):
                yield f"{indent}  -"
                yield from _comment(each, inner, f"{indent}    ")
        else:
            yield textwrap.indent(dump_yaml({name: tree}), indent).removesuffix("\n")
