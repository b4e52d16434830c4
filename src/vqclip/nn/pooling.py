"""From a sequence of decoded code vectors to one joint embedding: position, mixing, attention pooling.

Shapes: B samples, N tokens, D width, E joint embedding width. B may be 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vqclip.nn.attention import Block


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
    """

    def __init__(self, num_tokens: int, width: int, embed_dim: int, heads: int, depth: int):
        super().__init__()
        self.position = nn.Parameter(torch.randn(num_tokens, width) * 0.02)
        self.query = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm_keys = nn.LayerNorm(width)
        self.attention = AttentionPooling(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, embed_dim, bias=False)

    def forward(self, vectors: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(B, N, D)`` with an optional mask ``(B, N)`` (True = real) → ``(B, E)``, each of length 1 (fp32)."""
        x = vectors + self.position[: vectors.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        pooled = self.attention(self.query.flatten(), self.norm_keys(x), mask)
        embedding = self.head(self.norm(pooled))
        return F.normalize(embedding.double() if embedding.dtype == torch.float64 else embedding.float(), dim=-1)
