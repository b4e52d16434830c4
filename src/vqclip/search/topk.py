"""Top k of scores, with ties in order of the item number.

`torch.topk` promises no order among equal scores. So score and number are packed into one int64 key:

    key = (score as an ordered int32) << 32 | (2^32 - 1 - item)

Shapes: Q queries, M items scored, k results.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST_ITEMS", "rank_keys", "scores_and_items", "top_keys"]

_LOW = 2**32 - 1
_MAGNITUDE = 2**31 - 1
MOST_ITEMS = _MAGNITUDE
"""Range of the int32 of `CodeIndex.row`."""


def rank_keys(scores: Tensor, items: Tensor) -> Tensor:
    """Return integers in the order of the scores; of equal scores the lowest item number is largest.

    Args:
        scores: ``(Q, M)`` float32, no NaN.
        items: ``(M,)`` int64 item numbers, from 0 to less than `MOST_ITEMS`.

    Returns:
        ``(Q, M)`` int64: larger is better.
    """
    pattern = (scores + 0.0).view(torch.int32).long()  # + 0.0: -0 equals 0, and its bits do not
    # As integers, the bits of positive floats are ordered like the floats, and those of negative ones in reverse.
    ordered = torch.where(pattern >= 0, pattern, pattern ^ _MAGNITUDE)
    return (ordered << 32) | (_LOW - items)


def top_keys(found: Tensor, k: int) -> Tensor:
    """Return the k largest keys of every query ``(Q, M)``, best first, or all if there are fewer."""
    return found.topk(min(k, found.shape[1]), dim=1).values


def scores_and_items(found: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `rank_keys`: return float32 scores and int64 item numbers, each shaped like ``found``."""
    ordered = found >> 32
    pattern = torch.where(ordered >= 0, ordered, ordered ^ _MAGNITUDE)
    return pattern.to(torch.int32).view(torch.float32), _LOW - (found & _LOW)
