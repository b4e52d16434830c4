"""Lookup-free quantization: the signs of the channels are the code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.quantizers.binary import MAX_BITS, BinaryLossWeights, BinaryQuantizer, binary_weights

Bound = Literal["none", "tanh"]
"""Function applied to channels before rounding."""


class LFQ(BinaryQuantizer):
    """Lookup-Free Quantization (MAGVIT-v2: Yu et al. 2023, https://arxiv.org/abs/2310.05737).

    Every channel becomes ``scale`` (if positive) or ``-scale``. Ids equal those of vector-quantize-pytorch. Losses: see
    `BinaryQuantizer`.

    Args:
        bits: number of channels, 1 to 63.
        entropy_temperature: temperature of the soft assignment in the entropy losses, > 0. The published 0.01 affects
            channels within about ±0.02 of the threshold; a higher one affects tokens further away.
        loss_weights: weights of ``token_entropy``, ``codebook_entropy_gap`` and ``commitment``; see `BinaryQuantizer`.
        scale: absolute value of every channel of a code, > 0.
        bound: ``tanh``: channels are ``scale · tanh(x)`` before rounding, at most ``scale`` from their code, so that
            the straight-through gradient vanishes far from the threshold; ``none``: unchanged.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist (at this size).
    """

    def __init__(
        self,
        bits: int,
        entropy_temperature: float = 0.01,
        loss_weights: Mapping[str, float] | None = None,
        scale: float = 1.0,
        bound: Bound = "none",
    ):
        if not 0 < scale < math.inf:
            raise ConfigError(f"LFQ: scale is {scale}, expected a number > 0")
        if bound not in get_args(Bound):
            raise ConfigError(f"LFQ: bound is {bound!r}, expected one of {', '.join(get_args(Bound))}")
        super().__init__(bits, scale, entropy_temperature, loss_weights)
        self.bound = bound

    def _bound(self, x: Tensor) -> Tensor:
        return self.radius * x.tanh() if self.bound == "tanh" else x


class LFQConfig(Config):
    """Lookup-free quantization: one codebook of 2^bits codes, the signs of the channels."""

    kind: Literal["lfq"] = "lfq"
    bits: Annotated[int, Field(ge=1, le=MAX_BITS)] = 10
    """Number of channels; the codebook has 2^bits codes."""
    entropy_temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the soft assignment in the entropy losses; higher reaches tokens further from the threshold."""
    loss_weights: BinaryLossWeights = BinaryLossWeights()
    """Weights of the three losses; codebook_entropy_gap must be 0 above 20 bits."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Absolute value of every channel of a code."""
    bound: Bound = "none"
    """tanh: apply scale · tanh to channels first, so that the gradient vanishes far from the threshold."""

    @model_validator(mode="after")
    def _losses_exist(self) -> LFQConfig:
        binary_weights("LFQ", self.bits, self.loss_weights.model_dump())
        return self

    def build(self) -> LFQ:
        """Make the quantizer."""
        return LFQ(self.bits, self.entropy_temperature, self.loss_weights.model_dump(), self.scale, self.bound)
