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
from typing import NamedTuple

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


class Ranks(NamedTuple):
    """Place of the best right candidate of each of Q queries; all ``(Q,)``, on the CPU."""

    best: Tensor
    """Its score."""
    above: Tensor
    """int64, candidates of higher score, all wrong."""
    rights: Tensor
    """int64, right candidates at this score."""
    wrongs: Tensor
    """int64, wrong candidates at this score."""
    best_wrong: Tensor
    """Highest score of a wrong candidate, -inf without one."""
    first: Tensor
    """int64, the first of the candidates with the highest score."""

    def hits(self, ks: Sequence[int]) -> Tensor:
        """Return for each k and query whether a right candidate is among the k nearest; with ties, the probability.

        Returns:
            ``(len(ks), Q)`` float64 on the CPU, in [0, 1].
        """
        return torch.stack([hit_chance(self.above, self.rights, self.wrongs, k) for k in ks])

    @property
    def place(self) -> Tensor:
        """int64, expected place of the first right candidate if ties are in random order, rounded down; from 1."""
        return 1 + self.above + self.wrongs // (self.rights + 1)


def rank(queries: Tensor, candidates: Tensor, query_group: Tensor, group: Tensor) -> Ranks:
    """Rank all candidates for each query.

    A candidate is right for the queries of its own group: a class for its images, an image for its captions, all
    captions of an image for that image.

    Args:
        queries: ``(Q, E)`` unit-norm.
        candidates: ``(M, E)`` unit-norm.
        query_group: ``(Q,)`` int64, the group of each query; each must occur in ``group``.
        group: ``(M,)`` int64, the group of each candidate.

    Raises:
        StopRequested: this rank has been asked to stop (`vqclip.process.progress`).
    """
    found = []
    rows = max(1, BLOCK // max(1, len(candidates)))
    for part, right_group in zip(queries.split(rows), query_group.split(rows), strict=True):
        progress.heartbeat()
        found.append(rank_scores(part @ candidates.T, right_group[:, None] == group[None, :], SAME))
    return Ranks(*map(torch.cat, zip(*found, strict=True)))


def rank_scores(scores: Tensor, right: Tensor, same: float) -> Ranks:
    """Rank the candidates of each row by their scores; see `rank`.

    Args:
        scores: ``(Q, M)``.
        right: ``(Q, M)`` bool, at least one True in each row.
        same: largest difference of two scores that is a tie.
    """
    best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
    above, level = scores > best + same, (scores - best).abs() <= same
    wrong = scores.masked_fill(right, -torch.inf).amax(dim=1)
    highest = torch.maximum(best[:, 0], wrong)[:, None]
    first = (scores >= highest - same).to(torch.uint8).argmax(dim=1)  # the first of several
    counts = above.sum(1), (level & right).sum(1), (level & ~right).sum(1)
    return Ranks(*(each.cpu() for each in (best[:, 0], *counts, wrong, first)))


class Classified(NamedTuple):
    """Classes that a classifier finds for n images; on the CPU."""

    hits: Tensor
    """``(len(DEPTHS), n)`` float64 in [0, 1], see `Ranks.hits`."""
    predicted: Tensor
    """``(n,)`` int64, the first of the classes with the highest score."""

    @classmethod
    def of(cls, ranks: Ranks) -> Classified:
        """Return them from ranks of the classes."""
        return cls(ranks.hits(DEPTHS), ranks.first)

    @classmethod
    def of_scores(cls, scores: Tensor, labels: Tensor, same: float) -> Classified:
        """Return them from scores ``(n, K)`` and labels ``(n,)`` int64; ``same`` as in `rank_scores`."""
        each = torch.arange(scores.shape[1], device=scores.device)
        return cls.of(rank_scores(scores, labels[:, None] == each, same))

    @classmethod
    def join(cls, parts: Sequence[Classified]) -> Classified:
        """Join the images of all parts; none without parts."""
        empty = torch.empty(len(DEPTHS), 0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
        return cls(
            torch.cat([empty[0], *(part.hits for part in parts)], dim=1),
            torch.cat([empty[1], *(part.predicted for part in parts)]),
        )


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
    missed, tied = (above >= k).double(), wrong > 0
    above, right, wrong = above[tied], right[tied], wrong[tied]
    none = torch.ones_like(above)
    for place in range(k):
        share = (wrong - place).clamp(min=0) / (right + wrong - place).clamp(min=1)
        none = torch.where(place < k - above, none * share, none)
    missed[tied] = none
    return 1 - missed
