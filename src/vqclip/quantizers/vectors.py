"""Arithmetic of vectors and ids that several quantizers share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHORT = 1e-6
"""A vector of less than this length has no direction."""


def unit(x: Tensor) -> Tensor:
    """``(..., D)`` brought to length 1; below a length of 1e-6 it is 0 instead, without a gradient that explodes.

    A large vector is scaled down first, lest its square overflow: by a power of two, so that no bit changes.
    """
    x = x * torch.where(x.detach().abs().amax(dim=-1, keepdim=True) > 2.0**60, 2.0**-70, 1.0).to(x.dtype)
    length = x.norm(dim=-1, keepdim=True)
    return x / length.masked_fill(length < SHORT, torch.inf)


def straight_through(quantized: Tensor, x: Tensor) -> Tensor:
    """``quantized`` in value, bit for bit, with the gradient of ``x``; NaN where ``x`` is (Bengio et al. 2013).

    ``quantized + (x - x.detach())``: the usual ``x + (quantized - x).detach()`` rounds, so its value is not a code.
    """
    return (x - x.detach()).add_(quantized)


def ids_from_digits(digits: Tensor, bases: Sequence[int]) -> Tensor:
    """Number in a mixed radix, least significant digit first: ``(..., d)`` integer or bool digits → ``(...)`` int64.

    Horner's rule on integers: exact up to 2^63 codes, and faster than a sum over so short a dimension.
    """
    *lower, highest = digits.unbind(-1)
    ids = highest.to(torch.int64, copy=True)
    for digit, base in zip(reversed(lower), reversed(bases[:-1]), strict=True):
        ids.mul_(base).add_(digit)
    return ids
