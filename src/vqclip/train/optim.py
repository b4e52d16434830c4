"""The optimizer, its parameter groups and the learning-rate schedule.

    learning rate = schedule · image_lr_ratio or text_lr_ratio · layer_decay^(L - l) · lr_ratio of the override

The layers of a tower are l = 0 (before the blocks), 1 to L - 1 (its blocks) and L (after them): `vqclip.towers.blocks`.
So the last block has one factor of the decay, the layer before the blocks has L, and everything from the tower's output
to the embedding has none. This is the convention of BEiT (Bao et al. 2021, https://arxiv.org/abs/2106.08254) and MAE.
timm's is the same, but it counts the norm after the blocks to the last block.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from vqclip.checkpoint.optimizer import first_state
from vqclip.config import Config
from vqclip.config.messages import did_you_mean
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names
from vqclip.pixels.decoder import PixelDecoder
from vqclip.towers.base import Tower
from vqclip.towers.blocks import block_names, layers
from vqclip.train.muon import Muon

# Devices whose fused AdamW kernel every torch that we support has.
_FUSED_DEVICES = frozenset({"cpu", "cuda"})
# Parameters that are added, looked up or multiplied in, not matrices to multiply with; by the last part of the name,
# as timm ("pos_embed", "cls_token", "latent") and open_clip ("positional_embedding", "logit_scale") spell them.
_UNDECAYED_NAME = re.compile(
    r"(.*_)?(bias|scale|gamma|embed|embedding|tokens?|latent|query|queries|positions?|bias_table)"
)
_UNDECAYED_MODULES = (nn.Embedding, nn.EmbeddingBag)
_SHOWN = 3

ELEMENTWISE = re.compile(
    r"muon|lionc?|sgd[cw]?|momentum|nesterovw?|adam(c|w|ax|wlegacy)?|adanw?|ada(belief|delta|grad)|adopt[cw]?|lapropc?|"
    r"madgradw?|nadam(c|w|legacy)?|radam(w|legacy)?|radabelief|rmsprop(tf[cw]?)?"
)
"""Kinds that step a row of a weight by numbers of that row alone, so that its weights can be in shards; `Muon` gathers
them itself."""

_OWN_KINDS: Mapping[str, type[AdamW]] = {"adamw": AdamW, "muon": Muon}
_OWN_BETAS, _OWN_EPS = (0.9, 0.98), 1e-6

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

    kind: str = "adamw"
    """`adamw`; `muon`: Muon for the matrices and convolutions in the blocks of towers and pixel decoders, AdamW for the
    rest; or one of timm's optimizers, such as `lion`, `lamb` or `adafactor`, with timm's settings."""
    lr: float = Field(default=1e-3, gt=0, le=1000)
    """Highest learning rate, reached after the warm-up."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up. `cosine`: it falls to the end of the run. `constant`: it stays. `wsd`: it stays,
    and falls linearly in the last part of the run (warm-up, stable, decay)."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps of linear warm-up; fewer than the steps of the run."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps of the run in which `wsd` falls."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of `cosine` and `wsd`, as a fraction of `lr`."""
    betas: tuple[Beta, Beta] | None = None
    """Decay rates of the two moments; null: [0.9, 0.98] for `adamw` and `muon`, timm's defaults for other kinds."""
    eps: float | None = Field(default=None, gt=0)
    """Added to the root of the second moment; null: 1e-6 for `adamw` and `muon`, timm's defaults for other kinds."""
    weight_decay: float = Field(default=0.1, ge=0, le=1000)
    """Weight decay of matrices and convolutions, decoupled in `adamw`, `muon` and `lion`; biases, norms, embeddings and
    scalars have none."""
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

    @model_validator(mode="after")
    def _schedule_has_its_settings(self) -> OptimConfig:
        if "decay_share" in self.model_fields_set and self.schedule != "wsd" and self.decay_share != 0.2:
            raise ValueError(f"got decay_share with schedule: {self.schedule}; expected schedule: wsd")
        if self.final_lr_ratio and self.schedule == "constant":
            raise ValueError("got final_lr_ratio with schedule: constant; expected schedule: cosine or wsd")
        return self

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        if kind not in _OWN_KINDS and kind not in (known := _kinds_of_timm()):
            close = difflib.get_close_matches(kind, [*_OWN_KINDS, *known], n=_SHOWN)
            raise ValueError(
                f"got {kind!r}; expected adamw, muon, or one of timm.optim.list_optimizers(), such as lion, but for "
                f"those of apex and bitsandbytes and of second order{did_you_mean(close)}"
            )
        return kind

    def build(self, model: nn.Module, discriminators: nn.Module | None = None) -> Optimizer:
        """Make an optimizer over the parameters that require a gradient, under their names.

        Args:
            model: the bare model, before DDP or `torch.compile` add to the names.
            discriminators: further module, in groups of its own, under names that begin with `discriminators.`; an
                attribute `lr_ratio` of a module in it is a factor on the learning rate.

        Raises:
            ConfigError: no parameter requires a gradient, or a rate or an override changes none; or the kind of
                optimizer cannot be used.
        """
        matrices = matrix_names(model) if self.kind == "muon" else ()
        groups = parameter_groups(model, self.weight_decay, self._lr_ratios(model), self.overrides, matrices)
        if not groups:
            raise ConfigError("no parameter of the model requires a gradient: nothing to train")
        if self.kind == "muon" and not any(group.get("muon") for group in groups):
            raise ConfigError("optim.kind: got muon, but no matrix in a block of a tower trains; expected adamw")
        if discriminators is not None:
            named = nn.ModuleDict({"discriminators": discriminators})
            groups += parameter_groups(named, self.weight_decay, _ratios_of_modules(named))
        optimizer = self._create(groups)
        set_lr(optimizer, self.lr)
        return optimizer

    def _create(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Create an optimizer of the kind over groups of named parameters."""
        if self.kind in _OWN_KINDS:
            fused = all(each.device.type in _FUSED_DEVICES for group in groups for _, each in group["params"])
            betas, eps = self.betas or _OWN_BETAS, self.eps or _OWN_EPS
            return _OWN_KINDS[self.kind](groups, lr=self.lr, betas=betas, eps=eps, fused=fused, foreach=False)
        from timm.optim import create_optimizer_v2, get_optimizer_info

        info, given = get_optimizer_info(self.kind), dict[str, Any]()
        if self.betas is not None:
            if not info.has_betas or info.num_betas != len(self.betas):
                raise ConfigError(f"optim.betas: got {list(self.betas)}, but {self.kind} has no two; expected null")
            given["betas"] = self.betas
        if self.eps is not None:
            if not info.has_eps:
                raise ConfigError(f"optim.eps: got {self.eps:g}, but {self.kind} has none; expected null")
            given["eps"] = self.eps
        try:
            found = create_optimizer_v2(groups, self.kind, self.lr, self.weight_decay, **given)
            state = first_state(found, found.param_groups[0], torch.zeros(8, 8))
        except Exception as error:
            raise ConfigError(f"optim.kind: {self.kind} cannot be used: {type(error).__name__}: {error}") from error
        if odd := [name for name, each in state.items() if not isinstance(each, Tensor | bool | int | float)]:
            raise ConfigError(
                f"optim.kind: {self.kind} keeps {', '.join(odd)} of each weight, which is neither a tensor nor a "
                "number, and a checkpoint cannot store it; expected another kind"
            )
        return found

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


def _kinds_of_timm() -> list[str]:
    """Return timm's names of optimizers that need one gradient a step and no further package."""
    from timm.optim import get_optimizer_info, list_optimizers

    names = map(str, list_optimizers(exclude_filters=["bnb*", "fused*"]))
    return [name for name in names if not get_optimizer_info(name).second_order and name not in _OWN_KINDS]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then the highest rate, which falls to a floor: a function of the step alone, without a state.

    `schedule(step)` is the learning rate of the step after `step` done ones: `lr / warmup_steps` for the first one,
    `lr` for number `warmup_steps`, and `lr * final_lr_ratio` from the end of the run on, unless it is constant.

    Raises:
        ConfigError: the warm-up is not shorter than the run, or than the part of it before the decay of `wsd`.
    """

    config: OptimConfig
    """Rates, warm-up and kind."""
    total_steps: int
    """Steps of the run."""

    @property
    def decay_steps(self) -> int:
        """Steps in which the rate falls."""
        falling = {"cosine": self.total_steps - self.config.warmup_steps, "constant": 0}
        return falling.get(self.config.schedule, max(1, round(self.config.decay_share * self.total_steps)))

    def __post_init__(self) -> None:
        warmup = self.config.warmup_steps
        if warmup >= self.total_steps:
            raise ConfigError(
                f"optim.warmup_steps: got {warmup}; expected fewer than the {self.total_steps} steps of the run"
            )
        if warmup + self.decay_steps > self.total_steps:
            raise ConfigError(
                f"optim.decay_share: got {self.config.decay_share:g}, {self.decay_steps} steps, after {warmup} of "
                f"optim.warmup_steps; expected at most the {self.total_steps} steps of the run together"
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step after `step` done ones."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        if config.schedule == "constant":
            return config.lr
        progress = min(1.0, max(0.0, (step - self.total_steps + self.decay_steps) / self.decay_steps))
        share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
        return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * share)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    lr_ratios: Mapping[str, float] | None = None,
    overrides: Sequence[OverrideConfig] = (),
    matrices: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Group the parameters that require a gradient by weight decay and learning rate, and those of Muon apart.

    No weight decay goes to parameters with fewer than two axes (biases, norms, temperatures), to embeddings, class
    tokens and learned queries, and to the names in a submodule's ``no_weight_decay()`` (timm).

    Args:
        model: each of its trainable parameters is in exactly one group, shared ones once.
        weight_decay: of all other parameters.
        lr_ratios: name of a parameter → factor on its learning rate, 1 by default; stored as ``lr_ratio`` in the group.
        overrides: change both by name.
        matrices: names of those for Muon; if there are any, each group has ``muon``, whether it is for them.

    Returns:
        Groups for a torch optimizer, each with ``params`` as (name, parameter) pairs, ``weight_decay``, ``lr_ratio``.

    Raises:
        ConfigError: an override matches no parameter that it can change.
    """
    undecayed = _without_decay(model)
    decayed = {name for name, parameter in model.named_parameters() if id(parameter) not in undecayed}
    chosen = _match_overrides(model, overrides, decayed)
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        ratio, decay, override = (lr_ratios or {}).get(name, 1.0), weight_decay, chosen.get(name)
        if override is not None:
            ratio *= 1.0 if override.lr_ratio is None else override.lr_ratio
            decay = weight_decay if override.weight_decay is None else override.weight_decay
        decay = decay if name in decayed else 0.0
        group = groups.setdefault(
            (decay, ratio, name in matrices), {"params": [], "weight_decay": decay, "lr_ratio": ratio}
        )
        if matrices:
            group["muon"] = name in matrices
        group["params"].append((name, parameter))
    return list(groups.values())


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the weights for Muon: matrices and convolutions without groups in blocks, not in tables."""
    undecayed, found = _without_decay(model), set[str]()
    for root, network in model.named_modules():
        if isinstance(network, Tower | PixelDecoder):
            for block in block_names(network):
                for place, module in network.get_submodule(block).named_modules(prefix=f"{root}.{block}".strip(".")):
                    if getattr(module, "groups", 1) == 1:
                        named = module.named_parameters(place, recurse=False)
                        found |= {name for name, each in named if id(each) not in undecayed}
    return found


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
        group["lr"] = lr * group.get("lr_ratio", 1.0)


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


def describe_groups(optimizer: Optimizer) -> str:
    """Return what an optimizer of `OptimConfig.build` trains, and how, for the log."""
    described, several = map(_describe, optimizer.param_groups), "\n  " if len(optimizer.param_groups) > 4 else " "
    return f"{type(optimizer).__name__}:{several}" + f";{several}".join(described)


def _describe(group: dict[str, Any]) -> str:
    names: list[str] = group["param_names"]
    size = sum(parameter.numel() for parameter in group["params"])
    common = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    place = f", {common}{'.*' if len(names) > 1 else ''}" if common else ""
    ratio = "" if group["lr_ratio"] == 1 else f", learning rate × {group['lr_ratio']:g}"
    way = "" if group.get("muon", True) else " by AdamW"
    return f"{len(names)} tensors ({size:,} numbers){way} with weight decay {group['weight_decay']:g}{ratio}{place}"
