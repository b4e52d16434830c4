"""Compare two trees of plain data, such as configurations and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_differences(before: Mapping[str, Any], after: Mapping[str, Any], place: str) -> dict[str, str]:
    """Return a line for each key path whose values differ.

    Args:
        before: a tree of dictionaries and lists, such as the one in a file.
        after: the tree of this run.
        place: where ``before`` comes from, in words, such as "in the checkpoint".

    Returns:
        Key path → line, sorted; empty if the trees are equal. A value of None equals an absent one: a setting that is
        off need not be in a tree from before it existed.
    """
    old, new = flatten(before), flatten(after)
    return {
        path: f"  {path}: {_show(old, path)} {place}, {_show(new, path)} now"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    }


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by key path, such as ``data.shards[0].name``."""
    if isinstance(tree, Mapping):
        items = [(f"{path}.{key}" if path else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return {path: tree}
    return {name: leaf for key, value in items for name, leaf in flatten(value, key).items()} or {path: tree}


def _show(leaves: Mapping[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "absent"
