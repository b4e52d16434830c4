"""Size of the device that computes, by which work is cut into parts."""

from __future__ import annotations

import torch

__all__ = ["gpu_memory"]


def gpu_memory(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return None
