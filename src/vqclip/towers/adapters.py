"""Low-rank adapters of a tower's linear layers (LoRA, Hu et al. 2021), https://arxiv.org/abs/2106.09685, from `peft`.

`peft` could adapt `nn.MultiheadAttention` too, but adds the change to the frozen weight and subtracts it again in every
forward, which rounds: the frozen weights would drift. Such layers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names
from vqclip.towers.base import Tower
from vqclip.towers.depth import block_names

_DROPOUT = ".lora_dropout"


class AdapterConfig(Config):
    """Low-rank adapters of linear layers (LoRA, Hu et al. 2021), made by `peft`."""

    rank: int = Field(ge=1, le=4096)
    """Rank of the change of each adapted matrix."""
    alpha: float | None = Field(None, gt=0, le=1e6)
    """The change is multiplied by alpha / rank; null: twice the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Regular expressions for names of linear layers, each for a part of the name, such as `mlp`; null: every linear
    layer in the blocks. Layers inside `nn.MultiheadAttention`, as in open_clip's blocks, cannot be adapted."""

    @property
    def scale(self) -> float:
        """Factor on the product of the two matrices."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


def add_adapters(tower: Tower, config: AdapterConfig) -> None:
    """Freeze a tower and add adapters to its linear layers, drawn from torch's global generator.

    Raises:
        ConfigError: peft is missing, no layer can be adapted, or an adapter gets no gradient.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"tower.train.lora: adapters need the package peft ({error}); install it with pip install 'vqclip[lora]'"
        ) from error
    names = _adapted_layers(tower, config.targets)
    tower.requires_grad_(False)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.scale * config.rank,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=names,
    )
    inject_adapter_in_model(settings, tower)
    tower.still = frozenset(name for name, _ in tower.named_modules() if name and _DROPOUT not in name)
    tower.adapter_scale = config.scale
    _require_gradients(tower)


def _adapted_layers(tower: nn.Module, targets: tuple[str, ...] | None) -> list[str]:
    """Return the names of the linear layers to adapt: those of the blocks, or those that match ``targets``."""
    linear = [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]
    inside = tuple(f"{name}." for name, module in tower.named_modules() if isinstance(module, nn.MultiheadAttention))
    possible = [name for name in linear if not name.startswith(inside)]
    if targets is None:
        blocks = tuple(f"{name}." for name in block_names(tower))
        # Layers that do not affect the features are frozen.
        found = [n for n in possible if n.startswith(blocks) and tower.get_submodule(n).weight.requires_grad]
        if not found:
            raise ConfigError(
                f"tower.train.lora: the blocks of this tower have no linear layer that can be adapted "
                f"(layers: {first_names(block_names(tower))}); expected a transformer; use train: {{last: 2}}"
            )
        return found
    for pattern in targets:
        try:
            matching = [name for name in possible if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(f"tower.train.lora.targets: got {pattern!r}, no regular expression: {error}") from error
        if not matching:
            raise ConfigError(
                f"tower.train.lora.targets: got {pattern!r}, which is in the name of no linear layer outside of "
                f"nn.MultiheadAttention; expected a part of {first_names(possible) or 'none: this tower has none'}"
            )
    return [name for name in possible if any(re.search(pattern, name) for pattern in targets)]


@torch.enable_grad()
def _require_gradients(tower: Tower) -> None:
    """Check that every adapter affects the features; DDP would wait for the gradient of another."""
    training = tower.training
    adapters = {name: each for name, each in tower.named_parameters() if each.requires_grad}
    features = tower.eval()(tower.example())
    # An unused adapter has None here, though the types do not show it.
    gradients: Sequence[Tensor | None] = [None] * len(adapters)
    if features.requires_grad:
        gradients = torch.autograd.grad(features.sum(), list(adapters.values()), allow_unused=True)
    tower.train(training)
    if unused := [name for name, each in zip(adapters, gradients, strict=True) if each is None]:
        layers = dict.fromkeys(name.partition(".lora_")[0] for name in unused)
        raise ConfigError(
            f"tower.train.lora.targets: adapters of {first_names(layers)} do not affect the features; expected names "
            "of layers whose own forward is called"
        )
