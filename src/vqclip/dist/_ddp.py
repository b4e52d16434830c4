"""DistributedDataParallel, with the options that vqclip's promises need."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vqclip.dist._state import Group, is_distributed, named_errors

# The same switch under its name from torch 2.15 on, where the old one warns.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


def wrap_ddp(module: nn.Module, group: Group = None) -> nn.Module:
    """Average the gradients of `module` over ranks in every backward, in the same order of summing from the first on.

    Buffers are never broadcast: that would be a collective in `forward`, which then hangs on a rank that runs alone.
    Ranks keep equal buffers because they update them from equal (reduced) statistics. Parameters start as those of
    rank 0.

    Args:
        module: All its parameters on one device. Parameters that enter the loss directly, such as the temperature, must
            belong to it and leave through its `forward`, or DDP does not see their gradient in time.
        group: The ranks that take part; all of them by default.

    Returns:
        The wrapped module; `module` itself in one process or when it has no parameter to train. See `unwrap_ddp`.

    Raises:
        DistributedError: The ranks hold different models, or a peer is lost.
    """
    if not is_distributed(group) or not any(p.requires_grad for p in module.parameters()):
        return module
    with named_errors("wrapping the model in DDP"):
        wrapped = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True, **_NO_BUFFER_SYNC)
        _fix_bucket_layout(wrapped)
    return wrapped


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Within it, a forward and its backward add to the gradients of `module` without averaging them over ranks.

    The first backward outside of it averages all that has been added up. Nothing in a module that is not wrapped.
    """
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """The module that `wrap_ddp` was given."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _fix_bucket_layout(wrapped: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets for good.

    In the forward after its first backward DDP lays them out anew, in the order in which the gradients came. A number's
    place in a bucket decides in which order a ring sums it over three ranks or more, so the first step after a resume
    would round otherwise than the same step of a run that went on. Here that first backward is one of a stand-in, in
    which the gradients come in the reverse order of the parameters, nearly that of a real backward.
    """
    module = wrapped.module
    wrapped.module = _SumOfParameters(module)
    with torch.enable_grad():
        for _ in range(2):  # the second forward makes the new layout, in a collective that no later one needs then
            wrapped().backward()
    wrapped.module = module
    wrapped.zero_grad(set_to_none=True)


class _SumOfParameters(nn.Module):
    """Uses every parameter of a module once, in their order."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.of = module

    def forward(self) -> Tensor:
        return functools.reduce(torch.add, (parameter.sum() for parameter in self.of.parameters()))
