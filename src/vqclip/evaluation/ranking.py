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
DEPTHS = (1, 5)
"""Depths of the accuracies of classification."""
CLASS_FIGURES = (*(f"top{k}" for k in DEPTHS), "mean_per_class")
"""Accuracies, and the mean of the classes' own accuracies (mean per class recall)."""


def hit_rates(
    queries: Tensor, candidates: Tensor, query_group: Tensor, group: Tensor, ks: Sequence[int]
) -> list[float]:
    """Return the share of queries with a right candidate among their k nearest (top-k accuracy, recall at k).

    Args: as for `hits`.

    Returns:
        One rate in [0, 1] for each k; NaN without queries.
    """
    return hits(queries, candidates, query_group, group, ks).mean(dim=1).tolist()


def hits(queries: Tensor, candidates: Tensor, query_group: Tensor, group: Tensor, ks: Sequence[int]) -> Tensor:
    """Return for each k and query whether a right candidate is among the k nearest; with ties, the probability.

    A candidate is right for the queries of its own group: a class for its images, an image for its captions, all
    captions of an image for that image.

    Args:
        queries: ``(Q, E)`` unit-norm.
        candidates: ``(M, E)`` unit-norm.
        query_group: ``(Q,)`` int64, the group of each query; each must occur in ``group``.
        group: ``(M,)`` int64, the group of each candidate.
        ks: the depths k.

    Returns:
        ``(len(ks), Q)`` float64 on the CPU, in [0, 1].

    Raises:
        StopRequested: this rank has been asked to stop (`vqclip.process.progress`).
    """
    found = [torch.empty(len(ks), 0, dtype=torch.float64)]
    rows = max(1, BLOCK // max(1, len(candidates)))
    for part, right_group in zip(queries.split(rows), query_group.split(rows), strict=True):
        progress.heartbeat()
        found.append(hits_of_scores(part @ candidates.T, right_group[:, None] == group[None, :], ks, SAME))
    return torch.cat(found, dim=1)


def hits_of_scores(scores: Tensor, right: Tensor, ks: Sequence[int], same: float) -> Tensor:
    """Return for each k and row whether a right candidate is among the k highest scores; see `hits`.

    Args:
        scores: ``(Q, M)``.
        right: ``(Q, M)`` bool, at least one True in each row.
        ks: the depths k.
        same: largest difference of two scores that is a tie.
    """
    best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
    above, level = scores > best + same, (scores - best).abs() <= same
    higher, rights, wrongs = above.sum(1), (level & right).sum(1), (level & ~right).sum(1)
    return torch.stack([hit_chance(higher, rights, wrongs, k).cpu() for k in ks])


def class_figures(hits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the `CLASS_FIGURES` of hits ``(len(DEPTHS), Q)`` for images of the classes ``labels`` ``(Q,)`` int64.

    The mean per class is over the classes that occur in ``labels``.
    """
    _, which, counts = labels.unique(return_inverse=True, return_counts=True)
    by_class = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, which, hits[0]) / counts
    return dict(zip(CLASS_FIGURES, [*hits.mean(dim=1).tolist(), float(by_class.mean())], strict=True))


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
