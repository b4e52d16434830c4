"""Random draws that depend only on a key, so that any image can be drawn alone and in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draws:
    """A stream of draws keyed by integers; no global random state is read or changed.

    Everything is derived from `Generator.random`, whose stream is the same in all versions of numpy, so that a newer
    numpy does not change the images.

    Args:
        key: non-negative integers, here (version, dataset seed, split number, image index, attempt).
    """

    def __init__(self, *key: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key))).random

    def uniform(self, low: float, high: float) -> float:
        """Return a float in [low, high)."""
        return low + (high - low) * self._random()

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items, all equally likely."""
        return items[int(self._random() * len(items))]

    def pick_weighted(self, items: dict[T, float]) -> T:
        """Return one of the keys, in proportion to its value."""
        mark = self._random() * sum(items.values())
        for item, weight in items.items():
            mark -= weight
            if mark < 0:
                return item
        return next(reversed(items))

    def shuffle(self, items: Sequence[T]) -> list[T]:
        """Return the items in a random order."""
        keys = [self._random() for _ in items]
        return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]
