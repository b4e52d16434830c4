"""Lookup-free quantization: the signs of the channels are the code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vqclip.config import Config
from vqclip.quantizers.binary import MAX_BITS, BinaryLossWeights, BinaryQuantizer, binary_weights


class LFQ(BinaryQuantizer):
    """Lookup-Free Quantization (MAGVIT-v2: Yu et al. 2023, https://arxiv.org/abs/2310.05737).

    Every channel becomes 1 (where positive) or -1. Ids are those of vector-quantize-pytorch; losses: `BinaryQuantizer`.

    Args:
        bits: number of channels, 1 to 63.
        entropy_temperature: of the soft assignment in the entropy losses, > 0. The published 0.01 suits channels
            within about ±0.02 of their threshold; a higher one lets the losses act on tokens further away from it.
        loss_weights: of ``token_entropy``, ``codebook_entropy_gap`` and ``commitment``, as in `BinaryQuantizer`.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist (at this size).
    """

    def __init__(self, bits: int, entropy_temperature: float = 0.01, loss_weights: Mapping[str, float] | None = None):
        super().__init__(bits, 1.0, entropy_temperature, loss_weights)


class LFQConfig(Config):
    """Lookup-free quantization: one codebook of 2^bits codes, the signs of the channels."""

    kind: Literal["lfq"] = "lfq"
    bits: Annotated[int, Field(ge=1, le=MAX_BITS)] = 10
    """Number of channels; the codebook has 2^bits codes."""
    entropy_temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the soft assignment in the entropy losses; higher reaches tokens further from the threshold."""
    loss_weights: BinaryLossWeights = BinaryLossWeights()
    """Weights of the three losses; codebook_entropy_gap must be 0 above 20 bits."""

    @model_validator(mode="after")
    def _losses_exist(self) -> LFQConfig:
        binary_weights("LFQ", self.bits, self.loss_weights.model_dump())
        return self

    def build(self) -> LFQ:
        """Make the quantizer."""
        return LFQ(self.bits, self.entropy_temperature, self.loss_weights.model_dump())
