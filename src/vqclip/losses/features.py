"""What the losses share: checks, and the features of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ShapeError


def gathered(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Both ``(B, E)`` features of all ranks, ``(G, E)`` each, with their gradients, in fp32 (fp64 for fp64).

    Raises:
        ShapeError: the two do not pair up.
    """
    if image.ndim != 2 or image.shape != text.shape:
        raise ShapeError(
            f"features: got image {tuple(image.shape)} and text {tuple(text.shape)}, expected (B, E) for both"
        )
    both = torch.stack([_precise(image), _precise(text)], dim=1)  # one collective instead of two
    image, text = dist.all_gather(both).unbind(1)
    return image, text


def _precise(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()
