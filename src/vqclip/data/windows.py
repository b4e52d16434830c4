"""Windows of chunks: a pass through a source that reads each part of it once, and shuffles well.

    samples   0 1 2 3 | 4 5 6 7 | 8 9 ...      chunks of consecutive samples, the same in every pass
    chunks    7 2 5 | 0 4 1 | 3 6              permuted; a number of them in a row are a window
    window    chunks in a table, row by row; its columns are lanes
    round     one sample of every chunk, row by row; each round permutes the chunks of each lane

So consecutive places have samples of different chunks, equally many of every lane, and a node that owns some of the
lanes needs only the chunks of those. Which sample of a chunk comes in which round is a permutation as well.
Only the chunks of one window, or of two, have to be at hand.

With M nodes and L lanes, lane l belongs to node l mod M. If M does not divide L, some lanes are left over; each node
takes as many of them as it needs for its share of the batch, so that a few nodes read such a lane, always the same. A
node that owns more samples of a batch than its share gives some away. A node with k times as many ranks as another one
counts as k nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from vqclip.data.draws import hash_integers, permute

_CHUNKS, _WITHIN, _ROUNDS = 1, 2, 3
_LANES = (960, 480, 240, 120, 48, 24, 12, 4, 2, 1)
"""Possible numbers of lanes. They have many divisors: nodes whose number divides that of the lanes own equally many."""
_ROWS = 4
"""Smallest number of rows of a window with several lanes. Fewer would repeat batches that are smaller than a row."""


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
        number, *cells = self._cells(places)
        spot, chunk = self._chunks(number, *cells)
        key = hash_integers(self._key, _WITHIN, spot)
        within = permute(number, self.chunk, key)
        short = np.flatnonzero(spot >= self._whole)
        within[short] = permute(number[short], max(1, self.size % self.chunk), key[short])
        return chunk * self.chunk + within

    def lane_of(self, places: np.ndarray) -> np.ndarray:
        """Return the lane of each place, int64 below `lanes`; all samples of a chunk have one lane."""
        return self._cells(places)[2]

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
            chunks, seen = np.unique(self._chunks(*self._cells(places))[1], return_index=True)
            order = np.argsort(seen)
            yield from zip(places[seen[order]].tolist(), chunks[order].tolist(), strict=True)

    def _cells(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return where the tables of chunks are read at each place, before the chunks of lanes are permuted.

        Returns:
            int64 arrays of equal length: the number of the round; row and column in the window's table; the chunks of
            this column that are permuted, which are all but the short last one; and the chunks before the window.
        """
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
        return number, row, column, (whole - column + self.lanes - 1) // self.lanes, first

    def _chunks(
        self, number: np.ndarray, row: np.ndarray, column: np.ndarray, height: np.ndarray, first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the chunk of each of `_cells`: its spot among the permuted chunks of the pass, and its number."""
        key = hash_integers(self._key, _ROUNDS, first + column, number)
        permuted = row.copy()
        for each in range(int(height.min(initial=1)), int(height.max(initial=0)) + 1):
            mine = np.flatnonzero((height == each) & (row < each))
            permuted[mine] = permute(row[mine], max(1, each), key[mine])
        spot = first + permuted * self.lanes + column
        whole = permute(np.minimum(spot, self._whole - 1), self._whole, hash_integers(self._key, _CHUNKS))
        return spot, np.where(spot < self._whole, whole, spot)


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


class NodeLayout:
    """Nodes of the ranks of a job, to which samples are dealt so that a node reads few chunks of the others.

    Args:
        nodes: node of every rank, in the order of the ranks; any integers.
    """

    def __init__(self, nodes: Sequence[int]):
        self.of_rank = np.unique(np.asarray(nodes), return_inverse=True)[1]
        """``(W,)`` int64, node of each rank, from 0."""
        self.ranks = np.bincount(self.of_rank)
        """``(M,)`` int64, ranks of each node."""
        self._units = np.repeat(np.arange(len(self.ranks)), self.ranks // math.gcd(*self.ranks.tolist()))

    def lanes_of(self, rank: int, lanes: int) -> np.ndarray:
        """Return which lanes the node of a rank owns or shares, ``(lanes,)`` bool; a few samples come from others."""
        node, units = self.of_rank[rank], len(self._units)
        found = self._owner(np.arange(lanes), lanes) == node
        first, end = np.searchsorted(self._units, [node, node + 1])
        left = lanes % units
        found[lanes - left + first * left // units : lanes - left - (-end * left // units)] = True
        return found

    def deal(self, source: np.ndarray, lane: np.ndarray, lanes: Sequence[int], rank: int) -> np.ndarray:
        """Return the places of a rank's samples in a global batch, ascending int64: every k-th of its node's k ranks.

        A rank gets as many samples as with a stride: G // W, and one more if rank < G mod W. The number of samples that
        do not go to the owner of their lane is the smallest possible.

        Args:
            source: ``(G,)`` int64, source of each sample.
            lane: ``(G,)`` int64, lane of each sample among those of its source.
            lanes: number of lanes of each source.
            rank: r.
        """
        size, world_size, nodes = len(source), len(self.of_rank), len(self.ranks)
        share = size // world_size * self.ranks + np.bincount(self.of_rank[: size % world_size], minlength=nodes)
        node = np.empty(size, dtype=np.int64)
        for number, count in enumerate(lanes):
            of_source = np.flatnonzero(source == number)
            node[of_source] = self._owner(lane[of_source], count)
        owned = np.bincount(node + 1, minlength=nodes + 1)
        if not np.array_equal(owned[1:], share):
            # To deal again: samples without an owner, and of owners with more than their share those of the last lanes,
            # so that few chunks are read by two nodes.
            order = np.lexsort((lane, source, node))
            number_of_owner = np.arange(size) - np.repeat(np.cumsum(owned) - owned, owned)
            free = order[number_of_owner >= np.concatenate([[0], share])[node[order] + 1]]
            # Each source's samples, and the excess, are spread over all nodes in the order of their lanes, so that a
            # node gets samples of about the same lanes in every batch.
            group = np.where(node[free] < 0, source[free], -1)
            free = free[np.lexsort((lane[free], group))]
            counts = np.unique(group, return_counts=True)[1]
            spread = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
            missing = np.maximum(share - owned[1:], 0)
            node[free[np.argsort(spread, kind="stable")]] = np.repeat(np.arange(nodes), missing)
        mine = self.of_rank[rank]
        return np.flatnonzero(node == mine)[int((self.of_rank[:rank] == mine).sum()) :: self.ranks[mine]]

    def _owner(self, lane: np.ndarray, lanes: int) -> np.ndarray:
        """Return the node that owns each lane, -1 for those that are left over."""
        units = len(self._units)
        return np.where(lane < lanes - lanes % units, self._units[lane % units], -1)
