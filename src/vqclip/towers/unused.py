"""Weights that do not affect a tower's features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["freeze_unused"]


def freeze_unused(tower: nn.Module, features: Tensor) -> tuple[str, ...]:
    """Freeze weights that do not affect the features, such as a head's norm: DDP would wait for their gradient.

    Returns:
        Their names.
    """
    weights = {name: weight for name, weight in tower.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(features.sum(), list(weights.values()), allow_unused=True)
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        weight.requires_grad_(gradient is not None)
    return tuple(name for name, weight in weights.items() if not weight.requires_grad)
