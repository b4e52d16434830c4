"""The temperature of the logits."""

from __future__ import annotations

from pydantic import Field, model_validator

from vqclip.config import Config


class TemperatureConfig(Config):
    """The learned scale (and, for the sigmoid loss, bias) of the logits."""

    init: float = Field(1 / 0.07, gt=0)
    """Initial value of the scale, the inverse temperature; CLIP starts at 1/0.07, SigLIP at 10."""
    max: float = Field(100.0, gt=0)
    """Upper limit of the scale."""
    bias: float | None = None
    """Initial value of a learned bias of the logits (SigLIP: -10); null for no bias. The sigmoid loss needs one."""

    @model_validator(mode="after")
    def _init_below_max(self) -> TemperatureConfig:
        if self.init > self.max:
            raise ValueError(f"got init {self.init} and max {self.max}; expected init <= max")
        return self
