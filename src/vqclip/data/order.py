"""The order of samples: a function of (seed, position) that stores nothing.

Position p counts the samples of the whole run. An epoch has round(weight * size) slots of every source, numbered
source by source. The sample at position p:

    epoch, slot = divmod(p, epoch_size)
    slot = permute(slot, epoch_size, key=(seed, epoch))            # mix the sources
    source = the source that owns the slot
    tape = epoch * slots[source] + (slot - first_slot[source])     # all slots of the source over the whole run
    passes, place = divmod(tape, size[source])                     # passes: earlier passes through the source
    sample = permute(place, size[source], key=(seed, source, passes))

    global batch t = positions tG, ..., (t + 1)G - 1;  rank r takes every W-th of them, from the r-th on

So global batches depend neither on the world size nor on the number of workers, and resuming needs only the step.
`permute` is a keyed bijection of 0 ... size - 1: a Feistel network over a slightly larger domain, applied again while
its result is too large (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Memory does not grow with the
number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vqclip.data.draws import hash_integers

__all__ = ["GlobalOrder", "Slots", "permute"]

_ROUNDS = 6
_MIX, _SAMPLES = 1, 2


class Slots(NamedTuple):
    """The samples at some positions; arrays of equal length."""

    source: np.ndarray
    """int64, index of the source."""
    sample: np.ndarray
    """int64, index of the sample in its source."""
    epoch: np.ndarray
    """int64, number of earlier passes through the source; with weight 1, the epoch."""


def permute(x: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Apply the permutation of 0 ... size - 1 that `key` selects.

    Args:
        x: int64 array of values in 0 ... size - 1.
        size: number of values, at least 1.
        key: uint64, broadcastable to x; equal keys mean the same permutation.

    Returns:
        int64 array like x; a bijection for every key.
    """
    assert size >= 1
    # A Feistel network over pairs (left < a, right < b) with a * b >= size. With a and b near the square root, fewer
    # than sqrt(size) values are too large.
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    values = x.astype(np.uint64)
    keys = np.broadcast_to(key, values.shape)
    values = _feistel(values, a, b, keys)
    while len(beyond := np.flatnonzero(values >= size)):
        values[beyond] = _feistel(values[beyond], a, b, keys[beyond])
    return values.astype(np.int64)


def _feistel(values: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    a, b = np.uint64(rows), np.uint64(columns)
    left, right = np.divmod(values, b)
    for number in range(_ROUNDS):
        # The keys are hashes already, so adding multiples of the golden ratio makes the rounds independent.
        key = keys + np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)
        if number % 2 == 0:
            left = (left + hash_integers(right ^ key) % a) % a
        else:
            right = (right + hash_integers(left ^ key) % b) % b
    return left * b + right


class GlobalOrder:
    """Maps positions to samples.

    Args:
        sizes: number of samples of every source, each at least 1.
        weights: number of times that each sample of a source appears in an epoch. Fractions are allowed: with weight
            0.5 each sample appears once in two epochs, with weight 2 twice in each.
        seed: selects the order.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        assert len(sizes) == len(weights) >= 1
        assert all(size >= 1 for size in sizes)
        assert all(weight > 0 for weight in weights)
        self.sizes = tuple(sizes)
        self.seed = seed
        self.slots = tuple(max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True))
        """Number of slots of every source in an epoch."""
        self.epoch_size = sum(self.slots)
        """Samples in an epoch, including repetitions."""
        self._starts = np.cumsum([0, *self.slots], dtype=np.int64)

    def __getitem__(self, positions: np.ndarray) -> Slots:
        """Return the samples at these positions (int64 array, >= 0); the cost depends only on their number."""
        positions = np.asarray(positions, dtype=np.int64)
        epoch, slot = np.divmod(positions, self.epoch_size)
        slot = permute(slot, self.epoch_size, hash_integers(self.seed, _MIX, epoch))
        source = np.searchsorted(self._starts, slot, side="right") - 1
        sample, passes = np.empty_like(slot), np.empty_like(slot)
        for number, size in enumerate(self.sizes):
            mine = np.flatnonzero(source == number)
            tape = epoch[mine] * self.slots[number] + slot[mine] - self._starts[number]
            passes[mine], place = np.divmod(tape, size)
            sample[mine] = permute(place, size, hash_integers(self.seed, _SAMPLES, np.int64(number), passes[mine]))
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
