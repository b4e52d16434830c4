"""Keyed permutations of 0 ... size - 1 that are computed value by value."""

from __future__ import annotations

import math

import numpy as np

from vqclip.data.draws import hash_integers

__all__ = ["permute"]

_ROUNDS = 6
_SLICE = 2**13
"""Values computed at a time; arrays of this size stay in the processor's cache, which halves the time."""


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
