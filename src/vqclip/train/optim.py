"""AdamW, its parameter groups, the learning-rate schedule and gradient clipping.

    learning rate = schedule · image_lr_ratio or text_lr_ratio · layer_decay^(L - l) · lr_ratio of the override

The layers of a tower are l = 0 (before the blocks), 1 to L - 1 (its blocks) and L (after them): `vqclip.towers.blocks`.
So the last block has one factor of the decay, the layer before the blocks has L, and everything from the tower's output
to the embedding has none. This is the convention of BEiT (Bao et al. 2021, https://arxiv.org/abs/2106.08254) and MAE.
timm's is the same, but it counts the norm after the blocks to the last block.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from vqclip import dist
from vqclip.config import Config
from vqclip.config.messages import did_you_mean
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names
from vqclip.towers.blocks import layers

logger = logging.getLogger(__name__)

# Devices whose fused AdamW kernel every torch that we support has.
_FUSED_DEVICES = frozenset({"cpu", "cuda"})
# Parameters that are added, looked up or multiplied in, not matrices to multiply with; by the last part of the name,
# as timm ("pos_embed", "cls_token", "latent") and open_clip ("positional_embedding", "logit_scale") spell them.
_UNDECAYED_NAME = re.compile(
    r"(.*_)?(bias|scale|gamma|embed|embedding|tokens?|latent|query|queries|positions?|bias_table)"
)
_UNDECAYED_MODULES = (nn.Embedding, nn.EmbeddingBag)
_SHOWN = 3

Beta = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(gt=0, le=1)]


class LayerDecayConfig(Config):
    """Layer-wise decay of the learning rate for each tower."""

    image: Decay | None = None
    """Factor for each layer of the image tower between a parameter and the output; null: no decay."""
    text: Decay | None = None
    """Factor for each layer of the text tower between a parameter and the output; null: no decay."""


class OverrideConfig(Config):
    """Learning rate and weight decay of the parameters whose names match a pattern."""

    pattern: str = Field(min_length=1)
    """Pattern of whole parameter names, such as `image.tower.*` or `*.project_in.?.weight`: `*` is any text, dots
    included, `?` one character, `[ab]` one of several. `train.log` and the error for a wrong pattern show names."""
    lr_ratio: float | None = Field(None, gt=0, le=1000)
    """Factor on the learning rate, times those of `image_lr_ratio`, `text_lr_ratio` and `layer_decay`."""
    weight_decay: float | None = Field(None, ge=0, le=1000)
    """Replaces `optim.weight_decay` for the matching matrices and convolutions; parameters without weight decay, such
    as biases, norms and embeddings, keep none."""

    @model_validator(mode="after")
    def _sets_something(self) -> OverrideConfig:
        if self.lr_ratio is None and self.weight_decay is None:
            raise ValueError("got neither lr_ratio nor weight_decay; expected at least one")
        return self


class OptimConfig(Config):
    """Optimizer, learning-rate schedule and gradient clipping."""

    lr: float = Field(default=1e-3, gt=0, le=1000)
    """Highest learning rate, reached after the warm-up."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps of linear warm-up; fewer than the steps of the run."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the cosine, as a fraction of `lr`."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0, le=1000)
    """Decoupled weight decay of matrices and convolutions; biases, norms, embeddings and scalars have none."""
    image_lr_ratio: float = Field(default=1.0, gt=0, le=1000)
    """Factor on the learning rate of the whole image tokenizer, from the tower to the embedding (names `image.*`)."""
    text_lr_ratio: float = Field(default=1.0, gt=0, le=1000)
    """Factor on the learning rate of the whole text tokenizer, from the tower to the embedding (names `text.*`)."""
    layer_decay: Decay | LayerDecayConfig | None = None
    """Factor on the learning rate for each layer of a tower between a parameter and the tower's output, such as 0.75:
    the last block has the factor once, the layer before the blocks as often as there are blocks plus one. A number for
    both towers, or `{image: 0.75, text: 0.9}`; null: no decay. Everything after the towers has the full rate."""
    overrides: tuple[OverrideConfig, ...] = ()
    """Learning rate and weight decay by parameter name; of several patterns that match, the first one counts."""
    clip_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient; null clips nothing."""

    def build(self, model: nn.Module, discriminators: nn.Module | None = None) -> AdamW:
        """Make an optimizer over the parameters that require a gradient, under their names.

        Args:
            model: the bare model, before DDP or `torch.compile` add to the names.
            discriminators: further module, in groups of its own, under names that begin with `discriminators.`; an
                attribute `lr_ratio` of a module in it is a factor on the learning rate.

        Raises:
            ConfigError: no parameter requires a gradient, or a rate or an override changes none.
        """
        groups = parameter_groups(model, self.weight_decay, self._lr_ratios(model), self.overrides)
        if not groups:
            raise ConfigError("no parameter of the model requires a gradient: nothing to train")
        if discriminators is not None:
            named = nn.ModuleDict({"discriminators": discriminators})
            groups += parameter_groups(named, self.weight_decay, _ratios_of_modules(named))
        fused = all(each.device.type in _FUSED_DEVICES for group in groups for _, each in group["params"])
        several = "\n  " if len(groups) > 4 else " "
        logger.info("AdamW:%s", several + f";{several}".join(_describe(group) for group in groups))
        optimizer = AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused, foreach=False)
        set_lr(optimizer, self.lr)
        return optimizer

    def _lr_ratios(self, model: nn.Module) -> dict[str, float]:
        """Return the factor on the learning rate of each parameter: by modality, depth in its tower, and module."""
        ratios = {name: 1.0 for name, _ in model.named_parameters()} | _ratios_of_modules(model)
        trained, decay, found = [name for name, each in model.named_parameters() if each.requires_grad], None, False
        if isinstance(self.layer_decay, LayerDecayConfig):
            decay = {"image": self.layer_decay.image, "text": self.layer_decay.text}
        elif self.layer_decay is not None:
            decay = dict.fromkeys(("image", "text"), self.layer_decay)
        for modality, ratio in {"image": self.image_lr_ratio, "text": self.text_lr_ratio}.items():
            mine = [name for name in ratios if name.startswith(f"{modality}.")]
            if ratio != 1 and not mine:
                raise ConfigError(
                    f"optim.{modality}_lr_ratio: got {ratio}, but no parameter's name begins with '{modality}.'"
                )
            for name in mine:
                ratios[name] *= ratio
            if decay is None or (factor := decay[modality]) is None:
                continue
            prefix = f"{modality}.tower."
            if any(name.startswith(prefix) for name in trained):
                found, depths = True, layers(model.get_submodule(prefix[:-1]))
                for number, names in enumerate(depths):
                    for name in names:
                        ratios[prefix + name] *= factor ** (len(depths) - 1 - number)
            elif isinstance(self.layer_decay, LayerDecayConfig):
                raise ConfigError(
                    f"optim.layer_decay.{modality}: got {factor:g}, but no parameter of that tower trains"
                )
        if decay is not None and not found:
            raise ConfigError("optim.layer_decay: got a decay, but no parameter of a tower trains; expected null")
        return ratios

    def schedule(self, total_steps: int) -> Schedule:
        """Make the learning-rate schedule of `total_steps` steps.

        Raises:
            ConfigError: the warm-up is not shorter than the run.
        """
        return Schedule(self.lr, self.warmup_steps, total_steps, self.final_lr_ratio)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine down to a floor: a function of the step alone, so it has no state to save.

    `schedule(step)` is the learning rate of the step after `step` done ones: `lr / warmup_steps` for the first one,
    `lr` for number `warmup_steps`, and `lr * final_lr_ratio` from the end of the run on.
    """

    lr: float
    """Highest learning rate."""
    warmup_steps: int
    """Steps of the warm-up."""
    total_steps: int
    """Steps of the run."""
    final_lr_ratio: float = 0.0
    """Floor, as a fraction of `lr`."""

    def __post_init__(self) -> None:
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"optim.warmup_steps: got {self.warmup_steps}; "
                f"expected fewer than the {self.total_steps} steps of the run"
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step after `step` done ones."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * (self.final_lr_ratio + (1 - self.final_lr_ratio) * cosine)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    lr_ratios: Mapping[str, float] | None = None,
    overrides: Sequence[OverrideConfig] = (),
) -> list[dict[str, Any]]:
    """Group the parameters that require a gradient by weight decay and learning rate.

    No weight decay goes to parameters with fewer than two axes (biases, norms, temperatures), to embeddings, class
    tokens and learned queries, and to the names in a submodule's ``no_weight_decay()`` (timm).

    Args:
        model: each of its trainable parameters is in exactly one group, shared ones once.
        weight_decay: of all other parameters.
        lr_ratios: name of a parameter → factor on its learning rate, 1 by default; stored as ``lr_ratio`` in the group.
        overrides: change both by name.

    Returns:
        Groups for a torch optimizer, each with ``params`` as (name, parameter) pairs, ``weight_decay``, ``lr_ratio``.

    Raises:
        ConfigError: an override matches no parameter that it can change.
    """
    undecayed = _without_decay(model)
    decayed = {name for name, parameter in model.named_parameters() if id(parameter) not in undecayed}
    chosen = _match_overrides(model, overrides, decayed)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        ratio, decay, override = (lr_ratios or {}).get(name, 1.0), weight_decay, chosen.get(name)
        if override is not None:
            ratio *= 1.0 if override.lr_ratio is None else override.lr_ratio
            decay = weight_decay if override.weight_decay is None else override.weight_decay
        decay = decay if name in decayed else 0.0
        group = groups.setdefault((decay, ratio), {"params": [], "weight_decay": decay, "lr_ratio": ratio})
        group["params"].append((name, parameter))
    return list(groups.values())


def _match_overrides(
    model: nn.Module, overrides: Sequence[OverrideConfig], decayed: Collection[str]
) -> dict[str, OverrideConfig]:
    """Return the first override whose pattern matches, for each parameter that has one, by its name in ``model``.

    Raises:
        ConfigError: a pattern matches no parameter that trains, now or from a later step on, or only parameters that
            an earlier pattern matches too; or it gives weight decay to parameters without it (`decayed`) alone.
    """
    parameters, found = dict(model.named_parameters()), dict[str, OverrideConfig]()
    for number, override in enumerate(overrides):
        matching = [name for name in parameters if fnmatch.fnmatchcase(name, override.pattern)]
        trained = [name for name in matching if parameters[name].requires_grad]
        new = [name for name in trained if name not in found]
        found |= dict.fromkeys(new, override)
        if override.weight_decay and new and not set(decayed) & set(new):
            raise ConfigError(
                f"optim.overrides[{number}].weight_decay: got {override.weight_decay:g} for {override.pattern!r}, "
                "which matches only parameters without weight decay (biases, norms, embeddings, scalars); expected null"
            )
        if new:
            continue
        if trained:
            earlier = first_names(trained, _SHOWN)
            problem = f"only parameters of an earlier override ({earlier}); the first match counts: reorder them"
        elif matching:
            problem = f"only frozen parameters ({first_names(matching, _SHOWN)}); expected parameters that train"
        else:
            names = list(parameters)
            parts = dict.fromkeys(f"{name[:end]}.*" for name in names for end, each in enumerate(name) if each == ".")
            close = difflib.get_close_matches(override.pattern, [*parts, *names], n=_SHOWN)
            problem = f"no parameter; expected names such as {first_names(names, _SHOWN)}{did_you_mean(close)}"
        raise ConfigError(f"optim.overrides[{number}].pattern: got {override.pattern!r}, which matches {problem}")
    return found


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group, times the group's ``lr_ratio``."""
    for group in optimizer.param_groups:
        value = lr * group.get("lr_ratio", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None, weights: dist.Replicas) -> Tensor:
    """Scale the gradients down to a total norm of `limit`, in place, without waiting for the device.

    If a gradient is not finite, neither is the result, and all gradients are useless: check it before the update.

    Args:
        parameters: with gradients.
        limit: largest norm; None only measures it.
        weights: of the model; if they are in shards, the call is a collective.

    Returns:
        The norm before clipping, a scalar on the gradients' device.
    """
    norm = weights.norm(parameters)
    if limit is not None:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def _without_decay(model: nn.Module) -> set[int]:
    """Return the ids of the parameters without weight decay."""
    found = set()
    for module in model.modules():
        if callable(listing := getattr(module, "no_weight_decay", None)):
            names = set(listing())  # timm's lists contain names that some variants lack
            found |= {id(parameter) for name, parameter in module.named_parameters() if name in names}
        for name, parameter in module.named_parameters(recurse=False):
            looked_up = isinstance(module, _UNDECAYED_MODULES) or _UNDECAYED_NAME.fullmatch(name)
            if parameter.ndim < 2 or looked_up:
                found.add(id(parameter))
    return found


def _ratios_of_modules(model: nn.Module) -> dict[str, float]:
    """Return the factors on the learning rate that modules, such as discriminators, have as ``lr_ratio``."""
    return {
        f"{prefix}.{name}" if prefix else name: module.lr_ratio
        for prefix, module in model.named_modules()
        if isinstance(getattr(module, "lr_ratio", None), float)
        for name, _ in module.named_parameters()
    }


def _describe(group: dict[str, Any]) -> str:
    names = [name for name, _ in group["params"]]
    size = sum(parameter.numel() for _, parameter in group["params"])
    common = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    place = f", {common}{'.*' if len(names) > 1 else ''}" if common else ""
    ratio = "" if group["lr_ratio"] == 1 else f", learning rate × {group['lr_ratio']:g}"
    return (
        f"{len(group['params'])} tensors ({size:,} numbers) with weight decay {group['weight_decay']:g}{ratio}{place}"
    )
