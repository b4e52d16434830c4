"""Attention and the transformer block around it, for sequences with padding.

Shapes: B samples, N tokens, D width. B may be 0.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention of ``queries`` over ``keys`` with a mask of the keys (Vaswani et al. 2017).

    Args:
        width: D, must be a multiple of ``heads``.
        heads: attention heads.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, M, D)`` over ``(B, N, D)`` with mask ``(B, N)`` bool (True = real) → ``(B, M, D)``."""
        q = self._split(self.query(queries))
        k, v = (self._split(x) for x in self.key_value(keys).chunk(2, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None, :])
        return self.out(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, N, D)`` → ``(B, N, D)``."""
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, mask)
        return x + self.mlp(self.norm_mlp(x))


def heads_divide_width(config: Any) -> Any:
    """Validate a section with ``width`` and ``heads``.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """
    if config.width % config.heads:
        raise ValueError(f"got width {config.width} and heads {config.heads}; expected heads that divide width")
    return config
