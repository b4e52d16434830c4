"""K-means that gives equal results on all ranks for equal vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.quantizers.nearest import nearest
from vqclip.quantizers.replacement import find_new
from vqclip.quantizers.usage import histogram, sums_by_code
from vqclip.quantizers.vectors import unit


def kmeans(x: Tensor, size: int, iterations: int = 10, cosine: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Run Lloyd's algorithm from the first ``size`` different vectors; a centre without vectors does not move.

    With fewer different vectors there are fewer centres: rounding would decide which of two equal centres gets their
    vectors. Time is proportional to M K D and ``iterations``.

    Args:
        x: ``(G, M, D)`` vectors of G separate problems, M >= 1, in random order.
        size: K, the number of centres.
        iterations: number of assignment and update steps.
        cosine: keep centres at unit length.

    Returns:
        Centres ``(G, K, D)``, the number of vectors of each ``(G, K)``, and True for each valid centre ``(G, K)``.
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
