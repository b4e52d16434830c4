"""DistributedDataParallel, with the options that vqclip's promises need."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vqclip.dist._state import Group, is_distributed, named_errors

# The same switch under its name from torch 2.15 on, where the old one warns.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


def wrap_ddp(module: nn.Module, group: Group = None, **options: Any) -> nn.Module:
    """Average the gradients of `module` over ranks in every backward.

    Buffers are never broadcast: that would be a collective in `forward`, which then hangs on a rank that runs alone.
    Ranks keep equal buffers because they update them from equal (reduced) statistics. Parameters start as those of
    rank 0.

    Args:
        module: All its parameters on one device. Parameters that enter the loss directly, such as the temperature, must
            belong to it and leave through its `forward`, or DDP does not see their gradient in time.
        group: The ranks that take part; all of them by default.
        options: Passed on to `DistributedDataParallel`, for example `static_graph=True`.

    Returns:
        The wrapped module; `module` itself in one process or when it has no parameter to train. See `unwrap_ddp`.

    Raises:
        DistributedError: The ranks hold different models, or a peer is lost.
    """
    if not is_distributed(group) or not any(p.requires_grad for p in module.parameters()):
        return module
    with named_errors("wrapping the model in DDP"):
        return DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=True, **_NO_BUFFER_SYNC, **options
        )


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """The module that `wrap_ddp` was given."""
    return module.module if isinstance(module, DistributedDataParallel) else module
