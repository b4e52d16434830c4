"""Execution of a task: its weights in shards, its gradient over the ranks, its code compiled.

Compiled are a whole model, or the regions that take its time. Blocks of one kind share their code, so that compilation
takes as long for one block as for all. The rest, and the losses, whose work is in operators of their own, run eagerly.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.optim import Optimizer

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.quantizers import Quantizer
from vqclip.towers.blocks import block_names, compiled_forward
from vqclip.train.tasks.base import Task

_LIMITS = {"recompile_limit": 1024, "accumulated_recompile_limit": 1024}
"""Most versions of a block's code. Past either torch would run the block eagerly, with a warning: its limit of 8, and
of 256 in all, is less than the blocks of a tower with another rate of stochastic depth in each."""


def shard(task: Task, optimizer: Optimizer, hybrid: bool) -> tuple[dist.Shards, Task]:
    """Put the weights of towers that train now into shards, one unit a block. A collective.

    Args:
        task: in the state of its first step.
        optimizer: new, over the parameters of the task; gets this rank's rows instead of those in shards.
        hybrid: keep a copy of the shards on every machine (``parallel: hsdp``).

    Returns:
        The shards, and a copy of the task with empty tensors in their place, for whole weights.

    Raises:
        ConfigError: there are no weights to shard.
    """
    trained = [tower for tower in task.towers.values() if not tower.is_frozen]
    roots = [(tower, [tower.get_submodule(name) for name in block_names(tower)]) for tower in trained]
    sharded = dist.sharded_parameters(roots)
    if not sharded:
        raise ConfigError(
            "train.parallel: got fsdp or hsdp, but no weights of a tower train in the first step, and only these "
            "are put into shards; expected ddp"
        )
    whole = _copy_without(task, sharded)
    del sharded
    for group in optimizer.param_groups:
        group["params"] = []  # so that no whole weight stays in memory
    optimizer.state.clear()  # of kinds that make it before the first step; they make it again for shards
    shards = dist.Shards(task.model, roots, hybrid)
    for group in optimizer.param_groups:
        group["params"] = [shards.parameters[name] for name in group["param_names"]]
    return shards, whole


def _copy_without(task: Task, sharded: Collection[nn.Parameter]) -> Task:
    """Copy a task with empty tensors for some parameters; everything without any of them is shared."""
    model = task.model
    memo: dict[int, Any] = {id(each): each for each in model.buffers()}
    for parameter in model.parameters():
        empty = nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
        memo[id(parameter)] = empty if parameter in sharded else parameter
    memo |= {id(each): each for each in model.modules() if not any(p in sharded for p in each.parameters())}
    return copy.deepcopy(task, memo)


def clip_gradients(groups: Iterable[Iterable[nn.Parameter]], weights: dist.Replicas, limit: float | None) -> Tensor:
    """Limit the gradient norm of each group of parameters, None to measure it alone. A collective of shards.

    Returns:
        () norm of the whole gradient before, not finite if a gradient is not.
    """
    norms = []
    for group in groups:
        if held := [each for each in weights.local(group) if each.grad is not None]:
            norms.append(weights.norm(held))
            if limit is not None:
                nn.utils.clip_grads_with_norm_(held, limit, norms[-1])
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


class CompiledRegions:
    """Blocks of towers and quantizers that run compiled within `applied`, and eagerly elsewhere.

    Evaluations, exports and copies of the model thus never meet compiled code.

    Args:
        towers: with their recomputation; each block is compiled.
        quantizers: each is compiled as a whole.

    Raises:
        ConfigError: this machine has no compiler for the code that torch makes.
    """

    def __init__(self, towers: Iterable[nn.Module], quantizers: Iterable[Quantizer]):
        towers = [*towers]
        prepare_compilation(towers)
        blocks = [tower.get_submodule(name) for tower in towers for name in block_names(tower)]
        modules = (*blocks, *quantizers)
        self._eager = {module: vars(module).get("forward") for module in modules}
        self._compiled = {module: compiled_forward(module) for module in modules}

    @contextmanager
    def applied(self, compiled: bool = True) -> Iterator[None]:
        """Run the regions compiled within the block, or eagerly in a block inside of such a one."""
        config: Any = torch._dynamo.config
        with config.patch(_LIMITS):
            try:
                self._set(self._compiled if compiled else self._eager)
                yield
            finally:
                self._set(self._eager if compiled else self._compiled)

    def _set(self, forwards: dict[nn.Module, Any]) -> None:
        for module, forward in forwards.items():
            if forward is None:
                vars(module).pop("forward", None)  # that of its class
            else:
                vars(module)["forward"] = forward


def prepare_compilation(modules: Iterable[nn.Module]) -> None:
    """Look for the compiler, without which the first step ends in a traceback of torch; prepare einops.

    Raises:
        ConfigError: this machine has no compiler for the code that torch makes.
    """
    on_cpu = any(each.device.type == "cpu" for module in modules for each in module.parameters())
    variable, usual = ("CXX", "clang++" if sys.platform == "darwin" else "g++") if on_cpu else ("CC", "gcc")
    names = shlex.split(os.environ.get(variable, ""))[:1] or ([usual] if on_cpu else [usual, "clang", "cc"])
    if not any(map(shutil.which, names)):
        raise ConfigError(
            f"train.compile: torch.compile needs a {'C++' if on_cpu else 'C'} compiler, and this machine has no "
            f"{' or '.join(names)}; install {usual}, name another one in the environment variable {variable}, or set "
            "train.compile: false"
        )
    # einops remembers each new type of tensor, and torch then compiles once more: show it both types now.
    for tensor in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        rearrange(tensor, "a -> a")
