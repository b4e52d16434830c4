"""The best of many scores, with ties in a stated order.

`torch.topk` promises no order among equal scores. Score and number together, as one integer, are never equal.

Shapes: Q queries, M items scored, k results.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST_ITEMS", "best", "ranks", "scores_and_items"]

_LOW = 2**32 - 1
_MAGNITUDE = 2**31 - 1
MOST_ITEMS = _MAGNITUDE
"""What the int32 of `CodeIndex.row` can count; `ranks` could tell twice as many apart."""


def ranks(scores: Tensor, items: Tensor) -> Tensor:
    """Integers that stand in the order of the scores, equal ones by number, the lowest first.

    Args:
        scores: ``(Q, M)`` float32, no NaN.
        items: ``(M,)`` int64, their numbers, from 0 to less than `MOST_ITEMS`.

    Returns:
        ``(Q, M)`` int64: larger is better.
    """
    pattern = (scores + 0.0).view(torch.int32).long()  # + 0.0: -0 equals 0, and its bits do not
    # As integers, the bits of positive numbers stand in their order, and those of negative ones in the reverse.
    ordered = torch.where(pattern >= 0, pattern, pattern ^ _MAGNITUDE)
    return (ordered << 32) | (_LOW - items)


def best(found: Tensor, k: int) -> Tensor:
    """``(Q, M)`` `ranks` → the best k of every query, best first, or all where there are fewer."""
    return found.topk(min(k, found.shape[1]), dim=1).values


def scores_and_items(found: Tensor) -> tuple[Tensor, Tensor]:
    """What `ranks` was given: float32 scores and int64 numbers, each shaped like ``found``."""
    ordered = found >> 32
    pattern = torch.where(ordered >= 0, ordered, ordered ^ _MAGNITUDE)
    return pattern.to(torch.int32).view(torch.float32), _LOW - (found & _LOW)
