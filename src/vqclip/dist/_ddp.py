"""Weights that every rank has: DistributedDataParallel without buffer synchronisation, summing in a fixed order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from vqclip.dist._state import exchange_timer, is_distributed, is_main, named_errors
from vqclip.dist._torch_versions import NO_BUFFER_SYNC
from vqclip.io.parts import Part


class Replicas:
    """Weights of a model in one process, or the same ones on every rank. `Shards` has the same methods.

    Args:
        model: on its device, not wrapped.

    Attributes:
        parameters: name → tensor that this rank trains: a parameter, or its rows of one in shards.
        shapes: name → shape of the whole parameter, for those in shards.
    """

    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, Sequence[int]]

    def __init__(self, model: nn.Module):
        self.parameters, self.shapes = dict(model.named_parameters()), {}

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the tensors in `parameters` that stand for parameters of the model."""
        return list(parameters)

    def wrap(self, module: nn.Module, bucket_mb: float | None) -> nn.Module:
        """Return a module around ``module`` whose backward averages gradients; see `wrap_ddp`."""
        return wrap_ddp(module, bucket_mb)

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        """Name the errors of a forward that gathers weights."""
        return contextlib.nullcontext()

    def no_sync(self, module: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Accumulate gradients of a wrapped module in the block without averaging them over ranks.

        The first backward after the block averages the accumulated gradients.
        """
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def collect_gradients(self) -> None:
        """Move the gradients to `parameters`, after the last backward of a step. A collective of shards."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the () norm of the whole gradient of some of `parameters`, equal on every rank."""
        return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """Return a whole tensor from every rank's rows, such as a parameter, a moment or an average.

        A collective for those in shards.

        Args:
            name: of the parameter that has the shape of the tensor.
            rows: this rank's rows; another shape than that of the parameter is returned as it is.
        """
        return rows

    def part(self, name: str, rows: Tensor) -> Part:
        """Return this rank's part of a tensor in a file that all ranks write: its rows, or a whole tensor of rank 0.

        Args:
            name: of the parameter that has the shape of the tensor.
            rows: as of `gather`.
        """
        return Part(tuple(rows.shape), rows.dtype, rows if is_main() else None)

    def rows(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor; a view."""
        return whole


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
            module,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            **NO_BUFFER_SYNC,  # type: ignore[arg-type]
        )
        _fix_bucket_layout(wrapped)
    wrapped.hook_of_waits = _time_waits(module)  # type: ignore[assignment]
    return wrapped


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
