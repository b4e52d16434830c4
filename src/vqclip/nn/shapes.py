"""Images of any shape: patches within a budget, and ids that keep the shape.

    image (3, H, W) → resized to (3, rows · P, columns · P), rows · columns <= T → patches (T, 3 P² + 2)
    tokens (T + 1): the first row, one absent token, the other rows, padding, which is absent too

The absent token after the first row tells the number of columns, so ids and masks need nothing beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST = 255
"""Largest number of rows or columns, which are stored in a byte."""


@dataclass(frozen=True)
class PatchBudget:
    """Size of images of any shape, as a tower takes them.

    An image is a tensor ``(T, 3 P² + 2)`` uint8: of each patch, row by row, its pixels ``(P, P, 3)``, and its row and
    its column, counted from 1. Padding is 0.
    """

    patch_size: int
    """P, side of a patch in pixels."""
    max_tokens: int
    """T, largest number of patches of an image."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of an image as a tensor."""
        return self.max_tokens, 3 * self.patch_size**2 + 2

    @property
    def largest_short_side(self) -> int:
        """Pixels of the shorter side, from which on no image is enlarged in any direction."""
        return math.ceil(self.patch_size * (math.sqrt(self.max_tokens) + 1))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of an image: those of the largest scale that fits, each rounded up, as in SigLIP 2.

        One side is stretched by less than a patch. Images with fewer pixels are enlarged.
        """
        long, short = max(height, width), min(height, width)
        most = min(self.max_tokens, LONGEST)
        # Scales times both sides: of n patches along the longer one, and all that then fit along the shorter one.
        scale = max(min(n * short, min(self.max_tokens // n, LONGEST) * long) for n in range(1, most + 1))
        patches = -(-scale // short), -(-scale // long)
        return patches if height >= width else patches[::-1]

    def cut(self, image: Tensor) -> Tensor:
        """Cut an image ``(3, rows · P, columns · P)`` uint8, of whole patches, to its patches ``(T, 3 P² + 2)``."""
        side = self.patch_size
        rows, columns = image.shape[1] // side, image.shape[2] // side
        pixels = image.unflatten(2, (columns, side)).unflatten(1, (rows, side)).permute(1, 3, 2, 4, 0)
        patches = image.new_zeros(self.shape)
        patches[: rows * columns, :-2] = pixels.reshape(rows * columns, -1)
        places = torch.cartesian_prod(torch.arange(1, rows + 1), torch.arange(1, columns + 1))
        patches[: rows * columns, -2:] = places.view(-1, 2)
        return patches

    def join(self, patches: Tensor) -> Tensor:
        """Invert `cut`: ``(T, 3 P² + 2)`` → ``(3, rows · P, columns · P)``."""
        rows, columns = patches[:, -2:].amax(dim=0).tolist()
        pixels = patches[: rows * columns, :-2].view(rows, columns, self.patch_size, self.patch_size, 3)
        return pixels.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)


def mark_columns(features: Tensor, columns: Tensor) -> Tensor:
    """Insert an absent token after the first row: ``(B, T, D)`` → ``(B, T + 1, D)``, with its columns ``(B,)``."""
    before = torch.arange(features.shape[1] + 1, device=features.device) < columns[:, None]
    return torch.where(before[..., None], F.pad(features, (0, 0, 0, 1)), F.pad(features, (0, 0, 1, 0)))


def shape_mask(shapes: Tensor, length: int) -> Tensor:
    """Return ``(B, length)`` bool, True at the tokens of images with these rows and columns ``(B, 2)``."""
    columns, last = shapes[:, 1:], shapes.prod(dim=1, keepdim=True)
    places = torch.arange(length, device=shapes.device)
    return (places != columns) & (places <= last) & (last > 0)


def shapes_of(mask: Tensor) -> Tensor:
    """Invert `shape_mask`: ``(B, N)`` bool → rows and columns ``(B, 2)`` int64; 0 and 0 without tokens."""
    columns = mask.long().cumprod(dim=1).sum(dim=1)
    return torch.stack([mask.sum(dim=1) // columns.clamp(min=1), columns], dim=1)


def cells_of(mask: Tensor, side: int) -> Tensor:
    """Return ``(B, N)`` int64, the cell of a square grid of ``side`` · ``side`` cells in which each token begins.

    The grid covers the whole image, whatever its shape, so a square image of as many tokens has one in each cell.
    """
    rows, columns = shapes_of(mask).clamp(min=1).unbind(dim=1)
    number = (mask.cumsum(dim=1) - 1).clamp(min=0)
    row = number // columns[:, None] * side // rows[:, None]
    column = number % columns[:, None] * side // columns[:, None]
    return (row * side + column).clamp(max=side**2 - 1)
