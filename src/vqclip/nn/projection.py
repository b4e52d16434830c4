"""Projections between tower and quantizer, and between quantizer and pooling.

Shapes: B samples, N tokens, D width.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.nn.attention import Block

Normalization = Literal["none", "layer", "l2"]
"""Normalisation of the channels of a token; see `normalize_channels`."""


class Projection(nn.Sequential):
    """Layers that map tokens to another width. Only layers that mix tokens (attention) get the mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(B, N, D)`` with mask ``(B, N)`` bool (True = real) or None → ``(B, N, D')``."""
        for layer in self:
            x = layer(x, mask) if isinstance(layer, Block) else layer(x)
        return x


class LinearProjectionConfig(Config):
    """One linear layer."""

    kind: Literal["linear"] = "linear"

    def layers(self, before: int, after: int) -> list[nn.Module]:
        """From width ``before`` to width ``after``."""
        return [nn.Linear(before, after)]


class MLPProjectionConfig(Config):
    """Two linear layers with a GELU between them."""

    kind: Literal["mlp"] = "mlp"
    expansion: Annotated[float, Field(gt=0, le=16)] = 2.0
    """Width between the layers, as a multiple of the wider end."""

    def layers(self, before: int, after: int) -> list[nn.Module]:
        """From width ``before`` to width ``after``."""
        hidden = max(1, round(self.expansion * max(before, after)))
        return [nn.Linear(before, hidden), nn.GELU(), nn.Linear(hidden, after)]


class AttentionProjectionConfig(Config):
    """A transformer block at the wider end, which distributes information over tokens, and a linear layer.

    After UniTok's attention projection (Ma et al. 2025, https://arxiv.org/abs/2502.20321).
    """

    kind: Literal["attention"] = "attention"
    heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads; must divide the wider end: the tower's width before the quantizer, `width` after it."""

    def layers(self, before: int, after: int) -> list[nn.Module]:
        """From width ``before`` to width ``after``.

        Raises:
            ConfigError: the heads do not divide the wider end.
        """
        width = max(before, after)
        if width % self.heads:
            raise ConfigError(
                f"projection between widths {before} and {after}: got heads {self.heads}; expected a divisor of {width}"
            )
        block, linear = Block(width, self.heads), nn.Linear(before, after)
        return [block, linear] if before >= after else [linear, block]


ProjectionConfig = Annotated[
    LinearProjectionConfig | MLPProjectionConfig | AttentionProjectionConfig, Field(discriminator="kind")
]
"""A projection's configuration, chosen by ``kind``."""


def normalize_channels(x: Tensor, how: Normalization) -> Tensor:
    """Normalise a token's channels before the quantizer, ``(..., D)``; in float32 or float64.

    ``layer``: mean 0 and variance 1 over the channels. ``l2``: the vector has length √D, so that its channels have
    magnitude about 1, the range that quantizers expect.
    """
    if how == "none":
        return x
    x = x if x.dtype == torch.float64 else x.float()
    width = x.shape[-1]
    return F.layer_norm(x, (width,)) if how == "layer" else F.normalize(x, dim=-1) * width**0.5
