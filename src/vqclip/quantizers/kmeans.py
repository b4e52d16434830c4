"""K-means, the same on every rank that gives it the same vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.quantizers.nearest import nearest
from vqclip.quantizers.replacement import find_new
from vqclip.quantizers.usage import histogram, sums_by_code
from vqclip.quantizers.vectors import unit


def kmeans(x: Tensor, size: int, iterations: int = 10, cosine: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Lloyd's algorithm from the first ``size`` different vectors; a centre without vectors stays where it is.

    Where there are fewer different ones, there are fewer centres: of two equal ones rounding would say which gets their
    vectors. Time grows with M K D, ``iterations`` times.

    Args:
        x: ``(G, M, D)`` vectors of G separate problems, M >= 1, in random order.
        size: K, the number of centres.
        iterations: how many times vectors are assigned and centres moved.
        cosine: keep centres at unit length.

    Returns:
        Centres ``(G, K, D)``, how many vectors each has ``(G, K)``, and whether it is one ``(G, K)``.
    """
    groups, count, dim = x.shape
    seeds = find_new(x, torch.ones(count, dtype=torch.bool, device=x.device), x[:, :0])
    first = (~seeds).byte().argsort(dim=1, stable=True)[:, torch.arange(size, device=x.device).clamp(max=count - 1)]
    centres = x.gather(1, first[..., None].expand(-1, -1, dim))
    placed = torch.arange(size, device=x.device) < seeds.sum(dim=1, keepdim=True)
    members = torch.zeros(groups, size, dtype=torch.int64, device=x.device)
    by_vector = x.transpose(0, 1)
    for _ in range(iterations):
        ids = nearest(by_vector, centres, placed)
        members = histogram(ids, size)
        moved = sums_by_code(by_vector, ids, size) / members.clamp(min=1)[..., None]
        centres = torch.where(members[..., None] > 0, unit(moved) if cosine else moved, centres)
    return centres, members, placed
