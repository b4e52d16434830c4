"""DistributedDataParallel without buffer synchronisation and with a fixed order of summation."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from vqclip.dist._history import exchange_timer
from vqclip.dist._state import is_distributed, named_errors
from vqclip.dist._torch_versions import NO_BUFFER_SYNC

def wrap_ddp(module: nn.Module, bucket_mb: float | None = None) -> nn.Module:
    """Average the gradients of `module` over ranks in every backward, always summed in the same order.

    Buffers are not broadcast: that would be a collective in `forward`, which would hang on a rank that runs alone.
    Ranks keep equal buffers because they update them from equal (reduced) statistics. Parameters start with rank 0's
    values.

    Args:
        module: All its parameters are on one device. Parameters that enter the loss directly, such as the temperature,
            must belong to it and be returned by its `forward`, or DDP does not see their gradient in time.
        bucket_mb: MiB of gradients that are averaged in one exchange, which starts as soon as they are ready; None for
            1 in the first exchange of a backward and 25 in the others.

    Returns:
        The wrapped module; `module` itself in one process or when it has no parameter to train. See `unwrap_ddp`.

    Raises:
        DistributedError: The ranks have different models, or another rank died.
    """
    if not is_distributed() or not any(p.requires_grad for p in module.parameters()):
        return module
    with named_errors("wrapping the model in DDP"):
        wrapped = DistributedDataParallel(
            module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, **NO_BUFFER_SYNC,  # type: ignore[arg-type]
        )
        _fix_bucket_layout(wrapped)
    wrapped.hook_of_waits = _time_waits(module)  # type: ignore[assignment]
    return wrapped


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Accumulate gradients of `module` in the block without averaging them over ranks.

    The first backward after the block averages the accumulated gradients. No effect on a module that is not wrapped.
    """
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """Return the module that was passed to `wrap_ddp`."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def release_ddp(module: nn.Module) -> nn.Module:
    """Undo `wrap_ddp`: stop averaging gradients, and return the module that was passed to it.

    Call it before the module is wrapped again because other parameters require a gradient; two wrappers would both
    average.
    """
    if isinstance(module, DistributedDataParallel):
        module.reducer._remove_autograd_hooks()
        module.hook_of_waits.remove()  # type: ignore[operator, union-attr]
    return unwrap_ddp(module)


def _fix_bucket_layout(wrapped: DistributedDataParallel) -> None:
    """Make DDP choose the final layout of its gradient buckets now.

    DDP rebuilds its buckets in the forward after the first backward, in the order in which gradients were ready. The
    position in a bucket decides in which order a ring of three or more ranks sums a gradient. Without this, the first
    step after a resume would round differently from the same step of an uninterrupted run. The first backward here is
    that of a substitute module. Its gradients are ready in the reverse order of the parameters, nearly that of a real
    backward.
    """
    module = wrapped.module
    wrapped.module = _SumOfParameters(module)
    with torch.enable_grad():
        for _ in range(2):  # the second forward rebuilds the buckets, with a collective
            wrapped().backward()
    wrapped.module = module
    wrapped.zero_grad(set_to_none=True)


def _time_waits(module: nn.Module) -> RemovableHandle:
    """Have `exchange_timer` count the end of each backward, in which DDP waits for the averages of gradients.

    DDP queues that wait as a callback of the backward, once all gradients are there. The hook of one parameter comes
    before, so its callback is in front, and what that queues comes behind.
    """
    parameter = next(each for each in module.parameters() if each.requires_grad)
    queue = Variable._execution_engine.queue_callback
    return parameter.register_hook(lambda grad: queue(lambda: queue(exchange_timer.begin([grad]))))


class _SumOfParameters(nn.Module):
    """The sum of all parameters of a module, used in order."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self) -> Tensor:
        return functools.reduce(torch.add, (parameter.sum() for parameter in self.module.parameters()))
