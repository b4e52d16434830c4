"""Arithmetic on vectors and ids for several quantizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vqclip.nn.device import gpu_memory

SHORT = 1e-6
"""Shorter vectors have no direction."""


def tokens_at_a_time(device: torch.device, numbers: int, most: int) -> int:
    """Return the number of tokens to compute at a time, at least 64.

    Args:
        device: where.
        numbers: float32 numbers of a token.
        most: numbers at a time on a CPU; a GPU takes a 64th of its memory.
    """
    if (memory := gpu_memory(device)) is not None:
        most = memory // 256
    return max(64, most // numbers)


def unit(x: Tensor) -> Tensor:
    """Scale ``(..., D)`` to length 1; vectors shorter than 1e-6 become 0, so that the gradient does not explode.

    A large vector is divided by a power of two first, which is exact, so that its square does not overflow.
    """
    x = x * torch.where(x.detach().abs().amax(dim=-1, keepdim=True) > 2.0**60, 2.0**-70, 1.0).to(x.dtype)
    length = x.norm(dim=-1, keepdim=True)
    return x / length.masked_fill(length < SHORT, torch.inf)


def straight_through(quantized: Tensor, x: Tensor) -> Tensor:
    """Return ``quantized``, bit for bit, with the gradient of ``x``; NaN where ``x`` is NaN (Bengio et al. 2013).

    Computed as ``quantized + (x - x.detach())``: the usual ``x + (quantized - x).detach()`` rounds.
    """
    return (x - x.detach()).add_(quantized)


def ids_from_digits(digits: Tensor, bases: Sequence[int]) -> Tensor:
    """Convert mixed-radix digits, least significant first, to ids: ``(..., d)`` integer or bool → ``(...)`` int64.

    Horner's rule on integers: exact up to 2^63 codes, and faster than a sum over so short a dimension.
    """
    *lower, highest = digits.unbind(-1)
    ids = highest.to(torch.int64, copy=True)
    for digit, base in zip(reversed(lower), reversed(bases[:-1]), strict=True):
        ids.mul_(base).add_(digit)
    return ids
