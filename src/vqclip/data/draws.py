"""Random numbers and permutations as functions of integers: no state, no global generator, equal on every platform."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 6
_SLICE = 2**13
"""Values computed at a time; arrays of this size stay in the processor's cache, which halves the time."""


def hash_integers(*parts: int | np.ndarray | np.integer) -> np.ndarray:
    """Hash integers into uniform 64-bit numbers, elementwise.

    The finaliser is splitmix64's (Steele, Lea & Flood, 2014), applied after every part.

    Args:
        *parts: integers or integer arrays that broadcast; their order matters.

    Returns:
        uint64 array of the broadcast shape.
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            word = np.uint64(part & _MASK) if isinstance(part, int) else part.astype(np.uint64)
            state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


class KeyedGenerator:
    """A numpy generator (Philox) that can be set to the stream of any (seed, epoch, sample id).

    Creating a generator takes 20 microseconds, setting it less than one.

    Args:
        seed: a seed for this purpose only; see `vqclip.seeds.derive_seed`.
    """

    def __init__(self, seed: int):
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._key = [seed & _MASK, 0]

    def at(self, epoch: int, sample_id: int) -> np.random.Generator:
        """Return the generator at the start of the stream of this sample; valid until the next call."""
        # Philox counts in the first word of its counter, so the last words identify the stream.
        # Lists work like arrays here, and are faster to make.
        state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": [0, 0, epoch & _MASK, sample_id & _MASK], "key": self._key},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,  # used up
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits.state = state
        return self._generator

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy 1 unpickles `_generator` with bits of its own, which `at` would not set.
        return KeyedGenerator, (self._key[0],)


def permute(x: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Apply the permutation of 0 ... size - 1 that `key` selects.

    Args:
        x: 1-D int64 array of values in 0 ... size - 1.
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
    for first in range(0, len(values), _SLICE):
        part = slice(first, first + _SLICE)
        values[part] = _feistel(values[part], a, b, keys[part])
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
