"""Which tokens take the place of dead codes."""

from __future__ import annotations

import torch
from torch import Tensor

SAME = 1e-10
"""Squared distance, in units of the squared lengths, under which two vectors are rounded versions of one."""


def replacements(
    codes: Tensor, dead: Tensor, tokens: Tensor, present: Tensor, shuffle: Tensor
) -> tuple[Tensor, Tensor]:
    """A different token for every dead code, as long as there are any.

    A token that equals a code or another token is left out: of two equal codes one gets all their tokens, and which one
    is for rounding to decide, which differs from one number of processes to another. Nothing waits for the device.

    Args:
        codes: ``(G, K, D)``.
        dead: ``(G, K)`` bool, where a new code is wanted.
        tokens: ``(G, M, D)`` candidates.
        present: ``(M,)`` bool, False for a candidate that is none.
        shuffle: ``(M,)`` random integers: candidates are taken in their order.

    Returns:
        ``(G, K, D)`` with tokens where the second, ``(G, K)`` bool, is True, and ``codes`` elsewhere.
    """
    usable = present & ~_repeated(codes, tokens, present)
    # Usable ones first, in random order; the n-th dead code takes the n-th of them.
    order = torch.where(usable, shuffle, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    turn = dead.cumsum(dim=-1) - 1
    replaced = dead & (turn < usable.sum(dim=-1, keepdim=True))
    which = order.gather(1, turn.clamp(0, tokens.shape[1] - 1))
    new = tokens.gather(1, which[..., None].expand_as(codes))
    return torch.where(replaced[..., None], new, codes), replaced


def _repeated(codes: Tensor, tokens: Tensor, present: Tensor) -> Tensor:
    """``(G, M)`` bool: tokens that equal a code, or a present token before them.

    Equal vectors are neighbours once all are sorted along a line, any line; only neighbours are compared.
    """
    groups, size, dim = codes.shape
    both = torch.cat((codes, tokens), dim=1).double()
    line = torch.arange(1, dim + 1, device=both.device, dtype=both.dtype).square().sin()
    position = torch.where(torch.cat((present.new_ones(size), present)), both @ line, torch.inf)
    order = position.argsort(dim=1, stable=True)
    ordered = both.gather(1, order[..., None].expand_as(both))
    apart = (ordered[:, 1:] - ordered[:, :-1]).square().sum(-1)
    lengths = ordered.square().sum(-1)
    differs = torch.cat((present.new_ones(groups, 1), apart > SAME * (lengths[:, 1:] + lengths[:, :-1])), dim=1)
    run = differs.cumsum(dim=1) - 1  # equal vectors share a number
    has_code = torch.zeros_like(run).scatter_add(1, run, (order < size).long()) > 0
    repeated = ~differs | has_code.gather(1, run)
    return torch.zeros_like(repeated).scatter(1, order, repeated)[:, size:]
