"""Which tokens take the place of dead codes, and which vectors are the same."""

from __future__ import annotations

import torch
from torch import Tensor

SAME = 1e-10
"""Squared distance, in units of the squared lengths, under which two vectors are rounded versions of one."""

LINES = 3
"""Along which vectors are compared: on one of them, a third one may come between two that are the same."""


def replacements(codes: Tensor, dead: Tensor, tokens: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """A different token for every dead code, as long as there are any.

    A token that equals a code or another token is left out: of two equal codes one gets all their tokens, and which one
    is for rounding to decide, which differs from one number of processes to another. Nothing waits for the device.

    Args:
        codes: ``(G, K, D)``.
        dead: ``(G, K)`` bool, where a new code is wanted.
        tokens: ``(G, M, D)`` candidates in random order.
        present: ``(M,)`` bool, False for a candidate that is none.

    Returns:
        ``(G, K, D)`` with tokens where the second, ``(G, K)`` bool, is True, and ``codes`` elsewhere.
    """
    usable = find_new(tokens, present, codes)
    order = (~usable).byte().argsort(dim=-1, stable=True)
    turn = dead.cumsum(dim=-1) - 1  # the n-th dead code takes the n-th usable token
    replaced = dead & (turn < usable.sum(dim=-1, keepdim=True))
    which = order.gather(1, turn.clamp(0, tokens.shape[1] - 1))
    new = tokens.gather(1, which[..., None].expand_as(codes))
    return torch.where(replaced[..., None], new, codes), replaced


def find_new(tokens: Tensor, present: Tensor, codes: Tensor) -> Tensor:
    """Which present tokens equal no code and no present token before them, up to rounding (`SAME`).

    Vectors that are the same are neighbours when all are sorted along a line, so only neighbours are compared; with
    several lines hardly any escape.

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
    # Distances along a line are told best from the middle.
    weight = real[:, None].to(both.dtype)
    centred = both - (both * weight).sum(dim=1, keepdim=True) / weight.sum().clamp(min=1)
    same = SAME * both.square().sum(dim=-1)
    repeated = torch.zeros(both.shape[:2], dtype=torch.bool, device=both.device)
    for line in range(LINES):
        repeated = repeated | _mark_repeated(centred, same, real, line)
    return present & ~repeated[:, size:]


def _mark_repeated(vectors: Tensor, same: Tensor, real: Tensor, line: int) -> Tensor:
    """``(G, N)`` bool: real vectors that are like one before them, as far as neighbours on this line tell."""
    direction = torch.arange(1, vectors.shape[-1] + 1, device=vectors.device, dtype=vectors.dtype)
    direction = (direction.square() + line).sin()  # any that no two vectors are likely to be level on
    position = (vectors @ direction).masked_fill(~real, torch.inf)
    order = position.argsort(dim=1, stable=True)
    ordered, near = vectors.gather(1, order[..., None].expand_as(vectors)), same.gather(1, order)
    apart = (ordered[:, 1:] - ordered[:, :-1]).square().sum(dim=-1)
    differs = torch.cat((real.new_ones(len(vectors), 1), apart > near[:, 1:] + near[:, :-1]), dim=1)
    run = differs.cumsum(dim=1) - 1  # vectors that are the same share a number
    first = order.new_full(order.shape, order.shape[1]).scatter_reduce(1, run, order, "amin")
    return torch.zeros_like(differs).scatter(1, order, first.gather(1, run) < order)
