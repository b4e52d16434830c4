"""SimVQ: a frozen codebook behind a learned linear map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_WIDTH
from vqclip.errors import ConfigError
from vqclip.nn.precision import full_precision
from vqclip.quantizers.checks import resolve_weights
from vqclip.quantizers.nearest import GradientPath, TableQuantizer, whole
from vqclip.quantizers.usage import MAX_COUNTED_CODES


class SimVQ(TableQuantizer):
    """Vector quantization with a learned linear layer over a frozen table (Zhu et al. 2024, arXiv 2411.02038).

    The layer moves all codes, also unused ones. Losses: ``commitment`` and ``codebook``, see `TableQuantizer`.

    Args:
        dim: D, at least 1.
        codebook_size: K, at least 2.
        gradient: ``rotation`` or ``straight_through``.
        loss_weights: weights of ``commitment`` and ``codebook``; 0.25 and 1 by default; only the first may be 0.
        groups: G, the number of codebooks; more than 1 in a `Product`.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist.
    """

    codebook: Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        gradient: GradientPath = "rotation",
        loss_weights: Mapping[str, float] | None = None,
        groups: int = 1,
    ):
        given = loss_weights if loss_weights is None else {"codebook": 1.0, **loss_weights}
        weights = resolve_weights("SimVQ", SimVQLossWeights().model_dump(), given)
        if not weights["codebook"] > 0:
            raise ConfigError("SimVQ: loss_weights.codebook is 0, expected more: only that loss moves the codes")
        super().__init__(dim, codebook_size, groups, gradient, weights)
        self.register_buffer("codebook", torch.randn(groups, codebook_size, dim, dtype=torch.float32) * dim**-0.5)
        self.transform = nn.Parameter(torch.eye(dim, dtype=torch.float32).repeat(groups, 1, 1))

    def spawn(self, groups: int = 1) -> SimVQ:
        """See `Quantizer.spawn`."""
        size = self.codebook_sizes[0]
        return SimVQ(self.dim, size, self.gradient, self.loss_weights, groups)

    def codes(self) -> Tensor:
        """Return the codes ``(G, K, D)``, with gradient for the layer."""
        with full_precision(self.codebook.device):
            return self.codebook @ whole(self.transform)


class SimVQLossWeights(Config):
    """Weights of SimVQ's losses in the training loss."""

    commitment: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the mean squared distance that moves vectors to their codes."""
    codebook: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the same distance, moving codes to their vectors."""


class SimVQConfig(Config):
    """Vector quantization with a frozen table of codes behind a learned linear layer."""

    kind: Literal["simvq"] = "simvq"
    dim: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """Width of the vectors."""
    codebook_size: Annotated[int, Field(ge=2, le=MAX_COUNTED_CODES)] = 1024
    """Number of codes."""
    gradient: GradientPath = "rotation"
    """Gradient from codes to vectors: straight_through, or rotation (the rotation trick)."""
    loss_weights: SimVQLossWeights = SimVQLossWeights()
    """Weights of the two losses."""

    def build(self) -> SimVQ:
        """Make the quantizer; torch's global generator draws its table."""
        return SimVQ(self.dim, self.codebook_size, self.gradient, self.loss_weights.model_dump())
