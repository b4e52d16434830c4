"""Layers after a tower: attention, projections to and from the quantizer, reduction of tokens, pooling.

Shapes: B samples, N tokens, M tokens after a reduction, D width, E joint embedding width. B may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_WIDTH
from vqclip.errors import ConfigError
from vqclip.nn.dropout import DropoutLinear
from vqclip.nn.shapes import cells_of

Normalization = Literal["none", "layer", "l2", "linf"]
"""Normalisation of the channels of a token; see `normalize_channels`."""


_Probability = Annotated[float, Field(ge=0, lt=1)]


Norm = Callable[[int], nn.Module]
"""Layer that normalises a number of channels, by that number."""


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` that computes in the dtype of its weight, as autocast lets LayerNorm do.

    Args:
        width: number of channels.
    """

    def __init__(self, width: int):
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., width)`` → ``(..., width)``."""
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Multi-head attention of ``queries`` over ``keys`` with a mask of the keys (Vaswani et al. 2017).

    Args:
        width: D, must be a multiple of ``heads``.
        heads: attention heads.
        norm: for the queries and keys of each head (QK normalisation: Henry et al. 2020); None for none.
    """

    def __init__(self, width: int, heads: int, norm: Norm | None = None):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.norm_query, self.norm_key = ((norm or nn.Identity)(self.head_width) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(
        self, queries: Tensor, keys: Tensor, mask: Tensor | None, causal: bool = False, angles: Tensor | None = None
    ) -> Tensor:
        """Attend with ``(B, M, D)`` over ``(B, N, D)``.

        Args:
            queries: ``(B, M, D)``.
            keys: ``(B, N, D)``.
            mask: ``(B, N)`` bool, True = real; None with ``causal``.
            causal: attend to earlier keys, and the one of the query, only.
            angles: ``(N, D / heads / 2)``, of `rotary_angles`, for queries and keys at the same positions.

        Returns:
            ``(B, M, D)``.
        """
        q = self._split(self.query(queries))
        k, v = (self._split(x) for x in self.key_value(keys).chunk(2, dim=-1))
        q, k = self.norm_query(q), self.norm_key(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        visible = None if mask is None else mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, visible, is_causal=causal)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)


def rotary_angles(length: int, width: int, x: Tensor) -> Tensor:
    """Return the angles ``(length, width / 2)`` of rotary positions (RoPE: Su et al. 2021, arXiv 2104.09864).

    Position n turns pair i of the channels by ``n · 10000^(-2i / width)``, in float32, or float64 like ``x``.
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    speeds = 10_000.0 ** (torch.arange(0, width, 2, device=x.device, dtype=exact) / -width)
    return torch.arange(length, device=x.device, dtype=exact)[:, None] * speeds


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pair i, the channels i and d / 2 + i, of ``(B, H, N, d)`` by ``angles`` ``(N, d / 2)``."""
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


class SwiGLU(nn.Module):
    """Gated activation (Shazeer 2020, arXiv 2002.05202): the second half of the channels times SiLU of the first."""

    def forward(self, x: Tensor) -> Tensor:
        """``(..., 2 H)`` → ``(..., H)``."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Block(nn.Module):
    """A pre-norm transformer block.

    Args:
        width: D, must be a multiple of ``heads``.
        heads: attention heads.
        norm: before the attention and before the feed-forward layers.
        qk_norm: also normalise the queries and keys of each head by ``norm``.
        swiglu: feed-forward layers with `SwiGLU`, of 8/3 D channels, instead of GELU, of 4 D: as many weights.
    """

    def __init__(self, width: int, heads: int, norm: Norm = nn.LayerNorm, qk_norm: bool = False, swiglu: bool = False):
        super().__init__()
        self.norm_attention, self.norm_mlp = norm(width), norm(width)
        self.attention = Attention(width, heads, norm if qk_norm else None)
        hidden = 8 * -(-width // 3) if swiglu else 4 * width
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * hidden if swiglu else hidden),
            SwiGLU() if swiglu else nn.GELU(),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool = False, angles: Tensor | None = None) -> Tensor:
        """``(B, N, D)`` → ``(B, N, D)``; see `Attention`."""
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, mask, causal, angles)
        return x + self.mlp(self.norm_mlp(x))


def heads_divide_width(config: Any) -> Any:
    """Validate a section with ``width`` and ``heads``.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """
    if config.width % config.heads:
        raise ValueError(f"got width {config.width} and heads {config.heads}; expected heads that divide width")
    return config


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
    hidden: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = 512
    """Width between the layers."""
    dropout: _Probability = 0.0
    """Probability that a feature between the layers is set to 0 in training; see `vqclip.nn.dropout`."""
    input_dropout: _Probability = 0.0
    """Probability for a feature before the first layer."""

    def layers(self, before: int, after: int) -> list[nn.Module]:
        """From width ``before`` to width ``after``."""
        first, second = (before, self.hidden, self.input_dropout), (self.hidden, after, self.dropout)
        return [DropoutLinear(*first), nn.GELU(), DropoutLinear(*second)]


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
    magnitude about 1, the range that quantizers expect. ``linf``: the largest channel has magnitude 2, which the tanh
    of FSQ maps almost to its outermost level; no channel is pressed flat (ViQ, 2026).
    """
    if how == "none":
        return x
    x = x if x.dtype == torch.float64 else x.float()
    width = x.shape[-1]
    if how == "linf":
        return 2 * x / x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    return F.layer_norm(x, (width,)) if how == "layer" else F.normalize(x, dim=-1) * width**0.5


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
        queries = self.norm_queries(self.queries).expand(x.shape[0], -1, -1)
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
"""Either of the reductions."""


def isometric_(module: nn.Module) -> None:
    """Set the weights of linear layers to orthogonal matrices (per square block if wider) and biases to 0.

    A tower's features pass about six linear layers on the way to the joint embedding. With small random weights such a
    chain learns its strongest direction first and all others much later; with orthogonal weights it learns as fast as
    a single layer (Saxe et al. 2014). Draws from torch's global generator.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            for rows in layer.weight.detach().split(layer.in_features):
                nn.init.orthogonal_(rows)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class AttentionPooling(nn.Module):
    """Multi-head attention of one learned query over the tokens of every sample.

    The query is the same for all samples, so no token is projected to a key or a value: a score ``q · (K x)`` is
    ``(Kᵀ q) · x``, and ``Σ a (V x)`` is ``V Σ a x``. In exact arithmetic this equals `Attention`, with 2 H D operations
    per token instead of 2 D² (DeepSeek-V2, 2024, absorbs its projections in the same way).

    Args:
        width: D, must be a multiple of ``heads``.
        heads: H, attention heads.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)  # the keys' bias has no effect: it adds the same to every score
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with query ``(D,)`` over ``(B, N, D)`` with mask ``(B, N)`` bool (True = real) → ``(B, D)``."""
        q = rearrange(self.query(query), "(h w) -> h 1 w", h=self.heads)
        keys, values = rearrange(self.key_value.weight, "(two h w) d -> two h w d", two=2, h=self.heads)
        probes = (q @ keys).squeeze(1) * q.shape[-1] ** -0.5  # (H, D)
        scores = tokens @ probes.T
        if mask is not None:
            # Not -inf: a sample without tokens must not become NaN.
            scores = scores.masked_fill(~mask.unsqueeze(-1), torch.finfo(scores.dtype).min)
        mixed = scores.softmax(dim=1).transpose(1, 2).to(tokens.dtype) @ tokens  # (B, H, D)
        attended = torch.einsum("bhd,hwd->bhw", mixed, values).flatten(1) + self.key_value.bias.chunk(2)[1]
        return self.out(attended)


class PooledEmbedding(nn.Module):
    """Maps the vectors of a sample to its unit-norm embedding: adds positions, mixes tokens, pools with one query.

    Attention pooling with a learned query follows Set Transformer (Lee et al. 2019) and CoCa (Yu et al. 2022).

    Args:
        num_tokens: largest N.
        width: D.
        embed_dim: E.
        heads: attention heads.
        depth: transformer blocks before the pooling; 0 for none.

    Attributes:
        has_shapes: whether samples are images of any shape (`vqclip.nn.shapes`): positions are then those of a square
            grid over the whole image.
    """

    def __init__(self, num_tokens: int, width: int, embed_dim: int, heads: int, depth: int):
        super().__init__()
        self.has_shapes = False
        self.position = nn.Parameter(torch.randn(num_tokens, width) * 0.02)
        self.query = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm_keys = nn.LayerNorm(width)
        self.attention = AttentionPooling(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, embed_dim, bias=False)

    def forward(self, vectors: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(B, N, D)`` with an optional mask ``(B, N)`` (True = real) → ``(B, E)``, each of length 1 (fp32)."""
        if self.has_shapes:
            assert mask is not None
            x = vectors + F.embedding(cells_of(mask, math.isqrt(len(self.position) - 1)), self.position)
        else:
            x = vectors + self.position[: vectors.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        pooled = self.attention(self.query.flatten(), self.norm_keys(x), mask)
        embedding = self.head(self.norm(pooled))
        return F.normalize(embedding.double() if embedding.dtype == torch.float64 else embedding.float(), dim=-1)
