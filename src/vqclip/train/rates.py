"""Learning rate and weight decay of single parameters: by depth in a tower, and by name.

    learning rate = schedule · image_lr_ratio or text_lr_ratio · layer_decay^(L - l) · lr_ratio of the override

The layers of a tower are l = 0 (before the blocks), 1 to L - 1 (its blocks) and L (after them): `vqclip.towers.blocks`.
So the last block has one factor of the decay, the layer before the blocks has L, and everything from the tower's output
to the embedding has none. This is the convention of BEiT (Bao et al. 2021, https://arxiv.org/abs/2106.08254) and MAE.
timm's is the same, but it counts the norm after the blocks to the last block.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, model_validator
from torch import nn

from vqclip.config import Config
from vqclip.config.messages import did_you_mean
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names
from vqclip.towers.blocks import layers

_SHOWN = 3

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


def layer_factors(model: nn.Module, decay: float | LayerDecayConfig) -> dict[str, float]:
    """Return the factor of layer-wise decay for each parameter of the towers, by its name in ``model``.

    Args:
        model: with towers ``image.tower`` and ``text.tower``.
        decay: of both towers, or of each.

    Raises:
        ConfigError: there is no tower that trains and has a decay.
    """
    chosen = {name: decay if isinstance(decay, float) else getattr(decay, name) for name in ("image", "text")}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    factors: dict[str, float] = {}
    for modality, value in chosen.items():
        if value is None:
            continue
        prefix = f"{modality}.tower."
        if any(name.startswith(prefix) for name in trained):
            factors |= _tower_factors(model.get_submodule(prefix[:-1]), value, prefix)
        elif not isinstance(decay, float):
            raise ConfigError(f"optim.layer_decay.{modality}: got {value:g}, but no parameter of that tower trains")
    if not factors:
        raise ConfigError("optim.layer_decay: got a decay, but no parameter of a tower trains; expected null")
    return factors


def _tower_factors(tower: nn.Module, decay: float, prefix: str) -> dict[str, float]:
    grouped = layers(tower)
    last = len(grouped) - 1
    return {f"{prefix}{name}": decay ** (last - number) for number, names in enumerate(grouped) for name in names}


def match_overrides(model: nn.Module, overrides: Sequence[OverrideConfig]) -> dict[str, OverrideConfig]:
    """Return the first override whose pattern matches, for each parameter that has one, by its name in ``model``.

    Raises:
        ConfigError: a pattern matches no parameter that trains, now or from a later step on, or only parameters that
            an earlier pattern matches too.
    """
    parameters = dict(model.named_parameters())
    found: dict[str, OverrideConfig] = {}
    for number, override in enumerate(overrides):
        matching = [name for name in parameters if fnmatch.fnmatchcase(name, override.pattern)]
        trained = [name for name in matching if parameters[name].requires_grad]
        new = [name for name in trained if name not in found]
        if not new:
            problem = _describe_mismatch(override.pattern, list(parameters), matching, trained)
            raise ConfigError(f"optim.overrides[{number}].pattern: got {override.pattern!r}, which matches {problem}")
        found |= dict.fromkeys(new, override)
    return found


def _describe_mismatch(pattern: str, names: Sequence[str], matching: Sequence[str], trained: Sequence[str]) -> str:
    if trained:
        earlier = first_names(trained, _SHOWN)
        return f"only parameters of an earlier override ({earlier}); the first match counts: reorder them"
    if matching:
        return f"only frozen parameters ({first_names(matching, _SHOWN)}); expected parameters that train"
    sections = dict.fromkeys(f"{name[:end]}.*" for name in names for end, each in enumerate(name) if each == ".")
    close = difflib.get_close_matches(pattern, [*sections, *names], n=_SHOWN)
    return f"no parameter; expected names such as {first_names(names, _SHOWN)}{did_you_mean(close)}"


def require_decayed(overrides: Sequence[OverrideConfig], decays: Mapping[str, OverrideConfig]) -> None:
    """Check that each override with a weight decay has a parameter with weight decay.

    Args:
        overrides: all of them.
        decays: name of a parameter with weight decay → its override.

    Raises:
        ConfigError: an override sets a weight decay for biases, norms or embeddings alone.
    """
    used = {id(override) for override in decays.values()}
    for number, override in enumerate(overrides):
        if override.weight_decay and id(override) not in used:
            raise ConfigError(
                f"optim.overrides[{number}].weight_decay: got {override.weight_decay:g} for {override.pattern!r}, "
                "which matches only parameters without weight decay (biases, norms, embeddings, scalars); expected null"
            )
