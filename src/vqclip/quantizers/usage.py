"""How much of a codebook is in use, from exact counts of ids (C codebooks, K codes each)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_COUNTED_CODES = 2**20
"""Codebooks with more codes than this are not counted: a histogram of them would cost more than it tells."""


def histogram(ids: Tensor, size: int) -> Tensor:
    """Count every code.

    The shape of the result depends on ``size`` alone, so it compiles without a graph break (`torch.bincount` does not).

    Args:
        ids: ``(T, C)`` int64 in ``[0, size)``, or negative for tokens that do not count.
        size: K, the codes in each codebook.

    Returns:
        ``(C, K)`` int64.
    """
    codebooks = ids.shape[1]
    bins = ids.clamp(min=0) + size * torch.arange(codebooks, device=ids.device)
    counts = torch.zeros(codebooks * size, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, bins.flatten(), (ids >= 0).long().flatten()).view(codebooks, size)


def sums_by_code(x: Tensor, ids: Tensor, size: int) -> Tensor:
    """Sum of the vectors of each code, always added in their order, on a GPU as well (`index_add` takes any).

    Args:
        x: ``(T, C, D)`` vectors.
        ids: ``(T, C)`` int64 in ``[0, size)``, or negative for tokens that do not count.
        size: K, the codes in each codebook.

    Returns:
        ``(C, K, D)``.
    """
    codebooks, dim = x.shape[1:]
    # One more code in each codebook takes up what does not count.
    bins = ids.where(ids >= 0, size) + (size + 1) * torch.arange(codebooks, device=ids.device)
    counts = histogram(bins.reshape(-1, 1), codebooks * (size + 1)).flatten()
    rows = bins.flatten().argsort(stable=True)
    sums = F.embedding_bag(rows, x.reshape(-1, dim), counts.cumsum(0) - counts, mode="sum")
    return sums.view(codebooks, size + 1, dim)[:, :size]


def usage(counts: Tensor) -> Tensor:
    """Share of the codes seen at least once: ``(C, K)`` counts → ``(C,)`` float64 in [0, 1]."""
    return (counts > 0).double().mean(dim=-1)


def usage_if_uniform(tokens: Tensor, size: int) -> Tensor:
    """Expected `usage` of K codes by this many tokens if all codes were equally likely: float64 in [0, 1]."""
    return -torch.expm1(tokens.double() * math.log1p(-1 / size))


def perplexity(counts: Tensor) -> Tensor:
    """Exponential of the entropy of the code histogram: ``(C, K)`` counts → ``(C,)`` float64 in [1, K]."""
    counts = counts.double()
    share = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(dim=-1).exp()


def summary(name: str, each: Tensor) -> Tensor:
    """One number for several codebooks' or stages' ``(C,)``: their sum, largest or mean, as the metric's name says."""
    if name == "bits_used":
        return each.sum()
    return each.max() if name == "oldest" else each.mean()
