"""Base of image and text towers: which parts train, and from which step on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

TowerT = TypeVar("TowerT", bound="Tower")


class Tower(nn.Module, ABC):
    """Network that maps pixels or token numbers to features ``(B, N, D)``, whole or in part frozen.

    Frozen parameters require no gradient. Modules of frozen parts stay in evaluation mode when the model trains, so
    that dropout, stochastic depth and batch normalisation are fixed maps in them. `vqclip.towers.training` decides what
    is frozen.

    Attributes:
        still: names of the modules that always stay in evaluation mode.
        constants: names in the state dict that never change in a run; a run stores them once.
        first_step: step from which on the tower trains; before it the whole tower is frozen.
        adapter_scale: factor on the adapters of `peft`; None without adapters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.still: frozenset[str] = frozenset()
        self.constants: frozenset[str] = frozenset()
        self.first_step = 0
        self.adapter_scale: float | None = None
        self._waiting: frozenset[str] = frozenset()
        """Names of the parameters that train from `first_step` on, while they wait for it."""

    @abstractmethod
    def example(self) -> Tensor:
        """Return an input of `forward` with one sample, on the tower's device."""

    @property
    def is_frozen(self) -> bool:
        """True if no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.parameters())

    def train(self: TowerT, mode: bool = True) -> TowerT:
        """Set training mode, but for frozen parts; the tower's own ``training`` is always ``mode``."""
        super().train(mode)
        for name, module in self.named_modules():
            if name and (self._waiting or name in self.still):
                module.training = False
        return self

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Put the tower into the state from `first_step` on, for the time of the block."""
        waited = bool(self._waiting)
        self.move_to_step(self.first_step)
        try:
            yield
        finally:
            self.move_to_step(self.first_step - waited)

    def move_to_step(self, step: int) -> bool:
        """Freeze or unfreeze the tower as in step number ``step`` (from 0); return whether this changed anything."""
        waits = step < self.first_step
        if waits == bool(self._waiting):
            return False
        changing = self._waiting or {name for name, each in self.named_parameters() if each.requires_grad}
        for name, parameter in self.named_parameters():
            if name in changing:
                parameter.requires_grad_(not waits)
                parameter.grad = None
        self._waiting = frozenset(changing) if waits else frozenset()
        self.train(self.training)
        return True


def freeze_unused(tower: nn.Module, features: Tensor) -> tuple[str, ...]:
    """Freeze weights that do not affect the features, such as a head's norm: DDP would wait for their gradient.

    Returns:
        Their names.
    """
    weights = {name: weight for name, weight in tower.named_parameters() if weight.requires_grad}
    if not weights:
        return ()
    used: set[nn.Parameter] = set()

    def drop_gradient(weight: nn.Parameter) -> None:  # so that no two gradients are in memory
        used.add(weight)
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(drop_gradient) for weight in weights.values()]
    if features.requires_grad:
        torch.autograd.backward(features.sum(), inputs=list(weights.values()))
    for hook in hooks:
        hook.remove()
    for weight in weights.values():
        weight.requires_grad_(weight in used)
    return tuple(name for name, weight in weights.items() if not weight.requires_grad)
