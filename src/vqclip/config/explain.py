"""Descriptions of the keys of a run: on a terminal, as comments of YAML; and a check of keys that needs no torch.

The classes of the sections are beside those that they build, which import torch. ``keys.json`` beside this file has
what `scripts/keys.py` reads from them: a key is looked up, and a wrong one refused, at once. A test compares both.

    {"tasks": {"contrastive": "TrainConfig", ...},
     "sections": {"OptimConfig": {"text": "Optimizer, ...", "keys": {"lr": {"value": "a number > 0; default 0.001",
                                  "text": "Highest learning rate, ...", "sections": {}, "is_list": false}, ...}}, ...}}

``sections`` of a key are those that its value, or an item of it, may be: kind (or name) → name.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from vqclip.config.loading import read_file
from vqclip.config.messages import suggest_key
from vqclip.config.yaml import Node, Origin, Problem, dump_yaml
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
    unread = list[Problem]()
    file = Node({}, Origin("")) if path is None else read_file(path, unread)
    if not unread and (unknown := _find_unknown_keys(file, overrides)):
        raise ConfigError("\n".join(map(str, unknown)))


def _find_unknown_keys(file: Node, overrides: Sequence[str]) -> list[Problem]:
    known = stored_sections()
    given = getattr(file.child("task"), "value", "contrastive")
    task = [given, *(each.removeprefix("task=") for each in overrides if each.startswith("task="))][-1]
    if not isinstance(task, str) or task not in known["tasks"]:
        return []
    root, problems = {task: known["tasks"][task]}, list[Problem]()

    def refuse(origin: Origin, path: tuple[str | int, ...], names: Iterable[str]) -> None:
        allowed = [key for name in names for key in known["sections"][name]["keys"]]
        problems.append(Problem(origin, path, f"unknown key{suggest_key(path, allowed, key_paths(task))}"))

    def check(node: Node, sections: Mapping[str, str], path: tuple[str | int, ...]) -> None:
        if isinstance(node.value, list):
            for number, child in enumerate(node.value):
                check(child, sections, (*path, number))
        elif isinstance(node.value, dict):
            kind = node.child("kind")
            known_kind = None if kind is None else kind.value
            names = [name for each, name in sections.items() if each in (name, known_kind)]
            names = [*sections.values()] if kind is None and len(sections) == 1 else names
            for key, child in node.value.items() if names else ():
                if key in known["sections"][names[0]]["keys"]:
                    check(child, known["sections"][names[0]]["keys"][key]["sections"], (*path, key))
                else:
                    refuse(child.origin, (*path, key), names)

    check(file, root, ())
    for override in (each for each in overrides if "=" in each):
        path, names = list[str](), [*root.values()]
        for part in re.sub(r"\[\d+\]", "", override.partition("=")[0]).strip().split("."):
            path.append(part)
            keys = [known["sections"][name]["keys"] for name in names]
            if keys and not any(part in each for each in keys):
                refuse(Origin(f'override "{override[:120]}"', is_override=True), tuple(path), names)
            found = [each[part] for each in keys if part in each and not each[part]["is_list"]]
            names = [*dict.fromkeys(name for each in found for name in each["sections"].values())]
    return problems


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
