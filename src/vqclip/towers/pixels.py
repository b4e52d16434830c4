"""Normalisation of pixels on the device: batches are sent as uint8, a quarter of the bytes of fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vqclip.errors import ShapeError

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


class Normalize(nn.Module):
    """Checks pixels and normalises each channel to zero mean and unit deviation.

    Args:
        image_size: height and width that the tower expects, in pixels.
        mean, std: per-channel mean and deviation of pixels in 0..1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, image_size: int, mean: Sequence[float] = OPENAI_MEAN, std: Sequence[float] = OPENAI_STD):
        super().__init__()
        self.image_size = image_size
        # Constants of the architecture, not weights: not in the state dict.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalise ``images``.

        Args:
            images: ``(B, 3, H, W)``, uint8 in 0..255 or floating point in 0..1.

        Returns:
            ``(B, 3, H, W)`` in the dtype of the tower's weights.

        Raises:
            ShapeError: wrong shape or dtype.
        """
        size = self.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise ShapeError(
                f"images: got shape {tuple(images.shape)}, expected (B, 3, {size}, {size}); "
                "tokenizer.preprocess makes such a tensor from a PIL image"
            )
        if images.dtype == torch.uint8:
            # In place on the new tensor: three times as fast.
            return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)
        if not images.is_floating_point():
            raise ShapeError(f"images: got dtype {images.dtype}, expected uint8 (0..255) or floating point (0..1)")
        return (images.to(self.mean.dtype) - self.mean) / self.std
