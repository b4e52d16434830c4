"""Apply ``section.key=value`` overrides to a tree of configuration values."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from vqclip.config.types import SchemaLocation, descend, model_of, show
from vqclip.config.yaml import Node, Origin, Problem, node_from_plain, path_text, read_yaml
from vqclip.errors import ConfigError

_MAX_SHOWN = 120
"""Characters of an override in a message."""
_KEY = r"[^\s.\[\]=]+"
_INDEX = re.compile(r"[0-9]{1,9}")
_OVERRIDE = re.compile(rf"({_KEY}(?:\.{_KEY}|\[{_INDEX.pattern}\])*)=(.*)", re.DOTALL)


def override_label(override: str) -> str:
    """Return the name of an override in messages."""
    return f'override "{override if len(override) <= _MAX_SHOWN else override[: _MAX_SHOWN - 3] + "..."}"'


def apply_override(schema: type[BaseModel], root: Node, override: str, problems: list[Problem]) -> None:
    """Set one value in the tree; add problems of the value to ``problems``.

    Raises:
        ConfigError: the override is malformed, or its key does not fit the tree.
    """
    label = override_label(override)
    match = _OVERRIDE.fullmatch(override.strip())
    if match is None:
        raise ConfigError(f"{label}: expected section.key=value or section.list[0]=value")
    origin = Origin(label, is_override=True)
    node, place = root, SchemaLocation((), schema)
    *parents, last = parts = re.findall(r"[^.\[\]]+", match[1])
    path = tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)
    text = f'"{match[2]}"' if match[2] in ("|", ">", ",") else match[2]  # for YAML, the beginning of something longer
    value = read_yaml(text, label, problems, path=path, is_override=True)
    for part in parents:
        node, place = _descend(node, place, part, origin)
    key = _checked_part(node, place, last, origin)
    if key == "kind" and isinstance(node.value, dict) and _kind(node) != value.value:
        # Another kind has other keys: drop those that come from the default.
        node.value = {name: child for name, child in node.value.items() if not child.is_default}
    node.is_default = False
    node.value[key] = value


def _descend(node: Node, place: SchemaLocation, part: str, origin: Origin) -> tuple[Node, SchemaLocation]:
    """Go one key towards the value to set; add the section if it is missing."""
    key = _checked_part(node, place, part, origin)
    node.is_default = False
    model = model_of(place.annotation, _kind(node))
    place = descend(place if model is None else SchemaLocation(place.path, model), key)
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


def _checked_part(node: Node, place: SchemaLocation, part: str, origin: Origin) -> str | int:
    """Return the part as a key of `node` or an index into it."""
    where = f"{origin}: {path_text(place.path)}"
    if isinstance(node.value, dict):
        return part
    if isinstance(node.value, list):
        size = len(node.value)
        if not _INDEX.fullmatch(part) or int(part) >= size:
            allowed = f"an index from 0 to {size - 1}" if size else "no index, because the list is empty"
            raise ConfigError(f"{where}: a list; got {show(part)}, expected {allowed}")
        return int(part)
    raise ConfigError(f"{where}: is {show(node.value)} ({type(node.value).__name__}), which has no {show(part)} to set")


def _kind(node: Node | None) -> Any:
    kind = node.child("kind") if node is not None and isinstance(node.value, dict) else None
    return kind.value if kind is not None else None
