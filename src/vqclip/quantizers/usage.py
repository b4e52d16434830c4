"""Codebook usage from exact counts of ids (C codebooks with K codes each)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_COUNTED_CODES = 2**20
"""Codebooks with more codes are not counted, because of the size of the histogram."""


def histogram(ids: Tensor, size: int) -> Tensor:
    """Count every code.

    The shape of the result depends only on ``size``, so it compiles without a graph break, unlike `torch.bincount`.

    Args:
        ids: ``(T, C)`` int64 in ``[0, size)``, or negative for tokens to ignore.
        size: K, the codes in each codebook.

    Returns:
        ``(C, K)`` int64.
    """
    codebooks = ids.shape[1]
    bins = ids.clamp(min=0) + size * torch.arange(codebooks, device=ids.device)
    counts = torch.zeros(codebooks * size, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, bins.flatten(), (ids >= 0).long().flatten()).view(codebooks, size)


def sums_by_code(x: Tensor, ids: Tensor, size: int) -> Tensor:
    """Sum the vectors of each code, in their order also on a GPU (the order of `index_add` is not deterministic).

    Args:
        x: ``(T, C, D)`` vectors.
        ids: ``(T, C)`` int64 in ``[0, size)``, or negative for tokens to ignore.
        size: K, the codes in each codebook.

    Returns:
        ``(C, K, D)``.
    """
    codebooks, dim = x.shape[1:]
    # An additional code in each codebook collects the ignored tokens.
    bins = ids.where(ids >= 0, size) + (size + 1) * torch.arange(codebooks, device=ids.device)
    counts = histogram(bins.reshape(-1, 1), codebooks * (size + 1)).flatten()
    rows = bins.flatten().argsort(stable=True)
    sums = F.embedding_bag(rows, x.reshape(-1, dim), counts.cumsum(0) - counts, mode="sum")
    return sums.view(codebooks, size + 1, dim)[:, :size]


def usage(counts: Tensor) -> Tensor:
    """Return the share of codes with a count above 0: ``(C, K)`` counts → ``(C,)`` float64 in [0, 1]."""
    return (counts > 0).double().mean(dim=-1)


def usage_if_uniform(tokens: Tensor, size: int) -> Tensor:
    """Return the expected `usage` of K equally likely codes by ``tokens`` tokens: float64 in [0, 1]."""
    return -torch.expm1(tokens.double() * math.log1p(-1 / size))


def perplexity(counts: Tensor) -> Tensor:
    """Return the exponential of the entropy of the histogram: ``(C, K)`` counts → ``(C,)`` float64 in [1, K]."""
    counts = counts.double()
    share = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(dim=-1).exp()


def summary(name: str, each: Tensor, used: Tensor | None = None) -> Tensor:
    """Reduce a metric of several codebooks or stages to its sum, maximum or mean, depending on the name.

    Args:
        name: of the metric.
        each: ``(C,)``, at least 0.
        used: ``(C,)`` bool, True for those that count, at least one of them; None: all do.
    """
    each = each if used is None else each.where(used, 0)
    if name == "bits_used":
        return each.sum()
    if name == "oldest":
        return each.max()
    return each.mean() if used is None else each.sum() / used.sum()
