"""Weights of a model over the ranks: the same ones on every rank (DDP), or a part of the rows on each (FSDP2).

    weights = Replicas(model)  |  Shards(model, units, hybrid=False)
    network = wrap_ddp(module)        # its backward averages the gradients over ranks; of shards, the module itself
    out = network(x)                  # of shards, FSDP gathers the weights of one unit at a time
    loss.backward()                   # ... and reduces their gradients to the ranks that store them
    weights.collect_gradients()       # plain tensors for everything that follows: clipping, optimizer, averages

Outside of forward and backward the training sees `parameters`: plain tensors; of shards, this rank's rows in the memory
that FSDP gathers from. A shard is ``ceil(rows / ranks)`` rows, as `torch.chunk` cuts them; the last ones may be empty.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from vqclip.dist._collectives import broadcast_
from vqclip.dist._control import gather_json
from vqclip.dist._state import exchange_timer, is_distributed, is_main, named_errors, run_collective, world_size
from vqclip.dist._torch_versions import ALL_GATHER, NO_BUFFER_SYNC, REDUCE_SCATTER, TIMES_SHARDS
from vqclip.errors import ConfigError
from vqclip.io.parts import Part

Roots = Sequence[tuple[nn.Module, Sequence[nn.Module]]]
"""Modules that are called as a whole, each with the modules in it whose weights are gathered one at a time."""


class Replicas:
    """Weights of a model in one process, or the same ones on every rank.

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

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
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


def release_ddp(module: nn.Module) -> None:
    """Undo `wrap_ddp`: stop averaging gradients.

    Call it before the module is wrapped again because other parameters require a gradient; two wrappers would both
    average.
    """
    if isinstance(module, DistributedDataParallel):
        module.reducer._remove_autograd_hooks()
        module.hook_of_waits.remove()  # type: ignore[operator, union-attr]


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


class Shards(Replicas):
    """Parameters of a model in shards over ranks. A collective.

    Gradients are averaged over all ranks, as in DDP. The parameters that `sharded_parameters` leaves out stay whole.

    Args:
        model: on its device; it starts with rank 0's values, and is changed in place.
        roots: parts of the model to shard. Every rank calls them equally often, and only through ``__call__``.
        hybrid: keep a copy of the shards on every machine instead of one copy over all ranks.

    Raises:
        ConfigError: ``hybrid`` on one machine, or on machines with different numbers of processes.
    """

    def __init__(self, model: nn.Module, roots: Roots, hybrid: bool = False):
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                broadcast_(tensor)
        self._roots, mesh = [root for root, _ in roots], _mesh(next(model.parameters()).device.type, hybrid)
        row = mesh["shard"]
        self._group, self._rank, self._size = row.get_group(), row.get_local_rank(), row.size()
        self._is_first_copy = not hybrid or mesh["replica"].get_local_rank() == 0
        whole = set(model.parameters()) - sharded_parameters(roots)
        for root, units in roots:
            root.register_forward_hook(_copy_view)
            for unit in (*units, root):  # resharded after each forward: no forward may find weights of a former step
                fully_shard(unit, mesh=mesh, ignored_params=whole, reshard_after_forward=True)
                if TIMES_SHARDS:
                    unit.set_custom_all_gather(_TimedExchange(ALL_GATHER))  # type: ignore[operator]
                    unit.set_custom_reduce_scatter(_TimedExchange(REDUCE_SCATTER))  # type: ignore[operator]
        self._sharded: dict[str, DTensor] = {
            name: each
            for name, each in model.named_parameters(remove_duplicate=False)
            if isinstance(each, DTensor)  # a name for each use of a shared one
        }
        self._local = {
            id(each): nn.Parameter(each.to_local().detach(), each.requires_grad) for each in self._sharded.values()
        }
        self.parameters = {name: self._local.get(id(each), each) for name, each in model.named_parameters()}
        self.shapes = {name: tuple(each.shape) for name, each in self._sharded.items()}

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._local.get(id(each), each) for each in parameters]

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Accumulate gradients in the block without reducing them; they are whole until the next backward."""
        try:
            for root in self._roots:
                root.set_requires_gradient_sync(False)  # type: ignore[operator]
            yield
        finally:
            for root in self._roots:
                root.set_requires_gradient_sync(True)  # type: ignore[operator]

    def collect_gradients(self) -> None:
        for each in self._sharded.values():
            if each.grad is not None:
                assert isinstance(each.grad, DTensor)
                self._local[id(each)].grad = each.grad.to_local()
                each.grad = None
        whole = [each for name, each in self.parameters.items() if name not in self.shapes and each.requires_grad]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in whole]
        joined = torch.cat([each.reshape(-1) for each in gradients])  # averaged in one exchange
        run_collective("all_reduce (gradients)", c10d.all_reduce, joined)
        joined /= world_size()
        means = joined.split([each.numel() for each in whole])
        for parameter, gradient, mean in zip(whole, gradients, means, strict=True):
            parameter.grad = gradient.copy_(mean.view_as(gradient))

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        mine = {id(each) for each in self._local.values()}
        held = [each for each in parameters if each.grad is not None]
        parts = [[each.grad for each in held if (id(each) in mine) == sharded] for sharded in (True, False)]
        squares = [nn.utils.get_total_norm([g for g in part if g is not None]).double().square() for part in parts]
        total = squares[0].to(held[0].device).reshape(1)
        run_collective("all_reduce (gradient norm)", c10d.all_reduce, total, group=self._group)
        return (total[0] + squares[1].to(total.device)).sqrt().to(held[0].dtype)

    def gather(self, name: str, rows: Tensor) -> Tensor:
        if not self._are_rows(name, rows):
            return rows
        shape = self.shapes[name]
        padded = rows.detach().new_zeros(self._most_rows(name), *shape[1:])
        padded[: len(rows)] = rows.detach()
        found = padded.new_empty(len(padded) * self._size, *shape[1:])
        run_collective("all_gather (shards)", getattr(c10d, ALL_GATHER), found, padded, group=self._group)
        return found[: shape[0]]

    def part(self, name: str, rows: Tensor) -> Part:
        if not self._are_rows(name, rows):
            return super().part(name, rows)
        first = self._most_rows(name) * self._rank
        return Part(tuple(self.shapes[name]), rows.dtype, rows if self._is_first_copy else None, first)

    def rows(self, name: str, whole: Tensor) -> Tensor:
        if whole.shape != self.shapes.get(name):
            return whole
        most = self._most_rows(name)
        return whole[most * self._rank : most * (self._rank + 1)]

    def _are_rows(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor has the shape of this rank's rows of a parameter in shards."""
        return name in self.shapes and tensor.shape == self._local[id(self._sharded[name])].shape

    def _most_rows(self, name: str) -> int:
        return math.ceil(self.shapes[name][0] / self._size)


class _TimedExchange:
    """FSDP's own exchange of weights or gradients, counted by `exchange_timer`.

    Args:
        name: of the collective in `torch.distributed`.
    """

    def __init__(self, name: str):
        self._exchange = getattr(c10d, name)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> c10d.Work | None:
        """Run the exchange."""
        end = exchange_timer.begin([output_tensor])
        work: c10d.Work | None = self._exchange(output_tensor, input_tensor, **options)
        end()
        return work


def local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor in a model's ``state_dict``, or the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh(device: str, hybrid: bool) -> DeviceMesh:
    """Return the ranks as machines times ranks of a machine, or as one row."""
    if not hybrid:
        return init_device_mesh(device, (world_size(),), mesh_dim_names=("shard",))
    sizes = gather_json(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if len(set(sizes)) > 1 or not 1 < sizes[0] < world_size() or world_size() % sizes[0]:
        raise ConfigError(
            f"train.parallel: got hsdp, with {', '.join(map(str, sorted(set(sizes))))} processes on a machine and "
            f"{world_size()} in all; expected several machines with the same number of processes, more than one "
            "(LOCAL_WORLD_SIZE, which torchrun sets), or fsdp"
        )
    return init_device_mesh(device, (world_size() // sizes[0], sizes[0]), mesh_dim_names=("replica", "shard"))


def sharded_parameters(roots: Roots) -> set[nn.Parameter]:
    """Return the parameters of modules that `Shards` would shard.

    Frozen ones, those that two units share, and what FSDP refuses (scalars, memory in channels-last order) stay whole.
    """
    found: set[nn.Parameter] = set()
    owners: dict[int, int] = {}
    shared: set[nn.Parameter] = set()
    for root, units in roots:
        inside = {id(module): unit for unit in units for module in unit.modules()}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                owner = id(inside.get(id(module), root))
                if owners.setdefault(id(parameter), owner) != owner:
                    shared.add(parameter)
                if parameter.ndim > 0 and parameter.requires_grad and parameter.is_contiguous():
                    found.add(parameter)
    return found - shared


def _copy_view(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Copy an output that is a view, of which FSDP would warn."""
    return output.clone() if output._is_view() else output
