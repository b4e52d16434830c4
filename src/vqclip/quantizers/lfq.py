"""Lookup-free quantization: the signs of the channels are the code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from einops import rearrange, reduce
from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer, ids_from_digits, straight_through
from vqclip.quantizers.entropy import bit_entropy, code_mass, entropy
from vqclip.quantizers.stats import Stats
from vqclip.quantizers.usage import MAX_COUNTED_CODES

MAX_BITS = 63


class LFQ(Quantizer):
    """Lookup-Free Quantization (MAGVIT-v2: Yu et al. 2023, https://arxiv.org/abs/2310.05737).

    Every channel becomes 1 (where positive) or -1, so the codes are the corners of a cube; channel 0 is the most
    significant bit of the id, as in vector-quantize-pytorch. Three losses keep the codebook alive, each at least 0:

    - ``token_entropy``: mean entropy (nats) of each token's soft assignment, a softmax of
      ``2 <x, code> / entropy_temperature`` over all codes. Small: tokens are sure of their code.
    - ``codebook_entropy_gap``: log K minus the entropy of the mean assignment over the tokens of all ranks. Small: all
      codes are used. The paper's entropy loss is the sum of the two, less log K.
    - ``commitment``: mean squared distance of the channels from their sign.

    Both entropies are exact (`vqclip.quantizers.entropy`). The second needs one number per code, so above
    ``MAX_COUNTED_CODES`` (2^20) codes there is no such loss and no usage metric; use `Product` of smaller ones there.

    Args:
        bits: number of channels, 1 to 63.
        entropy_temperature: of the soft assignment, > 0. The published 0.01 suits channels within about ±0.02 of their
            threshold; a higher one lets the entropy losses act on tokens further away from it.
        loss_weights: of the three losses, in the training loss; one that is left out weighs 0. Without any: 0.1, 0.1
            and 0.25, less ``codebook_entropy_gap`` where there is none.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist (at this size).
    """

    def __init__(self, bits: int, entropy_temperature: float = 0.01, loss_weights: Mapping[str, float] | None = None):
        if not 1 <= bits <= MAX_BITS:
            raise ConfigError(f"LFQ: bits is {bits}, expected 1 to {MAX_BITS}: ids are int64; use Product beyond")
        if not 0 < entropy_temperature < math.inf:
            raise ConfigError(f"LFQ: entropy_temperature is {entropy_temperature}, expected a number > 0")
        super().__init__(dim=bits, codebook_sizes=(2**bits,), loss_weights=_checked_weights(bits, loss_weights))
        self.entropy_temperature = entropy_temperature

    def losses(self, stats: Stats) -> dict[str, Tensor]:
        """``token_entropy``, ``codebook_entropy_gap`` and ``commitment``, over all ranks' tokens; 0 without tokens."""
        stats = stats.synced()
        count = stats["tokens"].clamp(min=1)
        losses = {"token_entropy": (stats["token_entropy"].double() / count).mean()}
        if "code_mass" in stats:
            mean = stats["code_mass"].double() / count
            gap = math.log(mean.shape[-1]) - entropy(mean)
            # A gap of 0 may come out a rounding error below it, and that of no tokens at all is no gap.
            losses["codebook_entropy_gap"] = torch.where(stats["tokens"] > 0, gap, 0.0).clamp(min=0).mean()
        losses["commitment"] = (stats["commitment"].double() / count).mean()
        return losses

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positive = x > 0
        vectors = straight_through(_signs(positive, x.dtype), x)
        ids = ids_from_digits(positive.flip(-1), [2] * self.dim)
        return vectors, ids.unsqueeze(-1)

    def _decode(self, ids: Tensor) -> Tensor:
        shifts = torch.arange(self.dim - 1, -1, -1, device=ids.device)
        return _signs((ids >> shifts) & 1 == 1, torch.float32).masked_fill(ids < 0, 0)

    def _statistics(self, x: Tensor, vectors: Tensor, ids: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
        # <x, code> differs by 2x between a bit's two values, and the assignment has another factor of 2.
        logits = x * (4 / self.entropy_temperature)
        uncertainty = reduce(bit_entropy(logits), "t g d -> t g", "sum")
        error = reduce((x - vectors.detach()).square(), "t g d -> t g", "mean")
        if keep is not None:  # a masked token has x = 0: no error, but every bit undecided
            uncertainty = uncertainty * rearrange(keep, "t -> t 1")
        sums = super()._statistics(x, vectors, ids, keep)
        sums.update(token_entropy=uncertainty.sum(dim=0), commitment=error.sum(dim=0))
        if self.codebook_sizes[0] <= MAX_COUNTED_CODES:
            sums["code_mass"] = code_mass(logits, keep)
        return sums


class LFQLossWeights(Config):
    """Weights of LFQ's losses in the training loss."""

    token_entropy: Annotated[float, Field(ge=0)] = 0.1
    """Of the mean entropy of a token's soft assignment: higher makes tokens surer of their code."""
    codebook_entropy_gap: Annotated[float, Field(ge=0)] = 0.1
    """Of log K less the entropy of the mean assignment: higher spreads tokens over more codes."""
    commitment: Annotated[float, Field(ge=0)] = 0.25
    """Of the mean squared distance to the codes: higher keeps the channels near ±1."""


class LFQConfig(Config):
    """Lookup-free quantization: one codebook of 2^bits codes, the signs of the channels."""

    kind: Literal["lfq"] = "lfq"
    bits: Annotated[int, Field(ge=1, le=MAX_BITS)] = 10
    """Number of channels; the codebook has 2^bits codes."""
    entropy_temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the soft assignment in the entropy losses; higher reaches tokens further from the threshold."""
    loss_weights: LFQLossWeights = LFQLossWeights()
    """Weights of the three losses; codebook_entropy_gap must be 0 above 20 bits."""

    @model_validator(mode="after")
    def _losses_exist(self) -> LFQConfig:
        _checked_weights(self.bits, self.loss_weights.model_dump())
        return self

    def build(self) -> LFQ:
        """Make the quantizer."""
        return LFQ(self.bits, self.entropy_temperature, self.loss_weights.model_dump())


def _signs(positive: Tensor, dtype: torch.dtype) -> Tensor:
    return positive.to(dtype) * 2 - 1


def _checked_weights(bits: int, weights: Mapping[str, float] | None) -> dict[str, float]:
    """Weight of every loss that exists at this size: 0 where only others are given, the defaults where none are."""
    defaults = LFQLossWeights().model_dump()
    if unknown := set(weights or {}) - set(defaults):
        raise ConfigError(f"LFQ: no loss is named {sorted(unknown)}, expected some of {sorted(defaults)}")
    checked = defaults if weights is None else dict.fromkeys(defaults, 0.0) | dict(weights)
    if 2**bits > MAX_COUNTED_CODES and checked.pop("codebook_entropy_gap", 0) > 0 and weights is not None:
        raise ConfigError(
            f"LFQ: codebook_entropy_gap needs a number per code, kept up to {MAX_COUNTED_CODES} codes, not 2^{bits}; "
            "set loss_weights.codebook_entropy_gap to 0, or use Product of several smaller LFQ"
        )
    return checked
