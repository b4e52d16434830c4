"""New codes from tokens: k-means in the first step, replacement of dead codes, and detection of equal vectors.

    dead, tokens = codes that are used too rarely, tokens drawn from the global batch (`Draw`)
    usable = tokens that equal no code and no token before them
    the n-th dead code becomes the n-th usable token

Equal vectors are found by sorting, without comparing all pairs:

    for each of 3 directions:
        sort vectors by their projection; a neighbour within rounding distance is equal
        of each run of equal vectors, all but the first are repeated

All of it gives equal results on all ranks for equal vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.quantizers.nearest import nearest
from vqclip.quantizers.vectors import histogram, sums_by_code, unit

SAME = 1e-10
"""Squared distance, relative to the squared lengths, below which two vectors are equal up to rounding."""

LINES = 3
"""Number of directions: in a single one, another vector may come between two equal ones."""


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


def replacements(codes: Tensor, dead: Tensor, tokens: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each dead code by a different token, while tokens are available.

    A token that equals a code or another token is not used: rounding, which depends on the number of processes, would
    decide which of two equal codes gets their tokens. Does not synchronise with the device.

    Args:
        codes: ``(G, K, D)``.
        dead: ``(G, K)`` bool, True for codes to replace.
        tokens: ``(G, M, D)`` candidates in random order.
        present: ``(M,)`` bool, False for entries without a token.

    Returns:
        The new codes ``(G, K, D)``, and ``(G, K)`` bool, True for replaced codes.
    """
    usable = find_new(tokens, present, codes)
    order = (~usable).byte().argsort(dim=-1, stable=True)
    turn = dead.cumsum(dim=-1) - 1  # the n-th dead code takes the n-th usable token
    replaced = dead & (turn < usable.sum(dim=-1, keepdim=True))
    which = order.gather(1, turn.clamp(0, tokens.shape[1] - 1))
    new = tokens.gather(1, which[..., None].expand_as(codes))
    return torch.where(replaced[..., None], new, codes), replaced


def find_new(tokens: Tensor, present: Tensor, codes: Tensor) -> Tensor:
    """Find the present tokens that equal no code and no present token before them, up to rounding (`SAME`).

    Args:
        tokens: ``(G, M, D)``.
        present: ``(M,)`` bool.
        codes: ``(G, K, D)``, K may be 0.

    Returns:
        ``(G, M)`` bool.
    """
    size = codes.shape[1]
    both = torch.cat((codes, tokens), dim=1)
    real = torch.cat((present.new_ones(size), present))
    # Centred, for precise projections.
    weight = real[:, None].to(both.dtype)
    centred = both - (both * weight).sum(dim=1, keepdim=True) / weight.sum().clamp(min=1)
    same = SAME * both.square().sum(dim=-1)
    repeated = torch.zeros(both.shape[:2], dtype=torch.bool, device=both.device)
    for line in range(LINES):
        repeated = repeated | _mark_repeated(centred, same, real, line)
    return present & ~repeated[:, size:]


def _mark_repeated(vectors: Tensor, same: Tensor, real: Tensor, line: int) -> Tensor:
    """Return ``(G, N)`` bool, True for real vectors that equal an earlier one and are its neighbour on this line."""
    direction = torch.arange(1, vectors.shape[-1] + 1, device=vectors.device, dtype=vectors.dtype)
    direction = (direction.square() + line).sin()  # any direction on which different vectors rarely coincide
    position = (vectors @ direction).masked_fill(~real, torch.inf)
    order = position.argsort(dim=1, stable=True)
    ordered, near = vectors.gather(1, order[..., None].expand_as(vectors)), same.gather(1, order)
    apart = (ordered[:, 1:] - ordered[:, :-1]).square().sum(dim=-1)
    differs = torch.cat((real.new_ones(len(vectors), 1), apart > near[:, 1:] + near[:, :-1]), dim=1)
    run = differs.cumsum(dim=1) - 1  # equal vectors have the same number
    first = order.new_full(order.shape, order.shape[1]).scatter_reduce(1, run, order, "amin")
    return torch.zeros_like(differs).scatter(1, order, first.gather(1, run) < order)
