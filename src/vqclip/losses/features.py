"""What the losses share: checks, and the features of all ranks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError, ShapeError

Implementation = Literal["tiled", "gather"]
"""``tiled``: logits a few rows at a time, gradients computed in forward; memory grows with the batch.
``gather``: the readable reference, with all G × G logits on every rank."""


def check_implementation(name: str) -> None:
    """Raises: ConfigError: there is none of that name."""
    if name not in get_args(Implementation):
        raise ConfigError(f"impl: got {name!r}, expected one of {', '.join(get_args(Implementation))}")


def precise(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Both ``(B, E)`` features in fp32 (fp64 for fp64).

    Raises:
        ShapeError: the two do not pair up.
    """
    if image.ndim != 2 or image.shape != text.shape:
        raise ShapeError(
            f"features: got image {tuple(image.shape)} and text {tuple(text.shape)}, expected (B, E) for both"
        )
    dtype = torch.float64 if torch.float64 in (image.dtype, text.dtype) else torch.float32
    return image.to(dtype), text.to(dtype)


def gathered(image: Tensor, text: Tensor, group: dist.Group = None) -> tuple[Tensor, Tensor]:
    """Both ``(B, E)`` features of all ranks, ``(G, E)`` each, with their gradients."""
    image, text = dist.all_gather(torch.stack([image, text], dim=1), group=group).unbind(1)  # one collective for both
    return image, text
