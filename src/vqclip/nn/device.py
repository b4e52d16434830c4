"""Size of the device that computes, by which work is cut into parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["gpu_memory", "planned_gpu"]

_planned: ContextVar[int | None] = ContextVar("planned", default=None)


@contextmanager
def planned_gpu(memory: int | None) -> Iterator[None]:
    """Cut work within the block as on a GPU, whatever device the tensors are on, to plan a run.

    Args:
        memory: of the GPU in bytes; None: as on the tensors' device.
    """
    token = _planned.set(memory)
    try:
        yield
    finally:
        _planned.reset(token)


def gpu_memory(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _planned.get()
