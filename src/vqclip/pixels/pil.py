"""Pixels to PIL images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vqclip.errors import ShapeError

if TYPE_CHECKING:
    from PIL.Image import Image


def to_pil(pixels: Tensor) -> list[Image]:
    """Convert pixels ``(B, 3, H, W)``, floating point in 0..1 or uint8, to RGB images.

    Raises:
        ShapeError: another shape, dtype or range, or NaN.
    """
    from PIL import Image

    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise ShapeError(f"pixels: got shape {tuple(pixels.shape)}, expected (B, 3, H, W)")
    if pixels.is_floating_point():
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):  # false for NaN, too
            raise ShapeError("pixels: got NaN or numbers outside of 0 to 1, expected 0 to 1: clamp(0, 1)")
        pixels = (pixels.detach() * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise ShapeError(f"pixels: got dtype {pixels.dtype}, expected floating point (0..1) or uint8 (0..255)")
    return [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()]
