"""Muon: steps along orthogonalised momentum.

    momentum = 0.95 · momentum + 0.05 · gradient
    step     = nearly orthogonal matrix with the singular vectors of (0.05 · gradient + 0.95 · momentum)
    weight   = (1 - lr · decay) · weight - lr · 0.2 · sqrt(max(rows, columns)) · step

The factor gives a step the size of one of AdamW, whose learning rate and weight decay thus serve both (Jordan et al.
2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, https://arxiv.org/abs/2502.16982).

`torch.optim.Muon` computes the same from torch 2.9 on, of whole matrices alone and always in bfloat16. This one takes
convolutions as (out, in · height · width), weights in shards, and the verdict on a step from the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from vqclip import dist

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(AdamW):
    """Muon for the parameter groups with ``muon: True``, AdamW for the others.

    Both skip a step where ``found_inf``, () on the device, is not 0.

    Attributes:
        weights: of the model, with matrices in shards; None: all are whole. The step is a collective of shards.
    """

    weights: dist.Replicas | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        rest: AdamW = object.__new__(AdamW)  # a checkpoint may be written meanwhile, and reads the groups of this one
        vars(rest).update(vars(self) | {"param_groups": [each for each in self.param_groups if not each.get("muon")]})
        rest.step(closure)
        for group in self.param_groups:
            if group.get("muon"):
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if parameter.grad is not None:
                        self._update(name, parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, name: str, parameter: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp(gradient, 1 - _MOMENTUM)
        step = gradient.lerp(momentum, _MOMENTUM)
        whole = step if self.weights is None else self.weights.gather(name, step)
        matrix = whole.flatten(1)
        orthogonal = orthogonalize(matrix).view(whole.shape)
        step = orthogonal if self.weights is None else self.weights.rows(name, orthogonal)
        moved = (1 - lr * decay) * parameter - lr * 0.2 * math.sqrt(max(matrix.shape)) * step
        skip = getattr(self, "found_inf", None)
        for tensor, new in ((state["momentum_buffer"], momentum), (parameter, moved)):
            tensor.copy_(new if skip is None else torch.where(skip.bool(), tensor, new))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Replace the singular values of a matrix by numbers of 0.7 to 1.2, by five Newton-Schulz iterations.

    On a GPU they run in bfloat16, unless the matrix is in float64.

    Args:
        matrix: (rows, columns); singular values below about a hundredth of its norm stay smaller.
    """
    a, b, c = _COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=_SMALLEST_NORM)
    if matrix.is_cuda and matrix.dtype != torch.float64:
        x = x.bfloat16()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)
