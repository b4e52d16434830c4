"""Windows of chunks: a pass through a source that reads each part of it once, and shuffles well.

    samples   0 1 2 3 | 4 5 6 7 | 8 9 ...      chunks of consecutive samples, the same in every pass
    chunks    7 2 5 | 0 4 1 | 3 6              permuted; a number of them in a row are a window
    window    chunks in a table, row by row; its columns are lanes
    round     one sample of every chunk, row by row; each round permutes the chunks of each lane

So consecutive places have samples of different chunks, equally many of every lane, and a node that owns some of the
lanes needs only the chunks of those. Which sample of a chunk comes in which round is a permutation as well.
Only the chunks of one window, or of two, have to be at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from vqclip.data.draws import hash_integers
from vqclip.data.permutation import permute

__all__ = ["Windows", "apportion"]

_CHUNKS, _WITHIN, _ROUNDS = 1, 2, 3
_LANES = (960, 480, 240, 120, 48, 24, 12, 4, 2, 1)
"""Possible numbers of lanes. They have many divisors: nodes whose number divides that of the lanes own equally many."""
_ROWS = 4
"""Smallest number of rows of a window with several lanes. Fewer would repeat batches that are smaller than a row."""


class _Cells(NamedTuple):
    """Cells of the tables of chunks; int64 arrays of equal length."""

    first: np.ndarray
    """Chunks before the window."""
    round: np.ndarray
    """Number of the round."""
    row: np.ndarray
    """Row in the window's table."""
    column: np.ndarray
    """Column in the window's table."""
    height: np.ndarray
    """Chunks of this column that are permuted: all but the short last one."""


class Windows:
    """The windows of one pass through the samples of a source.

    All windows have the same number of rows, up to one; only the last window may have a shorter last row. The last
    chunk of the source may be shorter than the others; it is then the last one of the last window, in every pass.

    Args:
        size: samples of the source, at least 1.
        chunk: samples of a chunk.
        window: chunks of a window, up to rounding: the pass has round(chunks / window) windows, at least one.
        key: selects the order, from source and pass.
    """

    def __init__(self, size: int, chunk: int, window: int, key: int):
        self.size, self.chunk = size, min(chunk, size)
        self.chunks = -(-size // self.chunk)
        """Chunks of the pass."""
        self.windows = max(1, round(self.chunks / window))
        """Windows of the pass."""
        self.lanes = next(each for each in _LANES if each * _ROWS * self.windows <= self.chunks or each == 1)
        """Lanes of every window; 960 for windows of at least 3,840 chunks."""
        self.rows = -(-self.chunks // self.lanes)
        """Rows of all windows together."""
        self.most_rows = -(-self.rows // self.windows)
        """Rows of the largest window."""
        self._key = key
        self._whole = size // self.chunk

    def samples(self, places: np.ndarray) -> np.ndarray:
        """Return the sample at each place of the pass; int64 in 0 ... size - 1."""
        cells = self._cells(places)
        rank = self._ranks(cells)
        key = hash_integers(self._key, _WITHIN, rank)
        within = permute(cells.round, self.chunk, key)
        short = np.flatnonzero(rank >= self._whole)
        within[short] = permute(cells.round[short], max(1, self.size % self.chunk), key[short])
        return self._chunk_at(rank) * self.chunk + within

    def lane_of(self, places: np.ndarray) -> np.ndarray:
        """Return the lane of each place, int64 below `lanes`; all samples of a chunk have one lane."""
        return self._cells(places).column

    def window_of(self, places: np.ndarray) -> np.ndarray:
        """Return the window of each place of the pass."""
        return ((places // (self.chunk * self.lanes) + 1) * self.windows - 1) // self.rows

    def first_chunk(self, window: np.ndarray | int) -> np.ndarray:
        """Return how many chunks come before a window."""
        return np.minimum(window * self.rows // self.windows * self.lanes, self.chunks)

    def needs(self, place: int, lanes: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the chunks of some lanes that are needed from a place of the pass on, each once, in the order of need.

        Memory is bounded by one window.

        Args:
            place: first place.
            lanes: ``(lanes,)`` bool, which lanes to yield.

        Yields:
            ``(place, chunk)``: the first place, from ``place`` on, that has a sample of the chunk.
        """
        for window in range(int(self.window_of(np.array(place))), self.windows):
            first, end = (int(self.first_chunk(each)) for each in (window, window + 1))
            start = max(place, first * self.chunk)
            # From the middle of a round, the rest of it and the whole next one contain every chunk.
            count = (end - first) * (1 if start == first * self.chunk else 2)
            places = np.arange(start, min(start + count, end * self.chunk, self.size))
            places = places[lanes[self.lane_of(places)]]
            rank, seen = np.unique(self._ranks(self._cells(places)), return_index=True)
            order = np.argsort(seen)
            yield from zip(places[seen[order]].tolist(), self._chunk_at(rank[order]).tolist(), strict=True)

    def _cells(self, places: np.ndarray) -> _Cells:
        """Return where the tables of chunks are read at each place, before the chunks of lanes are permuted."""
        window = self.window_of(places)
        first = self.first_chunk(window)
        count = self.first_chunk(window + 1) - first
        inner = places - first * self.chunk
        number, position = np.divmod(inner, count)
        whole = count
        if short := self.size % self.chunk:  # samples of the last chunk, which is in as many rounds of the last window
            last = window == self.windows - 1
            whole = count - last
            late = np.flatnonzero(last & (number >= short))
            number[late], position[late] = np.divmod(inner[late] - short, whole[late])
        row, column = np.divmod(position, self.lanes)
        return _Cells(first, number, row, column, (whole - column + self.lanes - 1) // self.lanes)

    def _ranks(self, cells: _Cells) -> np.ndarray:
        """Return the rank, among the permuted chunks of the pass, of the chunk that each cell has in its round."""
        row = cells.row.copy()
        key = hash_integers(self._key, _ROUNDS, cells.first + cells.column, cells.round)
        for height in range(int(cells.height.min(initial=1)), int(cells.height.max(initial=0)) + 1):
            mine = np.flatnonzero((cells.height == height) & (cells.row < height))
            row[mine] = permute(row[mine], max(1, height), key[mine])
        return cells.first + row * self.lanes + cells.column

    def _chunk_at(self, rank: np.ndarray) -> np.ndarray:
        """Return the chunk at each rank of the permuted chunks."""
        whole = permute(np.minimum(rank, self._whole - 1), self._whole, hash_integers(self._key, _CHUNKS))
        return np.where(rank < self._whole, whole, rank)


def apportion(slots: Sequence[int], count: int) -> np.ndarray:
    """Divide the first ``count`` slots of an epoch among the sources, in proportion to their slots.

    Webster's method (Sainte-Laguë), in integers: a source's share never falls when ``count`` grows, differs little from
    the proportion, and is ``slots`` at the end of the epoch.

    Args:
        slots: slots of each source in an epoch.
        count: at most their sum.

    Returns:
        int64, the slots of each source; their sum is ``count``.
    """
    total = sum(slots)
    shares = [(2 * count * each + total) // (2 * total) for each in slots]
    everyone = [number for number, each in enumerate(slots) if each]
    while sum(shares) < count:
        shares[min(everyone, key=lambda n: (Fraction(2 * shares[n] + 1, slots[n]), n))] += 1
    while sum(shares) > count:
        shares[max(everyone, key=lambda n: (Fraction(2 * shares[n] - 1, slots[n]), n))] -= 1
    return np.array(shares, dtype=np.int64)
