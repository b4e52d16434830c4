"""Compilation by `torch.compile`: of a whole model, or of the regions that take its time.

Regions are the blocks of towers and the quantizers. Blocks of one kind share their code, so that compilation takes as
long for one block as for all. The rest, and the losses, whose work is in operators of their own, run eagerly.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import nn

from vqclip.errors import ConfigError
from vqclip.quantizers import Quantizer
from vqclip.towers.blocks import block_names, compiled_forward

__all__ = ["CompiledRegions", "compile_model"]

_LIMITS = {"recompile_limit": 1024, "accumulated_recompile_limit": 1024}
"""Most versions of a block's code. Past either torch would run the block eagerly, with a warning: its limit of 8, and
of 256 in all, is less than the blocks of a tower with another rate of stochastic depth in each."""


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
        _prepare(towers)
        blocks = [tower.get_submodule(name) for tower in towers for name in block_names(tower)]
        modules = (*blocks, *quantizers)
        self._eager = {module: vars(module).get("forward") for module in modules}
        self._compiled = {module: compiled_forward(module) for module in modules}

    @contextmanager
    def applied(self, compiled: bool = True) -> Iterator[None]:
        """Run the regions compiled within the block, or eagerly in a block inside of such a one."""
        config: Any = torch._dynamo.config
        with config.patch({name: limit for name, limit in _LIMITS.items() if hasattr(config, name)}):
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


def compile_model(model: nn.Module) -> nn.Module:
    """Compile a whole model.

    Raises:
        ConfigError: this machine has no compiler for the code that torch makes.
    """
    _prepare([model])
    return torch.compile(model)  # type: ignore[return-value]


def _prepare(modules: Iterable[nn.Module]) -> None:
    """Look for the compiler, without which the first step ends in a traceback of torch; prepare einops."""
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
