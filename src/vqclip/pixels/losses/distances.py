"""Mean absolute and mean squared error of pixels."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from vqclip.pixels.losses.base import PixelTerm, PixelTermConfig

__all__ = ["L1Config", "L2Config"]


class _L1(PixelTerm):
    """Mean over pixels and channels of |made - real|."""

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        return (made - real).abs().mean(dim=(1, 2, 3))


class _L2(PixelTerm):
    """Mean over pixels and channels of (made - real)²."""

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        return (made - real).square().mean(dim=(1, 2, 3))


class L1Config(PixelTermConfig):
    """Mean absolute error of pixels in 0..1."""

    kind: Literal["l1"] = "l1"
    """Mean absolute error."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term."""
        return _L1()


class L2Config(PixelTermConfig):
    """Mean squared error of pixels in 0..1."""

    kind: Literal["l2"] = "l2"
    """Mean squared error."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term."""
        return _L2()
