"""Quantizers whose codes are the signs of the channels, LFQ and BSQ; entropy losses keep their codes in use."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import torch
from einops import reduce
from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer, resolve_weights
from vqclip.quantizers.entropy import bit_entropy, code_mass, entropy_gap
from vqclip.quantizers.stats import Stats
from vqclip.quantizers.vectors import MAX_COUNTED_CODES, check_channels, ids_from_digits, squared_error, unit

MAX_BITS = 63
Bound = Literal["none", "tanh"]
"""Function that LFQ applies to channels before rounding."""


class BinaryQuantizer(Quantizer):
    """Codes at the corners of a cube: ``radius`` where a channel is positive, ``-radius`` elsewhere.

    Channel 0 is the most significant bit of the id. Three losses, each at least 0:

    - ``token_entropy``: mean entropy (nats) of each token's soft assignment, a softmax of
      ``2 <x, code> / entropy_temperature`` over all codes. Small: assignments are confident.
    - ``codebook_entropy_gap``: log K minus the entropy of the mean assignment over the tokens of all ranks. Small: all
      codes are used. The published entropy loss is the sum of the two minus log K.
    - ``commitment``: mean squared distance of the channels from their code.

    Both entropies are exact (`vqclip.quantizers.entropy`). The second needs one number per code, so codebooks with more
    than ``MAX_COUNTED_CODES`` (2^20) codes have neither this loss nor usage metrics; use a `Product` of smaller ones.

    Args:
        bits: number of channels, 1 to 63.
        radius: absolute value of every channel of a code, > 0.
        entropy_temperature: temperature of the soft assignment, > 0.
        loss_weights: weights of the three losses in the training loss, by default 0.1, 0.1 and 0.25; with more codes
            there is no ``codebook_entropy_gap``.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist (at this size).
    """

    def __init__(self, bits: int, radius: float, entropy_temperature: float, loss_weights: Mapping[str, float] | None):
        name = type(self).__name__
        if not 1 <= bits <= MAX_BITS:
            raise ConfigError(f"{name}: bits is {bits}, expected 1 to {MAX_BITS}: ids are int64; use Product beyond")
        if not 0 < entropy_temperature < math.inf:
            raise ConfigError(f"{name}: entropy_temperature is {entropy_temperature}, expected a number > 0")
        weights = resolve_weights(name, BinaryLossWeights().model_dump(), loss_weights)
        if 2**bits > MAX_COUNTED_CODES:
            del weights["codebook_entropy_gap"]
            if loss_weights is not None and loss_weights.get("codebook_entropy_gap", 0) > 0:
                raise ConfigError(
                    f"{name}: codebook_entropy_gap needs a number per code, kept up to {MAX_COUNTED_CODES} codes, not "
                    f"2^{bits}; set loss_weights.codebook_entropy_gap to 0, or use Product of several smaller {name}"
                )
        super().__init__(bits, (2**bits,), weights)
        self.radius = radius
        self.entropy_temperature = entropy_temperature

    @property
    def refinement(self) -> float:
        """Each residual stage halves the quantization step."""
        return 2.0

    def _losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return the losses of the class; 0 without tokens."""
        count = stats["tokens"].clamp(min=1)
        losses = {"token_entropy": (stats["token_entropy"].double() / count).mean()}
        if "code_mass" in stats:
            losses["codebook_entropy_gap"] = entropy_gap(stats["code_mass"], stats["tokens"]).mean()
        losses["commitment"] = (stats["commitment"].double() / count).mean()
        return losses

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        positive = bounded > 0
        ids = ids_from_digits(positive.flip(-1), [2] * self.dim)
        return self._signs(positive), ids.unsqueeze(-1)

    def _decode(self, ids: Tensor) -> Tensor:
        shifts = torch.arange(self.dim - 1, -1, -1, device=ids.device)
        return self._signs((ids >> shifts) & 1 == 1).masked_fill(ids < 0, 0)

    def _signs(self, positive: Tensor) -> Tensor:
        """Return the values of bits in float32."""
        return (positive.float() * 2 - 1) * self.radius

    def _statistics(self, bounded: Tensor, values: Tensor, ids: Tensor, keep: Tensor | None) -> Stats:
        # <x, code> differs by 2 radius x between the two values of a bit, and the softmax contains another factor 2.
        logits = bounded * (4 * self.radius / self.entropy_temperature)
        uncertainty = reduce(bit_entropy(logits), "t g d -> t g", "sum")
        if keep is not None:
            uncertainty = uncertainty.masked_fill(~keep[:, None], 0)
        counts = super()._statistics(bounded, values, ids, keep)
        error = squared_error(bounded, values, keep)
        sums = counts.sums | {"token_entropy": uncertainty.sum(dim=0), "commitment": error}
        if self.codebook_sizes[0] <= MAX_COUNTED_CODES:
            sums["code_mass"] = code_mass(logits, keep)
        return Stats(sums, histograms=counts.histograms)


class BinaryLossWeights(Config):
    """Weights of the losses of LFQ and BSQ in the training loss."""

    token_entropy: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the mean entropy of a token's soft assignment: higher makes assignments more confident."""
    codebook_entropy_gap: Annotated[float, Field(ge=0)] = 0.1
    """Weight of log K minus the entropy of the mean assignment: higher spreads tokens over more codes."""
    commitment: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the mean squared distance to the codes: higher keeps the channels closer to them."""


class BinaryConfig(Config):
    """Settings that LFQ and BSQ share."""

    kind: str
    bits: Annotated[int, Field(ge=1, le=MAX_BITS)] = 10
    """Number of channels; the codebook has 2^bits codes."""
    entropy_temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the soft assignment in the entropy losses; higher reaches tokens further from the threshold. The
    published 0.01 (BSQ: τ = 100) affects channels within about ±0.02 of it."""
    loss_weights: BinaryLossWeights = BinaryLossWeights()
    """Weights of the three losses; codebook_entropy_gap must be 0 above 20 bits."""

    @model_validator(mode="after")
    def _losses_exist(self) -> BinaryConfig:
        self.build()
        return self

    @abstractmethod
    def build(self) -> BinaryQuantizer:
        """Make the quantizer."""


class LFQ(BinaryQuantizer):
    """Lookup-Free Quantization (MAGVIT-v2: Yu et al. 2023, https://arxiv.org/abs/2310.05737).

    Every channel becomes ``scale`` (if positive) or ``-scale``. Ids equal those of vector-quantize-pytorch. Losses: see
    `BinaryQuantizer`; other arguments: see `LFQConfig`.

    Args:
        loss_weights: see `BinaryQuantizer`.

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


class LFQConfig(BinaryConfig):
    """Lookup-free quantization: one codebook of 2^bits codes, the signs of the channels."""

    kind: Literal["lfq"] = "lfq"
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Absolute value of every channel of a code."""
    bound: Bound = "none"
    """tanh: apply scale · tanh to channels first, so that they are at most ``scale`` from their code and the gradient
    vanishes far from the threshold."""

    def build(self) -> LFQ:
        """Make the quantizer."""
        return LFQ(self.bits, self.entropy_temperature, self.loss_weights.model_dump(), self.scale, self.bound)


class BSQ(BinaryQuantizer):
    """Binary Spherical Quantization (Zhao et al. 2024, https://arxiv.org/abs/2406.07548).

    The vector is scaled to unit length and every channel becomes ``±1 / √bits``. Codes have unit length too, so the
    commitment loss is bounded. Losses: see `BinaryQuantizer`. The paper approximates the codebook entropy with
    independent bits; here it is exact. Other arguments: see `BSQConfig`.

    Args:
        loss_weights: see `BinaryQuantizer`.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist (at this size).
    """

    def __init__(self, bits: int, entropy_temperature: float = 0.01, loss_weights: Mapping[str, float] | None = None):
        check_channels("BSQ", bits)
        super().__init__(bits, bits**-0.5, entropy_temperature, loss_weights)

    def _bound(self, x: Tensor) -> Tensor:
        return unit(x)


class BSQConfig(BinaryConfig):
    """Binary spherical quantization: one codebook of 2^bits codes, the signs of a unit vector."""

    kind: Literal["bsq"] = "bsq"
    bits: Annotated[int, Field(ge=2, le=MAX_BITS)] = 10
    """Number of channels; the codebook has 2^bits codes."""

    def build(self) -> BSQ:
        """Make the quantizer."""
        return BSQ(self.bits, self.entropy_temperature, self.loss_weights.model_dump())
