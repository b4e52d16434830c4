"""No quantization: the continuous baseline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from vqclip.config import Config
from vqclip.config.bounds import MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError
from vqclip.quantizers.base import Quantizer


class Identity(Quantizer):
    """Returns its input, 0 where masked: the baseline without a bottleneck of codes.

    It has no codebook: ids have shape ``(..., 0)`` and cannot be decoded.

    Args:
        dim: D, the width of the vectors, at least 1.

    Raises:
        ConfigError: ``dim`` is less than 1.
    """

    def __init__(self, dim: int):
        if dim < 1:
            raise ConfigError(f"Identity: dim is {dim}, expected at least 1")
        super().__init__(dim=dim, codebook_sizes=())

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        return bounded.detach(), bounded.new_empty((*bounded.shape[:-1], 0)).long()

    def _decode(self, ids: Tensor) -> Tensor:
        raise ShapeError("Identity has no codebook, so ids cannot be decoded; use FSQ or LFQ for discrete tokens")


class IdentityConfig(Config):
    """No quantization: the continuous baseline."""

    kind: Literal["identity"] = "identity"
    dim: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """Width of the vectors."""

    def build(self) -> Identity:
        """Make the quantizer."""
        return Identity(self.dim)
