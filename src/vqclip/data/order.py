"""The order of samples: a function of (seed, position) that stores nothing.

Position p counts the samples of the whole run. An epoch has round(weight * size) slots of every source. The sample at
position p:

    epoch, slot = divmod(p, epoch_size)
    source, turn = mix(epoch, slot)                                # the turn-th slot of this source in the epoch
    tape = epoch * slots[source] + turn                            # all slots of the source over the whole run
    passes, place = divmod(tape, size[source])                     # passes: earlier passes through the source
    sample = shuffle(source, passes, place)

    global batch t = positions tG, ..., (t + 1)G - 1;  rank r takes every W-th of them, from the r-th on

So global batches depend neither on the world size nor on the number of workers, and resuming needs only the step.
Memory does not grow with the number of samples.

There are two orders, `FullOrder` and `WindowedOrder`; each has a mix and a shuffle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import BeforeValidator, Field

from vqclip.config import Config
from vqclip.data.draws import hash_integers
from vqclip.data.permutation import permute
from vqclip.data.windows import Windows, apportion

__all__ = ["FullOrder", "GlobalOrder", "OrderConfig", "Slots", "WindowedOrder"]

_MIX, _SAMPLES, _BLOCKS, _WINDOWS = 1, 2, 3, 4
_BLOCK = 2**16
"""Slots of an epoch over which `WindowedOrder` mixes the sources at random."""


class Slots(NamedTuple):
    """The samples at some positions; arrays of equal length."""

    source: np.ndarray
    """int64, index of the source."""
    sample: np.ndarray
    """int64, index of the sample in its source."""
    epoch: np.ndarray
    """int64, number of earlier passes through the source; with weight 1, the epoch."""


class Order(Protocol):
    """Mixes the sources of an epoch, and shuffles the samples of a source."""

    def mix(
        self, seed: int, slots: Sequence[int], epoch: np.ndarray, slot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return for each slot of an epoch its source, and how many earlier slots of the epoch are that source's.

        Args:
            seed: seed of the order.
            slots: slots of each source in an epoch.
            epoch: int64.
            slot: int64 below the sum of ``slots``, broadcast with ``epoch``.
        """

    def shuffle(self, seed: int, source: int, size: int, passes: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the sample at each place of a pass through a source; a bijection of 0 ... size - 1 in each pass."""


class FullOrder(Config):
    """One random order of all samples; for data on local disks.

    Each batch has samples of nearly all shards.
    """

    kind: Literal["full"] = "full"

    def mix(
        self, seed: int, slots: Sequence[int], epoch: np.ndarray, slot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Permute all slots of the epoch."""
        starts = np.cumsum([0, *slots], dtype=np.int64)
        slot = permute(slot, int(starts[-1]), hash_integers(seed, _MIX, epoch))
        source = np.searchsorted(starts, slot, side="right") - 1
        return source, slot - starts[source]

    def shuffle(self, seed: int, source: int, size: int, passes: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Permute all samples of the source."""
        return permute(place, size, hash_integers(seed, _SAMPLES, np.int64(source), passes))


class WindowedOrder(Config):
    """A random order of chunks, and of the samples within a window of chunks; for data that do not fit a local disk.

    A chunk is a number of consecutive samples of a source. A batch has samples of one or two windows of each source.
    """

    kind: Literal["windowed"] = "windowed"
    chunk: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Consecutive samples that stay together; for shards at URLs, the samples of a shard."""
    window: Annotated[int, Field(ge=1, le=2**24)] = 32_768
    """Chunks whose samples are shuffled together."""

    def mix(
        self, seed: int, slots: Sequence[int], epoch: np.ndarray, slot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give each block of slots its share of every source, and permute the slots of the block.

        A source's slots are used in their order, block by block, so that its windows follow one another.
        """
        if len(slots) == 1:
            return np.zeros_like(slot), slot
        size, block = sum(slots), slot // _BLOCK
        source, turn = np.empty_like(slot), np.empty_like(slot)
        for number in np.unique(block).tolist():
            mine = np.flatnonzero(block == number)
            first, end = number * _BLOCK, min((number + 1) * _BLOCK, size)
            before, after = apportion(slots, first), apportion(slots, end)
            starts = np.cumsum(np.concatenate([[0], after - before]))
            inner = permute(
                slot[mine] - first, end - first, hash_integers(seed, _BLOCKS, np.int64(number), epoch[mine])
            )
            source[mine] = np.searchsorted(starts, inner, side="right") - 1
            turn[mine] = before[source[mine]] + inner - starts[source[mine]]
        return source, turn

    def shuffle(self, seed: int, source: int, size: int, passes: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Permute the chunks of the source, and the samples of each window."""
        sample = np.empty_like(place)
        for number in np.unique(passes).tolist():
            mine = np.flatnonzero(passes == number)
            sample[mine] = self.windows(seed, source, size, number).samples(place[mine])
        return sample

    def windows(self, seed: int, source: int, size: int, passes: int) -> Windows:
        """Return the windows of one pass through a source of ``size`` samples."""
        return Windows(size, self.chunk, self.window, int(hash_integers(seed, _WINDOWS, source, passes)))


OrderConfig = Annotated[
    Annotated[FullOrder | WindowedOrder, Field(discriminator="kind")],
    BeforeValidator(lambda given: {"kind": given} if isinstance(given, str) else given),
]
"""Any order; the name of one stands for its defaults."""


class GlobalOrder:
    """Maps positions to samples.

    Args:
        sizes: number of samples of every source, each at least 1.
        weights: number of times that each sample of a source appears in an epoch. Fractions are allowed: with weight
            0.5 each sample appears once in two epochs, with weight 2 twice in each.
        seed: selects the order.
        kind: `FullOrder` or `WindowedOrder`.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, kind: Order | None = None):
        assert len(sizes) == len(weights) >= 1
        assert all(size >= 1 for size in sizes)
        assert all(weight > 0 for weight in weights)
        self.sizes = tuple(sizes)
        self.seed = seed
        self.kind: Order = FullOrder() if kind is None else kind
        self.slots = tuple(max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True))
        """Number of slots of every source in an epoch."""
        self.epoch_size = sum(self.slots)
        """Samples in an epoch, including repetitions."""

    def __getitem__(self, positions: np.ndarray) -> Slots:
        """Return the samples at these positions (int64 array, >= 0); the cost depends only on their number."""
        positions = np.asarray(positions, dtype=np.int64)
        epoch, slot = np.divmod(positions, self.epoch_size)
        source, turn = self.kind.mix(self.seed, self.slots, epoch, slot)
        sample, passes = np.empty_like(slot), np.empty_like(slot)
        for number, size in enumerate(self.sizes):
            mine = np.flatnonzero(source == number)
            passes[mine], place = np.divmod(epoch[mine] * self.slots[number] + turn[mine], size)
            sample[mine] = self.kind.shuffle(self.seed, number, size, passes[mine], place)
        return Slots(source, sample, passes)

    def batch(self, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Slots:
        """Return this rank's part of global batch `step`.

        Args:
            step: t, from 0.
            batch_size: G, over all ranks; any number, not only multiples of W.
            rank: r.
            world_size: W.
        """
        first = step * batch_size
        return self[np.arange(first + rank, first + batch_size, world_size, dtype=np.int64)]
