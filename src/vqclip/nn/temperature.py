"""The temperature of the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError

DEFAULT_SCALE = 1 / 0.07
_ROUNDING = 1e-3
"""A checkpoint's scale may exceed the maximum by this fraction: OpenAI's logarithms were rounded to four digits."""


class TemperatureConfig(Config):
    """The learned scale (and, for the sigmoid loss, bias) of the logits."""

    init: Annotated[float, Field(gt=0)] | None = None
    """Initial value of the scale, the inverse temperature; CLIP starts at 1/0.07, SigLIP at 10. null: that of the
    pretrained weights that `model.towers` names, or 1/0.07 without any."""
    max: float = Field(100.0, gt=0)
    """Upper limit of the scale."""
    bias: float | Literal["pretrained"] | None = None
    """Initial value of a learned bias of the logits (SigLIP: -10); null for no bias. The sigmoid loss needs one.
    pretrained: that of the pretrained weights that `model.towers` names."""

    @model_validator(mode="after")
    def _init_below_max(self) -> TemperatureConfig:
        if self.init is not None and self.init > self.max:
            raise ValueError(f"got init {self.init} and max {self.max}; expected init <= max")
        return self

    def start(self, pretrained: Mapping[str, Tensor]) -> StartTemperature:
        """Choose the initial values.

        Args:
            pretrained: tensors of the checkpoint that the towers start from, with its ``logit_scale`` and
                ``logit_bias`` if it has them; empty without a checkpoint.

        Raises:
            ConfigError: the checkpoint's scale is above `max`, or it lacks the bias that is asked for.
        """
        notes, taken = [], []
        scale, log_scale = self.init or DEFAULT_SCALE, math.log(self.init or DEFAULT_SCALE)
        if "logit_scale" in pretrained:
            theirs = pretrained["logit_scale"].item()
            if self.init is not None:
                notes.append(
                    f"model.temperature.init: {self.init:g} as configured; the pretrained weights have "
                    f"{math.exp(theirs):g}"
                )
            else:
                if theirs > math.log(self.max) + _ROUNDING:
                    raise ConfigError(
                        f"model.temperature.max: got {self.max:g}, below the scale {math.exp(theirs):g} of the weights "
                        f"that model.towers names; expected at least {math.ceil(math.exp(theirs))}, or an own "
                        "model.temperature.init"
                    )
                log_scale = min(theirs, math.log(self.max))
                scale = min(math.exp(log_scale), self.max)
                taken.append("logit_scale")
                notes.append(f"model.temperature.init: {scale:g}, from the pretrained weights")
        bias, their_bias = self.bias, pretrained["logit_bias"].item() if "logit_bias" in pretrained else None
        if bias == "pretrained":
            if their_bias is None:
                raise ConfigError(
                    "model.temperature.bias: got 'pretrained', but the weights that model.towers names "
                    "have no bias; expected a number (SigLIP starts at -10), or null with the contrastive loss"
                )
            bias = their_bias
            taken.append("logit_bias")
        elif their_bias is not None:
            used = "no bias" if bias is None else f"{bias:g}"
            notes.append(f"model.temperature.bias: {used} as configured; the pretrained weights have {their_bias:g}")
        resolved = self.model_copy(update={"init": scale, "bias": bias})
        return StartTemperature(resolved, log_scale, tuple(taken), tuple(notes))


class StartTemperature(NamedTuple):
    """Initial temperature of a model."""

    config: TemperatureConfig
    """The configuration with these values as numbers."""
    log_scale: float
    """Natural logarithm of the scale."""
    taken: tuple[str, ...]
    """Names of the values from the checkpoint: ``logit_scale``, ``logit_bias``."""
    notes: tuple[str, ...]
    """Remarks for the log."""
