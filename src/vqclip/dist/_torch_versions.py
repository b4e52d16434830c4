"""Differences between the versions of torch that vqclip supports, 2.8 and later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

F = TypeVar("F", bound=Callable[..., object])

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""Major and minor number, such as ``(2, 14)``."""

HAS_NN_ALL_GATHER = TORCH_VERSION < (2, 15)
"""Whether to use `torch.distributed.nn.functional.all_gather`; later versions withdraw it."""

_IS_RENAMED = hasattr(c10d, "all_gather_single")
ALL_GATHER = "all_gather_single" if _IS_RENAMED else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _IS_RENAMED else "reduce_scatter_tensor"
"""Names in `torch.distributed`, from 2.13 on new ones; where there are new ones, the former ones warn."""

_HAS_NEW_ARGUMENT = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC = {"forward_sync_buffers" if _HAS_NEW_ARGUMENT else "broadcast_buffers": False}
"""Argument of DistributedDataParallel, which 2.13 renamed."""

TIMES_SHARDS = hasattr(FSDPModule, "set_custom_all_gather")
"""Whether the exchanges of weights in shards can be timed: from 2.9 on."""

GUARDS_PROCESS_GROUP = TORCH_VERSION >= (2, 12)
"""Whether compiled code is compiled again once there is a process group."""


def eager_in_old_versions(function: F) -> F:
    """Decorate a function that torch before 2.12 would compile to wrong gradients: there it is never compiled."""
    return function if TORCH_VERSION >= (2, 12) else torch.compiler.disable(function)


def is_torch_compiling() -> bool:
    """Return whether `torch.compile` traces the code, and `torch.export` does not.

    Before torch 2.12 `torch.compiler.is_exporting` is True for both. There, exports with ``strict=True`` count as
    compilation.
    """
    return torch.compiler.is_dynamo_compiling() and (TORCH_VERSION < (2, 12) or not torch.compiler.is_exporting())
