"""Gradients through the nearest code, as functions whose value is the code itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vqclip.dist import is_torch_compiling
from vqclip.nn.precision import first_derivative_only
from vqclip.quantizers.vectors import CHUNK, SHORT, sums_by_code, tokens_at_a_time, unit


def rotation(x: Tensor, q: Tensor) -> Tensor:
    """Return ``x`` with the gradient of the constant linear map that rotates and scales ``x`` to ``q``.

    The rotation trick (Fifty et al. 2024, https://arxiv.org/abs/2410.06424): gradients keep their angle to the code, so
    vectors with the same code get different gradients. The rotation is two reflections, without a D × D matrix.
    """
    return _Rotation.apply(x, q)


class _Rotation(torch.autograd.Function):
    """The function with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(x, q)
        return x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, q = ctx.saved_tensors
        u, v = unit(x), unit(q)
        w = unit(u + v)
        # The transpose of 1 - 2 w wᵀ + 2 v uᵀ.
        turned = grad - 2 * (grad * w).sum(-1, keepdim=True) * w + 2 * (grad * v).sum(-1, keepdim=True) * u
        length = x.norm(dim=-1, keepdim=True)
        turned = turned * q.norm(dim=-1, keepdim=True) / length.clamp(min=SHORT)
        return torch.where(length < SHORT, grad, turned), None  # a vector without direction cannot be rotated


def soft_assignment(values: Tensor, x: Tensor, codes: Tensor, ids: Tensor) -> Tensor:
    """Return ``values`` with the gradient of a soft assignment to all codes (IBQ: Shi et al. 2024, arXiv 2412.02692).

        soft = softmax(-|x - codes|² / 2)
        values = (one_hot(ids) + soft - stop_gradient(soft)) @ codes

    The paper's logits are the inner products <x, code>; between codes of equal length (``cosine``) these are the same.
    The soft assignment is computed in backward, for a limited number of tokens at a time (all of them if compiled).

    Args:
        values: ``(T, G, D)``, the codes of ``ids``.
        x: ``(T, G, D)``.
        codes: ``(G, K, D)``.
        ids: ``(T, G)``.
    """
    return _SoftAssignment.apply(values, x, codes, ids)


class _SoftAssignment(torch.autograd.Function):
    """The function with its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, codes: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(x, codes, ids)
        return values.view_as(values)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, codes, ids = ctx.saved_tensors
        grad, table = grad.to(x.dtype), codes.to(x.dtype)
        groups, size, _ = codes.shape
        tokens = tokens_at_a_time(x.device, groups * size, CHUNK)
        parts = [(x, grad)] if is_torch_compiling() else zip(x.split(tokens), grad.split(tokens), strict=True)
        half_norm = table.square().sum(dim=-1).div(2)[:, None]
        x_grads, table_grad = [], sums_by_code(grad, ids, size)
        # Not `full_precision`: autocast is off while this is traced, and on where the compiled graph computes it.
        with torch.autocast(x.device.type, enabled=False):
            for part in parts:
                some, upstream = (each.transpose(0, 1) for each in part)
                soft = torch.baddbmm(half_norm, some, table.mT, beta=-1).softmax(dim=-1)
                slope = upstream @ table.mT
                slope = soft * (slope - (soft * slope).sum(dim=-1, keepdim=True))
                x_grads.append((slope @ table).transpose(0, 1))
                table_grad = table_grad + slope.mT @ some - slope.sum(dim=1)[..., None] * table
        return None, torch.cat(x_grads), table_grad.to(codes.dtype), None


def drawn_direction(values: Tensor, x: Tensor, noise: Tensor | None) -> Tensor:
    """Return ``values`` with the gradient of an error of the same length in a random direction.

    DiVeQ (Vali et al. 2025, arXiv 2509.26469):

        direction = stop_gradient(unit(values - x + noise))
        values = x + |values - x| direction

    The paper's value is off the code by the noise; here it is the code. NaN where ``x`` is NaN.

    Args:
        values: ``(T, G, D)``, with the gradient of the codes.
        x: ``(T, G, D)``.
        noise: ``(T, G, D)``, or None for none (the authors' detached variant).
    """
    return _DrawnDirection.apply(values, x, noise)


class _DrawnDirection(torch.autograd.Function):
    """The function with its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, noise: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, x, noise)
        return values + (x - x)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, x, noise = ctx.saved_tensors
        error = values - x
        drawn = unit(error if noise is None else error + noise)
        along = (grad * drawn).sum(dim=-1, keepdim=True) * unit(error)
        return along, grad - along, None
