"""Updates that a tensor on the device can skip: afterwards every bit is as before, and the host does not wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["can_skip", "restored_if", "step_optimizer"]


def can_skip(optimizer: Optimizer) -> bool:
    """Return whether the kernel of the optimizer takes a tensor that says whether to skip a step."""
    return all(group["fused"] for group in optimizer.param_groups)


def step_optimizer(optimizer: Optimizer, skip: Tensor) -> None:
    """Run a step of the optimizer that changes neither weights nor moments nor counters where ``skip`` is True.

    Args:
        optimizer: AdamW. With another kernel than the fused one, the host waits for ``skip``.
        skip: () bool on the device.
    """
    if not can_skip(optimizer):
        if not skip:
            optimizer.step()
        return
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


@contextmanager
def restored_if(skip: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Undo what the block changes in tensors, in place, where ``skip``, () bool on the device, is True."""
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(skip, old, tensor))
