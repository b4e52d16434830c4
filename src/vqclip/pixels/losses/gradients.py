"""Sums whose gradient at the pixels is computed together with their value.

A term's network is run forward and backward at once, and only the gradient at the pixels stays in memory. It is also
what the adaptive weight of an adversarial term needs, which so costs no second backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vqclip.nn.precision import first_derivative_only

__all__ = ["attach_gradient"]


def attach_gradient(pixels: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    """Return the () ``total`` as a function of ``pixels`` with this gradient; nothing else gets one."""
    return _Attached.apply(pixels, total.detach(), gradient)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pixels: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return incoming * gradient, None, None
