"""Operators of float64, in full precision, in terms of those that onnxruntime supports in float64.

It lacks convolutions, group norms and erf, and attributes in ONNX, such as the epsilon of a norm or the scale of
attention, are float32. Each function is a decomposition for `ExportedProgram.run_decompositions`; torch itself never
runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["DECOMPOSITIONS"]

_NODES = 20
"""Nodes of the quadrature of erf; its error is then 2e-14."""


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: list[int] | int = 1,
    padding: list[int] | int = 0,
    dilation: list[int] | int = 1,
    groups: int = 1,
) -> Tensor:
    """Compute a convolution as one matrix product of the filters and all windows."""
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    filters, *window = weight.shape
    x = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = (_places(x.shape[2 + axis], window[1 + axis], stride[axis], dilation[axis]) for axis in (0, 1))
    windows = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]  # (B, C, kh, kw, oh, ow)
    places = windows.shape[-2:]
    product = weight.reshape(groups, filters // groups, -1) @ windows.reshape(
        x.shape[0], groups, math.prod(window), math.prod(places)
    )
    return _affine(
        product.reshape(x.shape[0], filters, *places), None, bias if bias is None else bias.reshape(-1, 1, 1)
    )


def _places(size: int, window: int, stride: int, dilation: int) -> Tensor:
    """Return ``(window, steps)``: the index under each element of the window at each step."""
    steps = (size - dilation * (window - 1) - 1) // stride + 1
    return dilation * torch.arange(window)[:, None] + stride * torch.arange(steps)


def _pair(value: list[int] | int) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    channels = (-1, *[1] * (x.ndim - 2))
    weight, bias = (each if each is None else each.reshape(channels) for each in (weight, bias))
    return _affine(_standardise(x.reshape(x.shape[0], groups, -1), eps).reshape(x.shape), weight, bias)


def _layer_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _affine(_standardise(x.flatten(-len(shape)), eps).reshape(x.shape), weight, bias)


def _standardise(x: Tensor, eps: float) -> Tensor:
    """Bring the last dimension to mean 0 and variance 1."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention in evaluation mode: without dropout, and every query has a key."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1) @ value


def _erf(x: Tensor) -> Tensor:
    """Compute ``2 x / √π ∫₀¹ exp(-x² t²) dt`` by Gauss-Legendre quadrature; beyond 6, erf is 1 in float64."""
    x = x.clamp(-6, 6)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    terms = (float(w) * torch.exp(-((x * float(t)) ** 2)) for t, w in zip((nodes + 1) / 2, weights / 2, strict=True))
    total = next(terms)
    for term in terms:
        total = total + term
    return x * total * (2 / math.sqrt(math.pi))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))


DECOMPOSITIONS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.conv2d.default: _conv2d,
    torch.ops.aten.group_norm.default: _group_norm,
    torch.ops.aten.layer_norm.default: _layer_norm,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten.gelu.default: _gelu,
    torch.ops.aten.erf.default: _erf,
}
"""Operator → decomposition, for graphs in float64."""
