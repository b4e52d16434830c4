"""The order of samples: a function of (seed, position) that stores nothing.

Position p counts the samples of the whole run. The first e epochs have before(e) = floor(e * weight * size) slots of
each source, so an epoch has one more than another if weight * size is a fraction. The sample at position p:

    epoch: the last one that begins at p or before; it begins at the sum of before(epoch) over the sources
    source, turn = mix(epoch, p - begin)                           # the turn-th slot of this source in the epoch
    tape = before(epoch)[source] + turn                            # all slots of the source over the whole run
    passes, place = divmod(tape, size[source])                     # passes: earlier passes through the source
    place = opening(source, passes)[place]                         # only for the first few: see below
    sample = shuffle(source, passes, place)

    global batch t = positions tG, ..., (t + 1)G - 1;  rank r takes every W-th of them, from the r-th on, or on several
    nodes, if the order is windowed, a part of those whose chunks its node owns

So global batches depend neither on the world size nor on the number of workers, and resuming needs only the step.
Memory does not grow with the number of samples.

A batch in which a pass ends and the next one begins has `before` samples of the one and `after` of the other. To have
none of them twice, the opening of the next pass, its first `before + after` places, exchanges some samples:

    tail     the last `before` samples of the pass that ends
    out      places below `after` whose samples are in the tail
    into     the first places from `after` on whose samples are not     # there are always enough in the opening
    exchange the samples of `out` and `into`, one by one

So a batch has no sample twice, unless it has more samples of a source than the source has. All other places cost
nothing. The tail is that of a pass that has exchanged its own opening, where both overlap: passes of less than two
batches.

There are two orders, `GlobalOrder` and `WindowedGlobalOrder`, each with a shuffle. Their configurations, `FullOrder`
and `WindowedOrder`, build them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from vqclip.config import Config
from vqclip.data.draws import hash_integers, permute
from vqclip.data.windows import NodeLayout, Windows, apportion

_SAMPLES, _BLOCKS, _WINDOWS = 2, 3, 4
_BLOCK = 2**12
"""Slots of an epoch over which the sources are mixed at random."""


class Slots(NamedTuple):
    """The samples at some positions; arrays of equal length."""

    source: np.ndarray
    """int64, index of the source."""
    sample: np.ndarray
    """int64, index of the sample in its source."""
    epoch: np.ndarray
    """int64, number of earlier passes through the source; with weight 1, the epoch."""


class GlobalOrder:
    """Maps positions to samples, in one random order of all samples; see `OrderConfig`, whose `build` makes it.

    Args:
        sizes: number of samples of every source, each at least 1.
        weights: number of times that each sample of a source appears in an epoch. Fractions are allowed, read as the
            decimal numbers that they are written as: with weight 0.5 each sample appears once in two epochs, with
            weight 2 twice in each.
        seed: selects the order.
        batch_size: G, samples of a global batch, in which no sample comes twice where that can be avoided.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, batch_size: int):
        assert len(sizes) == len(weights) >= 1
        assert all(size >= 1 for size in sizes)
        assert all(weight > 0 for weight in weights)
        self.sizes = tuple(sizes)
        self.seed, self.batch_size = seed, batch_size
        self._openings: dict[tuple[int, int], np.ndarray] = {}
        """The last few openings by source and pass: each follows from the one before if passes are short."""
        self.slots = tuple(size * Fraction(str(weight)) for size, weight in zip(sizes, weights, strict=True))
        """Slots of every source in an epoch, on average over the epochs."""
        self.epoch_size = max(1, round(sum(self.slots)))
        """Samples in an epoch, including repetitions; epochs differ by at most one for each source with fractions."""

    def _shuffle(self, source: int, passes: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the sample at each place of a pass through a source; a bijection of 0 ... size - 1 in each pass."""
        return permute(place, self.sizes[source], hash_integers(self.seed, _SAMPLES, np.int64(source), passes))

    def __getitem__(self, positions: np.ndarray) -> Slots:
        """Return the samples at these positions (int64 array, >= 0); the cost depends only on their number."""
        source, passes, place = self._places(np.asarray(positions, dtype=np.int64))
        return self._slots(source, passes, place)

    def begin(self, epoch: int) -> int:
        """Return the position of the first sample of an epoch."""
        return sum(self._slots_before(epoch))

    def epoch_of(self, position: int) -> int:
        """Return the epoch of a position."""
        # The sum of S floors of e * slots is at most e * total, and above it less S.
        total = sum(self.slots)
        first, last = int(position / total), int((position + len(self.slots)) / total)
        return first - 1 + bisect_right(range(first, last + 1), position, key=self.begin)

    def count_used(self, step: int, source: int) -> int:
        """Return how many samples of a source the steps before `step` use, over all epochs."""
        epoch, before, slots = self._epoch(step * self.batch_size)
        slot = step * self.batch_size - sum(before)
        block = slot // _BLOCK * _BLOCK
        sources, _ = self._mix(slots, epoch, np.arange(block, slot))
        return before[source] + int(apportion(slots, block)[source] + (sources == source).sum())

    def deal(self, step: int, rank: int, nodes: Sequence[int]) -> tuple[Slots, np.ndarray]:
        """Return this rank's samples of global batch `step`: every W-th, from the r-th on.

        With several nodes, in the windowed order, it gets as many samples, of chunks that its node owns where possible;
        see `vqclip.data.windows.NodeLayout`. All ranks together get the global batch, the same for all `nodes`.

        Args:
            step: t, from 0.
            rank: r.
            nodes: node of every rank.

        Returns:
            The samples, and their places in the global batch: int64, ascending, 0 to G - 1.
        """
        places = np.arange(rank, self.batch_size, len(nodes), dtype=np.int64)
        return self[step * self.batch_size + places], places

    def _places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each position its source, and the pass and place there."""
        source, tape, left = np.empty_like(positions), np.empty_like(positions), positions
        while len(left):
            epoch, before, slots = self._epoch(int(left.min()))
            first, end = sum(before), sum(before) + sum(slots)
            mine = np.flatnonzero((positions >= first) & (positions < end))
            source[mine], turn = self._mix(slots, epoch, positions[mine] - first)
            tape[mine] = np.array(before)[source[mine]] + turn
            left = left[left >= end]
        passes, place = np.divmod(tape, np.array(self.sizes)[source])
        near = np.flatnonzero(place < self.batch_size)  # of the beginning of a pass
        key = passes[near] * len(self.sizes) + source[near]
        for each in np.unique(key).tolist():
            opening = self._opening(each % len(self.sizes), each // len(self.sizes))
            mine = near[(key == each) & (place[near] < len(opening))]
            place[mine] = opening[place[mine]]
        return source, passes, place

    def _slots_before(self, epoch: int) -> list[int]:
        """Return the slots of each source in all earlier epochs."""
        return [epoch * each.numerator // each.denominator for each in self.slots]

    def _epoch(self, position: int) -> tuple[int, list[int], list[int]]:
        """Return the epoch of a position, the slots of each source before it, and those in it."""
        epoch = self.epoch_of(position)
        before, after = self._slots_before(epoch), self._slots_before(epoch + 1)
        return epoch, before, [end - first for first, end in zip(before, after, strict=True)]

    def _mix(self, slots: Sequence[int], epoch: int, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each slot of an epoch its source, and how many earlier slots of the epoch are that source's.

        Each block of slots has its share of every source, in random places of the block. A source's turns follow one
        another, so that its windows and lanes do.

        Args:
            slots: slots of each source in this epoch.
            epoch: its number.
            slot: int64 below the sum of ``slots``.
        """
        if len(slots) == 1:
            return np.zeros_like(slot), slot
        source, turn = np.empty_like(slot), np.empty_like(slot)
        for block in np.unique(slot // _BLOCK).tolist():
            sources, turns = _mix_block(tuple(slots), block, (self.seed, _BLOCKS, block, epoch))
            mine = np.flatnonzero(slot // _BLOCK == block)
            source[mine], turn[mine] = sources[slot[mine] % _BLOCK], turns[slot[mine] % _BLOCK]
        return source, turn

    def _opening(self, source: int, passes: int) -> np.ndarray:
        """Return the places whose samples come at the first places of a pass; see the module's docstring."""
        known, size, todo = self._openings, self.sizes[source], list[tuple[int, int]]()
        first = passes + 1
        while (source, first - 1) not in known:  # back to a pass whose tail does not depend on its opening
            earlier = self._shares(source, first - 1)
            if todo and sum(earlier) + todo[-1][0] <= size:
                break
            first -= 1
            todo.append(earlier)
            if not earlier[0]:
                break
        opening = known.get((source, first - 1), np.arange(0))
        for number, (before, after) in enumerate(reversed(todo), first):
            tail = np.arange(size - before, size)
            inside = np.flatnonzero(tail < len(opening))
            tail[inside] = opening[tail[inside]]
            seen = self._shuffle(source, np.full_like(tail, number - 1), tail)
            opening = np.arange(before + after if before else 0)
            is_seen = np.isin(self._shuffle(source, np.full_like(opening, number), opening), seen)
            out = np.flatnonzero(is_seen[:after])
            into = after + np.flatnonzero(~is_seen[after:])[: len(out)]
            opening[out], opening[into] = into, out
        known[source, passes] = opening
        while len(known) > 4 * len(self.sizes):
            del known[next(iter(known))]
        return opening

    def _shares(self, source: int, passes: int) -> tuple[int, int]:
        """Return how many samples of the pass before, and of this one, are in the batch in which a pass begins.

        None where they are more than the source has.
        """
        begin, slots = passes * self.sizes[source], self.slots[source]
        epoch = math.ceil((begin + 1) / slots) - 1
        before, after = self._slots_before(epoch), self._slots_before(epoch + 1)
        of_epoch, turn = [end - first for first, end in zip(before, after, strict=True)], begin - before[source]
        blocks = range(0, sum(of_epoch), _BLOCK)
        first = blocks[bisect_right(blocks, turn, key=lambda count: apportion(of_epoch, count)[source]) - 1]
        sources, turns = self._mix(of_epoch, epoch, np.arange(first, min(first + _BLOCK, sum(of_epoch))))
        position = sum(before) + first + int(np.flatnonzero((sources == source) & (turns == turn))[0])
        step = position // self.batch_size
        shares = begin - self.count_used(step, source), self.count_used(step + 1, source) - begin
        return shares if sum(shares) <= self.sizes[source] else (0, 0)

    def _slots(self, source: np.ndarray, passes: np.ndarray, place: np.ndarray) -> Slots:
        sample = np.empty_like(place)
        for number in range(len(self.sizes)):
            mine = np.flatnonzero(source == number)
            sample[mine] = self._shuffle(number, passes[mine], place[mine])
        return Slots(source, sample, passes)


class WindowedGlobalOrder(GlobalOrder):
    """A random order of chunks, and of the samples within a window of chunks.

    Args:
        sizes: of the sources; see `GlobalOrder`.
        weights: of the sources.
        seed: selects the order.
        batch_size: G.
        chunk: consecutive samples that stay together.
        window: chunks whose samples are shuffled together.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, batch_size: int, chunk: int, window: int
    ):
        super().__init__(sizes, weights, seed, batch_size)
        self.chunk, self.window = chunk, window

    def windows(self, source: int, passes: int = 0) -> Windows:
        """Return the windows of one pass through a source."""
        key = int(hash_integers(self.seed, _WINDOWS, source, passes))
        return Windows(self.sizes[source], self.chunk, self.window, key)

    def deal(self, step: int, rank: int, nodes: Sequence[int]) -> tuple[Slots, np.ndarray]:
        """Return this rank's samples of global batch `step`, and their places; see `GlobalOrder.deal`."""
        layout = NodeLayout(nodes)
        if len(layout.ranks) == 1:
            return super().deal(step, rank, nodes)
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        source, passes, place = self._places(positions)
        lane, lanes = np.empty_like(source), []
        for number in range(len(self.sizes)):
            for each in np.unique(passes[source == number]).tolist():
                mine = np.flatnonzero((source == number) & (passes == each))
                lane[mine] = self.windows(number, each).lane_of(place[mine])
            lanes.append(self.windows(number).lanes)
        places = layout.deal(source, lane, lanes, rank)
        return self._slots(source[places], passes[places], place[places]), places

    def needs(self, step: int, source: int, rank: int, nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the chunks of a source that this rank's node needs from global batch `step` on, without end.

        They come in the order of need, through all windows and passes; each once a pass. A batch may have a few
        samples of other chunks as well, where `deal` moves samples to make equal parts, and where a pass begins.
        Memory is bounded by one window.

        Args:
            step: t, from 0.
            source: number of the source.
            rank: any rank of the node.
            nodes: node of every rank.

        Yields:
            ``(used, chunk)``: how many samples of the source come before the first that needs the chunk, over all
            epochs; and the number of the chunk, which begins with sample ``chunk * WindowedOrder.chunk``.
        """
        size, layout = self.sizes[source], NodeLayout(nodes)
        passes, place = divmod(self.count_used(step, source), size)
        while True:
            windows = self.windows(source, passes)
            for where, chunk in windows.needs(place, layout.lanes_of(rank, windows.lanes)):
                yield passes * size + where, chunk
            passes, place = passes + 1, 0

    def window_chunks(self, source: int, rank: int, nodes: Sequence[int]) -> int:
        """Return the most chunks of a window of a source that this rank's node needs."""
        windows = self.windows(source)
        return windows.most_rows * int(NodeLayout(nodes).lanes_of(rank, windows.lanes).sum())

    def _shuffle(self, source: int, passes: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Permute the chunks of the source, and the samples of each window."""
        sample = np.empty_like(place)
        for number in np.unique(passes).tolist():
            mine = np.flatnonzero(passes == number)
            sample[mine] = self.windows(source, number).samples(place[mine])
        return sample


@lru_cache(16)
def _mix_block(slots: tuple[int, ...], block: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return source and turn of each slot of a block; see `GlobalOrder._mix`."""
    first, end = block * _BLOCK, min((block + 1) * _BLOCK, sum(slots))
    before = apportion(slots, first)
    counts = apportion(slots, end) - before
    order = np.argsort(hash_integers(*key, np.arange(end - first)), kind="stable")
    sources = np.repeat(np.arange(len(slots)), counts)[order]
    turns = np.empty_like(sources)
    starts = before - np.cumsum(counts) + counts
    turns[np.argsort(sources, kind="stable")] = np.arange(end - first) + np.repeat(starts, counts)
    return sources, turns


class FullOrder(Config):
    """One random order of all samples; for data on local disks.

    Each batch has samples of nearly all shards.
    """

    kind: Literal["full"] = "full"

    def build(self, sizes: Sequence[int], weights: Sequence[float], seed: int, batch_size: int = 1) -> GlobalOrder:
        """Return the order of some sources; see `GlobalOrder`."""
        return GlobalOrder(sizes, weights, seed, batch_size)


class WindowedOrder(Config):
    """A random order of chunks, and of the samples within a window of chunks; for data that do not fit a local disk.

    A chunk is a number of consecutive samples of a source. A batch has samples of one or two windows of each source.
    """

    kind: Literal["windowed"] = "windowed"
    chunk: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Consecutive samples that stay together: a multiple of the samples of a chunk of the index, which are 128 unless
    it was made with others. Plain tars are read in chunks."""
    window: Annotated[int, Field(ge=1, le=2**24)] = 32_768
    """Chunks whose samples are shuffled together."""

    def build(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, batch_size: int = 1
    ) -> WindowedGlobalOrder:
        """Return the order of some sources; see `GlobalOrder`."""
        return WindowedGlobalOrder(sizes, weights, seed, batch_size, self.chunk, self.window)


OrderConfig = Annotated[
    Annotated[FullOrder | WindowedOrder, Field(discriminator="kind")],
    BeforeValidator(lambda given: {"kind": given} if isinstance(given, str) else given),
]
"""Any order; the name of one stands for its defaults."""
