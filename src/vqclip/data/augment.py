"""Augmentations of whole batches on the device of a training; see `TrainTransformConfig.on_device`.

Each does what `torchvision.transforms.v2.functional` does to single images, with a draw for every image. Results are
bytes after each of them, and may differ from torchvision's by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["augment"]


def augment(images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
    """Augment images by the draws of `TrainTransform.draw`; names that are absent change nothing.

    Args:
        images: ``(B, 3, S, S)`` uint8.
        draws: name → ``(B,)`` float32.

    Returns:
        ``(B, 3, S, S)`` uint8.
    """
    if not len(images):
        return images
    columns = {name: each[:, None, None, None] for name, each in draws.items()}
    if "angle" in draws:
        images = _move(images, draws["angle"], draws["right"], draws["down"])
    if "flip" in draws:
        images = torch.where(columns["flip"] == 1, images.flip(3), images)
    if "vertical_flip" in draws:
        images = torch.where(columns["vertical_flip"] == 1, images.flip(2), images)
    if "turns" in draws:
        turned = [images.rot90(turns, (2, 3)) for turns in range(4)]
        for turns in range(1, 4):
            images = torch.where(columns["turns"] == turns, turned[turns], images)
    for name, change in _COLOURS.items():
        if name in draws:
            images = change(images.float(), columns[name]).clamp_(0, 255).to(torch.uint8)
    return images


def _move(images: Tensor, angle: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Rotate clockwise by degrees, then shift by pixels; gaps are white."""
    half = images.shape[-1] / 2
    cos, sin, right, down = angle.deg2rad().cos(), angle.deg2rad().sin(), right / half, down / half
    rows = [cos, sin, -cos * right - sin * down], [-sin, cos, sin * right - cos * down]
    inverse = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)
    grid = F.affine_grid(inverse, list(images.shape), align_corners=False)
    # A fourth channel tells how much of a pixel comes from the image.
    covered = torch.cat([images.float(), images.new_ones(len(images), 1, *images.shape[2:]).float()], dim=1)
    moved, share = F.grid_sample(covered, grid, align_corners=False).split([3, 1], dim=1)
    return (moved * share + 255 * (1 - share)).round_().to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Return the brightness of pixels (ITU-R 601-2), with the weights of torchvision."""
    red, green, blue = images.split(1, dim=1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor_()


def _blend(images: Tensor, others: Tensor, factor: Tensor) -> Tensor:
    return images * factor + others * (1 - factor)


def _shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue by a fraction of the colour circle; in the HSV model, through formulas without its sectors."""
    value, least = images.amax(dim=1, keepdim=True), images.amin(dim=1, keepdim=True)
    chroma = value - least
    red, green, blue = (images / chroma.clamp(min=1)).split(1, dim=1)
    by_green, by_blue = 2 + blue - red, 4 + red - green
    is_red = images[:, :1] == value
    is_green = images[:, 1:2] == value
    hue = torch.where(is_red, green - blue, torch.where(is_green, by_green, by_blue)) + 6 * shift
    # Red, green and blue of a hue: https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    sector = (hue + torch.arange(5.0, 0.0, -2.0, device=images.device)[:, None, None]) % 6
    shifted = value - chroma * torch.minimum(sector, 4 - sector).clamp(0, 1)
    return (shifted * (255.999 / 255)).floor()


_COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda images, factor: images * factor,
    "contrast": lambda images, factor: _blend(images, _grey(images).mean(dim=(1, 2, 3), keepdim=True), factor),
    "saturation": lambda images, factor: _blend(images, _grey(images), factor),
    "hue": _shift_hue,
}
"""Changes of ``(B, 3, S, S)`` float32 in 0..255, in the order in which they are applied."""
