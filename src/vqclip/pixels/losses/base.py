"""Terms of the loss on pixels: what each of them is, and the common keys of their configurations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config

__all__ = ["PixelTerm", "PixelTermConfig"]


class PixelTerm(nn.Module, ABC):
    """Distance between made and real images: one number an image, so that sums over images add up.

    Attributes:
        digest: of the weights of its frozen network; None without one.
    """

    digest: str | None = None

    @abstractmethod
    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        """Return the distance ``(B,)`` of each image.

        Args:
            made: ``(B, 3, H, W)`` float, about 0..1, not clamped; B is at least 1.
            real: ``(B, 3, H, W)`` in 0..1, in the same dtype.
        """


class PixelTermConfig(Config):
    """Common keys of all terms."""

    if TYPE_CHECKING:
        kind: Any
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    start_step: int = Field(0, ge=0)
    """First step with this term, from 0."""

    def identity(self, digest: str | None) -> dict[str, Any]:
        """Return what defines the trajectory: the settings, with the digest of the weights in place of their source."""
        sources: Any = {"network": True, "trunk": True, "heads": True, "discriminator": {"network"}}
        settings = self.model_dump(mode="json", exclude=sources)
        return settings if digest is None else settings | {"digest": digest}
