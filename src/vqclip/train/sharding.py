"""A run whose weights are in shards: the whole task for evaluations and exports, whole tensors for checkpoints.

A checkpoint does not depend on the number of ranks or on whether they had shards. Every rank writes and reads its own
rows (`vqclip.train.shard_files`). Where only rank 0 sees the run's folder, it receives whole tensors, one after the
other, and sends them back in the same way.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vqclip import checkpoint, dist
from vqclip.checkpoint import OptimizerState
from vqclip.errors import ConfigError
from vqclip.towers.blocks import block_names
from vqclip.train.ema import AVERAGE
from vqclip.train.tasks.base import Task

Outline = tuple[Sequence[int], torch.dtype]
"""Shape and type of a tensor."""


class Stored(NamedTuple):
    """Tensors of a file of a checkpoint, mapped from it."""

    tensors: Mapping[str, Tensor]
    """On every rank, or on rank 0."""
    outlines: Mapping[str, Outline]
    """Shape and type of every tensor, on every rank."""
    is_everywhere: bool
    """Whether every rank has the tensors; otherwise rank 0 sends them, one after the other."""


class Sharding:
    """Weights of the towers of a task in shards, one unit a block. A collective.

    Args:
        task: in the state of its first step; the weights that train now are put into shards.
        optimizer: new, over the parameters of the task; gets those of `shards` instead.
        hybrid: see `vqclip.dist.Shards`.

    Attributes:
        shards: of ``task.model``.
        whole: copy of the task; the weights in shards are empty but in `filled`, and it shares all else with the task.
        optimizer: copy of the optimizer for the state of whole weights; to compare a checkpoint with.

    Raises:
        ConfigError: no weights to shard, or `vqclip.dist.Shards` refuses.
    """

    def __init__(self, task: Task[Any], optimizer: Optimizer, hybrid: bool):
        roots = [
            (tower, [tower.get_submodule(name) for name in block_names(tower)])
            for tower in task.towers.values()
            if not tower.is_frozen
        ]
        sharded = dist.sharded_parameters(roots)
        if not sharded:
            raise ConfigError(
                "train.parallel: got fsdp or hsdp, but no weights of a tower train in the first step, and only these "
                "are put into shards; expected ddp"
            )
        self.task = task
        self.whole, self._slots = _copy_without(task, sharded)
        self.optimizer = _with_outlines(optimizer)
        numbers = {each: number for number, each in enumerate(task.model.parameters())}
        order = [[numbers.get(each, each) for each in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []  # so that no whole weight stays in memory
        del numbers, sharded
        self.shards = dist.Shards(task.model, roots, hybrid)
        every = list(self.shards.parameters.values())
        for group, kept in zip(optimizer.param_groups, order, strict=True):
            group["params"] = [every[each] if isinstance(each, int) else each for each in kept]

    @contextmanager
    def filled(self, averages: Mapping[str, Tensor], for_export: bool = False) -> Iterator[Task[Any]]:
        """Give `whole` all weights within the block. A collective at its beginning, none inside.

        Args:
            averages: name → this rank's rows of a moving average to use instead of the weight.
            for_export: give the weights in shards to rank 0 alone, in host memory, one after the other; no forward can
                run then.
        """
        own = dict[str, Tensor]()
        try:
            for name, slots in self._slots.items():
                rows = averages.get(name, self.shards.parameters[name])
                dtype = self.shards.parameters[name].dtype
                found = self.shards.gather(name, rows).detach()
                if for_export:
                    found = found.cpu() if dist.is_main() else found.new_empty(0)
                _fill(slots, found.to(dtype))
            for name, each in self.whole.model.named_parameters():
                if name in averages and name not in self._slots:
                    own[name], each.data = each.data, averages[name].to(each.dtype)
            yield self.whole
        finally:
            for name, each in self.whole.model.named_parameters():
                if name in own:
                    each.data = own[name]
            self._empty()

    def _empty(self) -> None:
        """Release the weights of `whole`."""
        for name, slots in self._slots.items():
            _fill(slots, self.shards.parameters[name].new_empty(0))

    # Saving.

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU of rank 0, one after the other; nothing on the other ranks. A collective.

        Args:
            tensors: by name of the parameter, or name and `/` and a key; the same names on every rank.
        """
        found = {}
        for name, tensor in tensors.items():
            whole = self.shards.gather(name.partition("/")[0], tensor)
            if dist.is_main():
                found[name] = whole.detach().to("cpu", copy=True).contiguous()
        return found

    def gather_optimizer(self, optimizer: Optimizer) -> OptimizerState:
        """Return the whole state of the optimizer; without tensors but on rank 0. A collective."""
        tensors = self.gather(checkpoint.optimizer_tensors(optimizer))
        return dataclasses.replace(checkpoint.pack_optimizer(self.optimizer), tensors=tensors)

    # Loading.

    def load_model(self, stored: Stored, constants: Collection[str]) -> None:
        """Load the weights and buffers of a checkpoint. A collective.

        Args:
            stored: the model's tensors.
            constants: names of those that no checkpoint contains.
        """
        for name, tensor in self.task.model.state_dict().items():
            if name not in constants:
                outline = (tensor.shape, tensor.dtype)
                dist.local_rows(tensor).copy_(self._rows(stored, name, name, outline, tensor.device))
        for quantizer in self.task.quantizers().values():
            quantizer.load_state_dict(quantizer.state_dict())  # so that hooks derive attributes from it

    def load_optimizer(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], stored: Stored) -> None:
        """Load the state of `optimizer` for this rank's rows. A collective.

        Args:
            optimizer: of this rank's rows.
            groups: of `OptimizerState`.
            stored: its tensors.
        """
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = saved["options"]["lr"]
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if (outline := stored.outlines.get(f"{name}/{key}")) is not None:
                        rows = self._rows(stored, f"{name}/{key}", name, outline, parameter.device)
                        optimizer.state[parameter][key] = checkpoint.place_state(rows, parameter, group, key)

    def averages(self, stored: Stored) -> dict[str, Tensor]:
        """Return this rank's rows of the moving averages among stored tensors. A collective."""
        return {
            name: self._rows(stored, name, name.removeprefix(AVERAGE), outline, "cpu").clone()
            for name, outline in stored.outlines.items()
            if name.startswith(AVERAGE)
        }

    def _rows(self, stored: Stored, name: str, parameter: str, outline: Outline, device: Any) -> Tensor:
        """Return this rank's rows of a stored tensor: a view of the file, or of a tensor on `device`."""
        if stored.is_everywhere:
            return self.shards.rows(parameter, stored.tensors[name])
        whole = torch.empty(outline[0], dtype=outline[1], device=device)
        if dist.is_main():
            whole.copy_(stored.tensors[name])
        return self.shards.rows(parameter, dist.broadcast_(whole))


_Slots = list[tuple[nn.Module, str]]


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


def _with_outlines(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same kind and options over tensors of the same shapes, which take no memory."""
    groups = []
    for group in optimizer.param_groups:
        outlines = [
            nn.Parameter(torch.empty((), dtype=each.dtype).expand(each.shape), each.requires_grad)
            for each in group["params"]
        ]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(options | {"params": list(zip(group["param_names"], outlines, strict=True))})
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups)
    return made
