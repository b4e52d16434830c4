"""Differences between the versions of torch that vqclip supports, 2.8 and later: no other module asks for one."""

from __future__ import annotations

import torch

__all__ = ["COLLECTIVE_NAMES", "HAS_NN_ALL_GATHER", "NO_BUFFER_SYNC", "TORCH_VERSION"]

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""Major and minor number, such as ``(2, 14)``."""

HAS_NN_ALL_GATHER = TORCH_VERSION < (2, 15)
"""Whether to use `torch.distributed.nn.functional.all_gather`; later versions withdraw it."""

COLLECTIVE_NAMES = (
    ("all_gather_single", "reduce_scatter_single")
    if TORCH_VERSION >= (2, 13)
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
"""Names in `torch.distributed`: the former ones warn where there are new ones."""

NO_BUFFER_SYNC = {"forward_sync_buffers" if TORCH_VERSION >= (2, 13) else "broadcast_buffers": False}
"""Argument of DistributedDataParallel, which 2.13 renamed."""
