"""Top-k hits from embeddings, in blocks of rows, with ties counted as a random order.

    for each query: best   = score of its best right candidate
                    above  = candidates with a higher score (all of them wrong)
                    ties   = right and wrong candidates at this score
                    hits  += probability that a right one is among the first k, if the ties are in random order

A model with equal embeddings for all inputs therefore scores exactly chance, not 100 %. Scores that differ only by
rounding are ties too: equal codes are common, and their last bits depend on the batch.

Shapes: Q queries, M candidates, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vqclip.process import progress

BLOCK = 2**24
"""Most scores in memory: 64 MiB in fp32."""
SAME = 5e-6
"""Largest difference of cosine similarities that is a tie."""


def hit_rates(
    queries: Tensor, candidates: Tensor, query_group: Tensor, group: Tensor, ks: Sequence[int]
) -> list[float]:
    """Return the share of queries with a right candidate among their k nearest (top-k accuracy, recall at k).

    A candidate is right for the queries of its own group: a class for its images, an image for its captions, all
    captions of an image for that image.

    Args:
        queries: ``(Q, E)`` unit-norm.
        candidates: ``(M, E)`` unit-norm.
        query_group: ``(Q,)`` int64, the group of each query; each must occur in ``group``.
        group: ``(M,)`` int64, the group of each candidate.
        ks: the depths k.

    Returns:
        One rate in [0, 1] for each k; NaN without queries.

    Raises:
        StopRequested: this rank has been asked to stop (`vqclip.process.progress`).
    """
    hits = torch.zeros(len(ks), dtype=torch.float64)
    rows = max(1, BLOCK // max(1, len(candidates)))
    for part, right_group in zip(queries.split(rows), query_group.split(rows), strict=True):
        progress.heartbeat()
        scores = part @ candidates.T
        right = right_group[:, None] == group[None, :]
        best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
        above, level = scores > best + SAME, (scores - best).abs() <= SAME
        higher, rights, wrongs = above.sum(1), (level & right).sum(1), (level & ~right).sum(1)
        hits += torch.stack([hit_chance(higher, rights, wrongs, k).sum().cpu() for k in ks])
    return (hits / len(queries)).tolist() if len(queries) else [float("nan")] * len(ks)


def hit_chance(above: Tensor, right: Tensor, wrong: Tensor, k: int) -> Tensor:
    """Return the probability that one of the first k is right, if candidates of equal score are in random order.

    1 - C(wrong, j) / C(right + wrong, j), where j = k - above of the first k places are left for the tied candidates.

    Args:
        above: candidates of higher score, all wrong.
        right: right candidates at that score, at least 1.
        wrong: wrong candidates at that score.
        k: depth.

    Returns:
        float64, shaped like the arguments.
    """
    above, right, wrong = above.double(), right.double(), wrong.double()
    missed = torch.ones_like(above)
    for place in range(k):
        share = (wrong - place).clamp(min=0) / (right + wrong - place).clamp(min=1)
        missed = torch.where(place < k - above, missed * share, missed)
    return 1 - missed
