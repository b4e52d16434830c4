"""The order of samples: a stateless permutation, a function of (seed, position) and nothing else.

Position p counts samples over the whole run. Global batch t is positions [tG, (t+1)G); rank r takes every W-th of
them. So every world size and every number of workers sees the same global batches, and resuming needs only the step.

An epoch has ``round(weight * size)`` slots for every source. Which source a slot belongs to, and which sample it is,
are two keyed permutations: a generalised Feistel network over a domain a little larger than needed, whose outputs
beyond the end walk on along their cycle (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Nothing is
stored: memory does not grow with the number of samples.
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
    """What stands at some positions; arrays of one length."""

    source: np.ndarray
    """int64, index of the source."""
    sample: np.ndarray
    """int64, index of the sample in its source."""
    epoch: np.ndarray
    """int64, how often the source has been gone through before: with weight 1, the epoch."""


def permute(x: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Permutes 0 ... size - 1, by a permutation that `key` chooses.

    Args:
        x: int64 array of values in 0 ... size - 1.
        size: number of values, at least 1.
        key: uint64, broadcastable to x; elements with equal keys are permuted by the same permutation.

    Returns:
        int64 array like x; a bijection for every key.
    """
    assert size >= 1
    # A Feistel network over pairs (left < a, right < b) with a * b >= size: sides near the square root keep the number
    # of values beyond the end, and so of walks, below sqrt(size).
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
        # The keys are hashes already, so a multiple of the golden ratio is enough to tell the rounds apart.
        key = keys + np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)
        if number % 2 == 0:
            left = (left + hash_integers(right ^ key) % a) % a
        else:
            right = (right + hash_integers(left ^ key) % b) % b
    return left * b + right


class GlobalOrder:
    """Which sample stands at which position.

    Args:
        sizes: number of samples of every source, each at least 1.
        weights: how often a sample of that source appears in an epoch; fractions allowed. A source with weight 0.5
            shows each sample once in two epochs, one with weight 2 twice in each.
        seed: chooses the order.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        assert len(sizes) == len(weights) >= 1
        assert all(size >= 1 for size in sizes)
        assert all(weight > 0 for weight in weights)
        self.sizes = tuple(sizes)
        self.seed = seed
        self.slots = tuple(max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True))
        """Slots of every source in an epoch."""
        self.epoch_size = sum(self.slots)
        """Samples in an epoch, repetitions counted."""
        self._starts = np.cumsum([0, *self.slots], dtype=np.int64)

    def __getitem__(self, positions: np.ndarray) -> Slots:
        """What stands at these positions (int64 array of numbers >= 0), at a cost that depends on their number only."""
        positions = np.asarray(positions, dtype=np.int64)
        epoch, place = positions // self.epoch_size, positions % self.epoch_size
        place = permute(place, self.epoch_size, hash_integers(self.seed, _MIX, epoch))
        source = np.searchsorted(self._starts, place, side="right") - 1
        index, passes = np.empty_like(place), np.empty_like(place)
        for number, size in enumerate(self.sizes):
            mine = np.flatnonzero(source == number)
            # The source's own endless tape: epoch after epoch of its slots, pass after pass through its samples.
            tape = epoch[mine] * self.slots[number] + place[mine] - self._starts[number]
            passes[mine] = tape // size
            index[mine] = permute(tape % size, size, hash_integers(self.seed, _SAMPLES, np.int64(number), passes[mine]))
        return Slots(source, index, passes)

    def batch(self, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Slots:
        """This rank's share of global batch `step`.

        Args:
            step: t, from 0.
            batch_size: G, over all ranks; need not be a multiple of W.
            rank: r.
            world_size: W.
        """
        first = step * batch_size
        return self[np.arange(first + rank, first + batch_size, world_size, dtype=np.int64)]
