"""Write what is known of all keys of a configuration: for commands that import no torch, and as a page.

python scripts/keys.py
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from vqclip.config.explain import KEYS_FILE, one_line
from vqclip.config.messages import describe, is_model, members, show, unwrap
from vqclip.config.yaml import dump_yaml
from vqclip.train.tasks.kinds import TASKS

_ABOUT = (
    "Each table is a section of the YAML file of a run, where it occurs first; a key is set on the command line by its "
    "path, as in `vqclip train configs/base.yaml optim.lr=1e-3`. `vqclip train --explain optim.lr` shows the same on a "
    "terminal. Written by `scripts/keys.py`."
)
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "keys.md"


def contents() -> dict[Path, str]:
    """Return the text of both files."""
    known = describe_sections(TASKS)
    return {KEYS_FILE: json.dumps(known, indent=1, ensure_ascii=False) + "\n", PAGE: reference_page(known)}


def describe_sections(schemas: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return all sections of configurations as JSON values.

    Args:
        schemas: task → schema.

    Returns:
        ``tasks``: task → name of its section; ``sections``: name → ``text`` and ``keys``; of a key its ``value`` and
        ``text`` in words, ``sections``, kind (or name) → name of the section that it may be, and ``is_list``.
    """
    sections, waiting = dict[str, Any](), [*schemas.values()]
    for section in waiting:
        if section.__name__ in sections:
            continue
        keys = sections.setdefault(section.__name__, {"text": one_line(inspect.getdoc(section)), "keys": {}})["keys"]
        for name, field in section.model_fields.items():
            inner = _sections_of(field.annotation)
            waiting += inner.values()
            names = {kind: each.__name__ for kind, each in inner.items()}
            keys[name] = {"value": _value_words(field), "text": one_line(field.description), "sections": names}
            keys[name]["is_list"] = any(typing.get_origin(each) in (tuple, list) for each in members(field.annotation))
    return {"tasks": {task: schema.__name__ for task, schema in schemas.items()}, "sections": sections}


def _sections_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the sections that a value, or an item of a list, may be: by kind, or by name where there is no kind."""
    found: dict[str, type[BaseModel]] = {}
    for member in members(annotation):
        inner = [each for each in typing.get_args(member) if each is not Ellipsis]
        if is_model(member):
            kind = member.model_fields.get("kind")
            names = () if kind is None else typing.get_args(kind.annotation)
            found |= dict.fromkeys(names or (member.__name__,), member)
        elif typing.get_origin(member) in (tuple, list) and inner:
            found |= _sections_of(inner[-1])
    return found


def _value_words(field: FieldInfo) -> str:
    """Return type, limits and default of a key in words."""
    annotation, _ = unwrap(field.annotation)
    words = describe(field.rebuild_annotation()).rstrip(",")
    if sections := _sections_of(annotation):
        kinds = [kind for kind, each in sections.items() if kind != each.__name__]
        own = [each for each in members(annotation) if not _sections_of(each)]
        is_list = any(typing.get_origin(each) in (tuple, list) for each in members(annotation))
        words = "a list of sections" if is_list else "a section"
        words += f" of kind {', '.join(kinds)}" if kinds else ""
        words = " or ".join([*map(describe, own), words, *["null"] * (type(None) in typing.get_args(annotation))])
    if field.is_required():
        return f"{words}; required"
    default = to_jsonable_python(field.get_default(call_default_factory=True))
    if isinstance(default, dict) or (isinstance(default, list) and any(isinstance(each, dict) for each in default)):
        return words
    shown = show(default) if isinstance(default, str) else dump_yaml(default).removesuffix("...\n").strip()
    return f"{words}; default {shown}"


def reference_page(known: Mapping[str, Any]) -> str:
    """Return the result of `describe_sections` as Markdown: a table for each section, where it occurs first."""
    lines = ["# All keys of a configuration", "", _ABOUT, ""]
    places = dict[str, str]()
    waiting = [(name, f"task {task}", "") for task, name in known["tasks"].items()]
    while waiting:
        name, title, path = waiting.pop(0)
        if name in places:
            continue
        places[name] = title
        section = known["sections"][name]
        lines += [f"## {title}", "", section["text"], "", "| key | value | meaning |", "|---|---|---|"]
        inner = []
        for key, each in section["keys"].items():
            place = f"{path}{key}"
            inner += [
                (found, f"`{place}`" + (f", kind {kind}" if kind != found else ""), f"{place}.")
                for kind, found in each["sections"].items()
            ]
            see = dict.fromkeys(places[found] for found in each["sections"].values() if found in places)
            value, keys = each["value"].replace("][", r"]\["), f" Keys: {'; '.join(see)}." if see else ""
            cells = f"`{key}`", value, each["text"] + keys
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
        waiting = inner + waiting
    return "\n".join(lines)


if __name__ == "__main__":
    for path, text in contents().items():
        path.write_text(text, encoding="utf-8")
