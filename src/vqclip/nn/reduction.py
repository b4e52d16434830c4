"""Reductions of the tokens of a sample, between the tower and the projection before the quantizer.

Shapes: B samples, N tokens of the tower, M tokens after the reduction, D width.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.nn.attention import Attention


class MeanReduction(nn.Module):
    """Mean over the real tokens of a sample: one token."""

    num_tokens = 1

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, N, D)`` with mask ``(B, N)`` bool (True = real) or None → ``(B, 1, D)``; 0 without tokens."""
        if mask is None:
            return x.mean(dim=1, keepdim=True)
        weights = mask.unsqueeze(-1).to(x.dtype)
        real = torch.where(mask.unsqueeze(-1), x, 0)  # features of padding are undefined
        return real.sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)


class QueryReduction(nn.Module):
    """Attention of M learned queries over the tokens of a sample, beside their mean.

    As in Perceiver Resampler (Alayrac et al. 2022) and the 1D tokenizer TiTok (Yu et al. 2024), in one layer.

    Args:
        width: D, a multiple of ``heads``.
        count: M, number of queries.
        heads: attention heads.
    """

    def __init__(self, width: int, count: int, heads: int):
        super().__init__()
        self.num_tokens = count
        self.queries = nn.Parameter(torch.randn(count, width) * width**-0.5)
        self.norm_queries, self.norm_keys = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mean = MeanReduction()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, N, D)`` with mask ``(B, N)`` bool (True = real) or None → ``(B, M, D)``."""
        if mask is not None:
            x = torch.where(mask.unsqueeze(-1), x, 0)
            mask = mask | ~mask.any(dim=1, keepdim=True)  # attention over nothing would be NaN
        queries = self.norm_queries(self.queries).expand(len(x), -1, -1)
        return self.mean(x, mask) + self.attention(queries, self.norm_keys(x), mask)


class MeanReductionConfig(Config):
    """One token: the mean of the tower's tokens, as sentence encoders and most image classifiers pool."""

    kind: Literal["mean"] = "mean"

    def build(self, width: int) -> MeanReduction:
        """Make the module for features of ``width``."""
        return MeanReduction()


class QueryReductionConfig(Config):
    """A number of tokens, each made by a learned query over all tokens of the tower."""

    kind: Literal["queries"] = "queries"
    count: int = Field(4, ge=1, le=4096)
    """M, tokens a sample after the reduction."""
    heads: int = Field(4, ge=1)
    """Attention heads; must divide the tower's width."""

    def build(self, width: int) -> QueryReduction:
        """Make the module for features of ``width``.

        Raises:
            ConfigError: the heads do not divide the width.
        """
        if width % self.heads:
            raise ConfigError(f"reduce.heads: got {self.heads}; expected a divisor of the tower's width {width}")
        return QueryReduction(width, self.count, self.heads)


ReductionConfig = Annotated[MeanReductionConfig | QueryReductionConfig, Field(discriminator="kind")]
"""A reduction's configuration, chosen by ``kind``."""
Reduction = MeanReduction | QueryReduction
