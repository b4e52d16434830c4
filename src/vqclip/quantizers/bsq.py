"""Binary spherical quantization: the signs of a unit vector's channels are the code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.quantizers.binary import MAX_BITS, BinaryLossWeights, BinaryQuantizer, binary_weights
from vqclip.quantizers.checks import check_channels
from vqclip.quantizers.vectors import unit


class BSQ(BinaryQuantizer):
    """Binary Spherical Quantization (Zhao et al. 2024, https://arxiv.org/abs/2406.07548).

    The vector is scaled to unit length and every channel becomes ``±1 / √bits``. Codes have unit length too, so the
    commitment loss is bounded. Losses: see `BinaryQuantizer`. The paper approximates the codebook entropy with
    independent bits; here it is exact.

    Args:
        bits: number of channels, 2 to 63.
        entropy_temperature: temperature of the soft assignment in the entropy losses, > 0; the paper's inverse
            temperature τ = 100 is 0.01.
        loss_weights: weights of ``token_entropy``, ``codebook_entropy_gap`` and ``commitment``; see `BinaryQuantizer`.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist (at this size).
    """

    def __init__(self, bits: int, entropy_temperature: float = 0.01, loss_weights: Mapping[str, float] | None = None):
        check_channels("BSQ", bits)
        super().__init__(bits, bits**-0.5, entropy_temperature, loss_weights)

    def _bound(self, x: Tensor) -> Tensor:
        return unit(x)


class BSQConfig(Config):
    """Binary spherical quantization: one codebook of 2^bits codes, the signs of a unit vector."""

    kind: Literal["bsq"] = "bsq"
    bits: Annotated[int, Field(ge=2, le=MAX_BITS)] = 10
    """Number of channels; the codebook has 2^bits codes."""
    entropy_temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the soft assignment in the entropy losses; higher reaches tokens further from the threshold."""
    loss_weights: BinaryLossWeights = BinaryLossWeights()
    """Weights of the three losses; codebook_entropy_gap must be 0 above 20 bits."""

    @model_validator(mode="after")
    def _losses_exist(self) -> BSQConfig:
        binary_weights("BSQ", self.bits, self.loss_weights.model_dump())
        return self

    def build(self) -> BSQ:
        """Make the quantizer."""
        return BSQ(self.bits, self.entropy_temperature, self.loss_weights.model_dump())
