"""The samples of a shard: its members, grouped by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.shard import Shard
from vqclip.data.tar import Member
from vqclip.errors import DataError

__all__ = ["KINDS", "MemberTable", "SampleTable"]

KINDS = ("image", "txt", "json", "cls")
"""Members of a sample; the columns of `SampleTable.offsets` and `.sizes`."""

_COLUMNS = {ending[1:]: 0 for ending in IMAGE_ENDINGS} | {"txt": 1, "json": 2, "cls": 3}
"""Extension → column. Members with other extensions are never read."""
_KEY = re.compile(r"^((?:.*/)?[^./]+)\.([^/]*)$", re.DOTALL)


class SampleTable(NamedTuple):
    """Samples, in the order of their first members."""

    keys: bytes
    """Their names as in the tar, concatenated."""
    key_ends: np.ndarray
    """``(samples,)`` int64: end of each name in `keys`."""
    offsets: np.ndarray
    """``(samples, 4)`` int64: offset of each of `KINDS`; -1 where the sample has none."""
    sizes: np.ndarray
    """``(samples, 4)`` int64: bytes of each of `KINDS`; 0 where the sample has none."""


class MemberTable:
    """Members of a shard, grouped to samples as they come.

    Args:
        path: the shard, for messages.
        neighbours: refuse a shard in which other members are between those of a sample.
    """

    def __init__(self, path: Shard, neighbours: bool = False):
        self._path, self._neighbours = path, neighbours
        self._rows: dict[str, list[int]] = {}
        self._last = ""
        self._ignored = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, members: Iterable[Member]) -> list[int]:
        """Add the next members, and return the positions where samples begin among them.

        Raises:
            DataError: a sample has two members of a kind, or other members between its own.
        """
        begins = []
        for member in members:
            match = _KEY.match(member.name)
            column = _COLUMNS.get(match[2].lower()) if match else None
            if match is None or column is None:
                self._ignored += 1
                continue
            key = match[1]
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = [-1, 0] * len(KINDS)
                begins.append(member.begin)
            elif key != self._last and self._neighbours:
                raise DataError(
                    f"{self._path}: member {member.name!r} at offset {member.offset} is apart from the others of its "
                    "sample, so that samples cannot be read in chunks. Pack the shard again, with the members of a "
                    "sample beside each other (vqclip data pack), or use data.order: full"
                )
            if row[2 * column] >= 0:
                raise DataError(
                    f"{self._path}: sample {key!r} has two members for its {KINDS[column]} (the second, "
                    f"{member.name!r}, at offset {member.offset}); names of samples must differ within a shard"
                )
            row[2 * column : 2 * column + 2] = member.offset, member.size
            self._last = key
        return begins

    def finish(self) -> SampleTable:
        """Return the table.

        Raises:
            DataError: there are members, but no samples.
        """
        if not self._rows and self._ignored:  # an empty tar is valid: all downloads of img2dataset may have failed
            raise DataError(
                f"{self._path}: no samples; expected members such as 000000000.jpg and 000000000.txt "
                f"(extensions: {', '.join(_COLUMNS)}; {self._ignored} members have others)"
            )
        keys = [key.encode("utf-8", "surrogateescape") for key in self._rows]
        table = np.array(list(self._rows.values()), dtype=np.int64).reshape(len(keys), len(KINDS), 2)
        return SampleTable(
            keys=b"".join(keys),
            key_ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
            offsets=np.ascontiguousarray(table[:, :, 0]),
            sizes=np.ascontiguousarray(table[:, :, 1]),
        )
