"""K-means, the same on every rank that gives it the same vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.quantizers.base import unit
from vqclip.quantizers.nearest import nearest

MEMBERSHIPS = 2**22
"""Vectors × centres that are held at a time: 16 MiB in float32."""


def kmeans(x: Tensor, size: int, iterations: int = 10, cosine: bool = False) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from the first ``size`` different vectors; a centre without vectors stays where it is.

    Sums are matrix products, not scattered additions: on a GPU those come in any order, and ranks would differ.

    Args:
        x: ``(G, M, D)`` vectors of G separate problems, M >= 1, drawn at random; where M < ``size`` they are repeated.
        size: K, the number of centres.
        iterations: how many times vectors are assigned and centres moved.
        cosine: keep centres at unit length.

    Returns:
        Centres ``(G, K, D)`` and how many vectors each has ``(G, K)``.
    """
    centres = torch.stack([_seeds(each, size) for each in x])
    members = x.new_zeros(centres.shape[:2])
    for _ in range(iterations):
        ids = nearest(x.transpose(0, 1), centres).T
        sums, members = _sums(x, ids, size)
        moved = sums / members.clamp(min=1)[..., None]
        centres = torch.where(members[..., None] > 0, unit(moved) if cosine else moved, centres)
    return centres, members


def _seeds(x: Tensor, size: int) -> Tensor:
    """The first ``size`` different rows of ``(M, D)``, repeated where there are fewer: ``(size, D)``.

    Of two equal centres one would get all their vectors, and rounding alone would say which.
    """
    _, which = torch.unique(x, dim=0, return_inverse=True)
    first = torch.full((int(which.max()) + 1,), len(x), device=x.device)
    first = first.scatter_reduce(0, which, torch.arange(len(x), device=x.device), "amin").sort().values
    return x[first[torch.arange(size, device=x.device) % len(first)]]


def _sums(x: Tensor, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``(G, M, D)``, ``(G, M)`` → sums ``(G, K, D)`` and counts ``(G, K)``."""
    sums = x.new_zeros(x.shape[0], size, x.shape[2])
    counts = x.new_zeros(x.shape[0], size)
    rows = max(64, MEMBERSHIPS // (len(x) * size))
    for some, theirs in zip(x.split(rows, dim=1), ids.split(rows, dim=1), strict=True):
        chosen = x.new_zeros(*theirs.shape, size).scatter_(2, theirs[..., None], 1)
        sums += chosen.mT @ some
        counts += chosen.sum(dim=1)
    return sums, counts
