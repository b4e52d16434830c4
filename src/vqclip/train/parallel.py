"""A task in one or several processes: the network that trains, and the whole task to evaluate, export and save.

    parallel.network               the module of the task whose backward averages gradients over ranks
    parallel.weights               what this rank has of every weight: `dist.Replicas` or `dist.Shards`
    parallel.whole_task(...)       the task with whole weights

Nothing else asks whether there is one process, DDP or FSDP2.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.towers.blocks import block_names
from vqclip.train.compilation import compile_model
from vqclip.train.ema import replace_weights
from vqclip.train.optim import clip_gradients
from vqclip.train.tasks.base import Task

__all__ = ["Parallel"]

_Slots = list[tuple[nn.Module, str]]


class Parallel:
    """Weights of a task over the ranks. A collective.

    Args:
        task: in the state of its first step; weights that train now may be put into shards, one unit a block.
        optimizer: new, over the parameters of the task; gets this rank's rows instead of those in shards.
        kind: see `ComputeConfig.parallel`; no effect in one process.
        compiled: compile the whole model.
        bucket_mb: see `ComputeConfig.bucket_mb`.

    Attributes:
        network: `Task.student` as it trains: compiled, and with gradients averaged over ranks.
        weights: what this rank stores of the weights.

    Raises:
        ConfigError: the task cannot be in shards, or it has no weights to shard.
    """

    def __init__(
        self,
        task: Task[Any],
        optimizer: Optimizer,
        kind: Literal["ddp", "fsdp", "hsdp"] = "ddp",
        compiled: bool = False,
        bucket_mb: float | None = None,
    ):
        self._task, self._compiled, self._bucket_mb = task, compiled, bucket_mb
        self._whole: Task[Any] = task
        self._slots: dict[str, _Slots] = {}
        if kind != "ddp":
            task.require_shardable(f"train.parallel: got {kind!r}")
        in_shards = kind != "ddp" and dist.is_distributed()
        self.weights = self._shard(optimizer, kind == "hsdp") if in_shards else dist.Replicas(task.model)
        self.network = self._wrap()

    def _shard(self, optimizer: Optimizer, hybrid: bool) -> dist.Shards:
        """Put weights into shards, after a copy of the task was made for whole ones."""
        model = self._task.model
        roots = [
            (tower, [tower.get_submodule(name) for name in block_names(tower)])
            for tower in self._task.towers.values()
            if not tower.is_frozen
        ]
        sharded = dist.sharded_parameters(roots)
        if not sharded:
            raise ConfigError(
                "train.parallel: got fsdp or hsdp, but no weights of a tower train in the first step, and only these "
                "are put into shards; expected ddp"
            )
        self._whole, self._slots = _copy_without(self._task, sharded)
        numbers = {each: number for number, each in enumerate(model.parameters())}
        order = [[numbers.get(each, each) for each in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []  # so that no whole weight stays in memory
        del numbers, sharded
        shards = dist.Shards(model, roots, hybrid)
        every = list(shards.parameters.values())
        for group, kept in zip(optimizer.param_groups, order, strict=True):
            group["params"] = [every[each] if isinstance(each, int) else each for each in kept]
        return shards

    def _wrap(self) -> nn.Module:
        student = self._task.student
        return self.weights.wrap(compile_model(student) if self._compiled else student, self._bucket_mb)

    def wrap_again(self) -> None:
        """Wrap the network for the parameters that train now. A collective."""
        dist.release_ddp(self.network)
        self.network = self._wrap()

    def no_sync(self) -> AbstractContextManager[object]:
        """Accumulate gradients in the block without averaging them over ranks; the next backward does it."""
        return self.weights.no_sync(self.network)

    def clip(self, limit: float | None) -> Tensor:
        """Limit the gradient norm of each group of parameters. A collective if weights are in shards.

        Returns:
            () norm of the whole gradient before.
        """
        apart = [self.weights.local(group) for group in self._task.clipped_apart()]
        groups = [[each for each in group if each.grad is not None] for group in apart]
        norms = [clip_gradients(group, limit, self.weights) for group in groups if group]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    @contextmanager
    def whole_task(self, averages: Mapping[str, Tensor], for_export: bool = False) -> Iterator[Task[Any]]:
        """Return the task with whole weights; those in shards are gathered now, in a collective, and none is later.

        Args:
            averages: name → moving average, of this rank's rows, to use instead of a weight.
            for_export: gather weights in shards to the host memory of rank 0 alone, one after the other; then no
                forward can run.
        """
        try:
            for name, slots in self._slots.items():
                own = self.weights.parameters[name]
                found = self.weights.gather(name, averages.get(name, own)).detach()
                if for_export:
                    found = found.cpu() if dist.is_main() else found.new_empty(0)
                _fill(slots, found.to(own.dtype))
            others = {name: each for name, each in averages.items() if name not in self._slots}
            with replace_weights(self._whole.model, others):
                yield self._whole
        finally:
            for name, slots in self._slots.items():
                _fill(slots, self.weights.parameters[name].new_empty(0))


def _copy_without(task: Task[Any], sharded: Collection[nn.Parameter]) -> tuple[Task[Any], dict[str, _Slots]]:
    """Copy a task with empty tensors for some parameters; everything without any of them is shared.

    Returns:
        The copy, and the places of each parameter in it, by the parameter's first name.
    """
    model = task.model
    memo: dict[int, Any] = {id(each): each for each in model.buffers()}
    for parameter in model.parameters():
        empty = nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
        memo[id(parameter)] = empty if parameter in sharded else parameter
    memo |= {id(each): each for each in model.modules() if not any(p in sharded for p in each.parameters())}
    whole = copy.deepcopy(task, memo)
    names = {id(memo[id(each)]): name for name, each in model.named_parameters() if each in sharded}
    slots: dict[str, _Slots] = {name: [] for name in names.values()}
    for module in whole.model.modules():
        for key, each in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(each) in names:
                slots[names[id(each)]].append((module, key))
    return whole, slots


def _fill(slots: _Slots, tensor: Tensor) -> None:
    """Put one tensor into all places of a parameter."""
    parameter = None
    for module, key in slots:
        parameter = parameter or nn.Parameter(tensor, module.get_parameter(key).requires_grad)
        setattr(module, key, parameter)
