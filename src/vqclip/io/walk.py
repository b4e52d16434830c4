"""List the files below a folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from vqclip.errors import DataError

__all__ = ["walk_files"]

_MAX_VISITS = 1000
"""Paths through symbolic links to one folder; links to links could make their number astronomical."""


def walk_files(
    folder: Path, *, hidden: bool = False, visit: Callable[[Path], object] = lambda path: None
) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, sorted, those of a folder before those of its subfolders.

    A link to a folder that contains it is skipped.

    Args:
        folder: the folder.
        hidden: yield hidden files too, and enter hidden folders.
        visit: called with each folder before it is listed.

    Raises:
        DataError: a folder cannot be listed, or symbolic links lead to it in more than 1,000 ways.
    """
    left: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    visits = Counter[tuple[int, int]]()
    while left:  # not recursive: crafted folders are deeper than Python's stack
        relative, above = left.pop()
        here = folder / relative
        try:
            status = os.stat(here)
            identity = status.st_dev, status.st_ino
            if identity in above:
                continue
            visits[identity] += 1
            if visits[identity] > _MAX_VISITS:
                raise DataError(f"{here}: symbolic links lead to it in more than {_MAX_VISITS} ways; remove some")
            visit(here)
            names = sorted(name for name in os.listdir(here) if hidden or name[0] != ".")
        except OSError as error:
            raise DataError(f"{here}: cannot be read: {error.strerror}") from None
        inside = {name for name in names if os.path.isdir(here / name)}
        yield from (f"{relative}{name}" for name in names if name not in inside)
        left += [(f"{relative}{name}/", above | {identity}) for name in reversed(names) if name in inside]
