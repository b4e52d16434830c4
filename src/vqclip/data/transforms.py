"""Image transforms on uint8 tensors: random for training, fixed for evaluation.

Input and output are uint8: resizing bytes is several times as fast as resizing floats, and the tower normalises on the
device. Random draws come from a generator that the caller keys by (seed, epoch, sample id), so that they depend neither
on the worker nor on the rank.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import torch
import torchvision.transforms.v2.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode

from vqclip.config import Config
from vqclip.errors import ShapeError
from vqclip.nn.shapes import PatchBudget

Size = int | PatchBudget
"""Size of images for a tower: the side of squares in pixels, or the patches of images of any shape."""
Interpolation = Literal["bicubic", "bilinear"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0.01)]
Range = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]


class TrainTransformConfig(Config):
    """Random augmentation. The default is CLIP's: only a mild random crop."""

    scale: tuple[Share, Share] = (0.9, 1.0)
    """Smallest and largest fraction of the image's area in a crop, at least 0.01: a crop of less than a pixel would
    become the whole image."""
    ratio: Range = (3 / 4, 4 / 3)
    """Smallest and largest width : height of a crop, before it is resized to a square; for a tower that takes images of
    any shape, relative to that of the image."""
    interpolation: Interpolation = "bicubic"
    """Interpolation of crops; always antialiased."""
    flip: Fraction = 0.0
    """Probability of a left-right flip. 0 by default, since captions mention left and right."""
    quarter_turns: bool = False
    """Rotate by 0, 90, 180 or 270 degrees at random, for images without an upright direction, such as aerial images;
    with `flip`, top-bottom flips too."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation in either direction, in degrees; corners are filled with white."""
    translation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest shift in each direction, as a fraction of the side; the gap is filled with white."""
    brightness: Fraction = 0.0
    """Brightness is multiplied by a factor in 1 ± this."""
    contrast: Fraction = 0.0
    """Contrast is multiplied by a factor in 1 ± this."""
    saturation: Fraction = 0.0
    """Saturation is multiplied by a factor in 1 ± this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hue is shifted by up to ± this fraction of the colour circle. Wrong for captions that mention colours."""
    dct_scaling: bool = False
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size, where no crop is enlarged by it: less time, other pixels."""

    @model_validator(mode="after")
    def _check_ranges(self) -> TrainTransformConfig:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: got [{low}, {high}]; expected [smallest, largest]")
        if self.scale[1] > 1:
            raise ValueError(f"scale: got [{self.scale[0]}, {self.scale[1]}]; a crop takes at most 1.0 of the image")
        return self

    def build(self, size: Size) -> TrainTransform:
        """Build the transform for a tower's size of images."""
        return TrainTransform(self, size)


class EvalTransformConfig(Config):
    """The fixed transform of evaluation and of `tokenizer.preprocess`."""

    mode: Literal["crop", "squash"] = "crop"
    """crop: resize the shorter side and crop the centre. squash: resize both sides independently. Images of any shape
    are resized to whole patches, which stretches one side by less than a patch, and not cropped."""
    interpolation: Interpolation = "bicubic"
    """Interpolation; always antialiased."""

    def build(self, size: Size) -> EvalTransform:
        """Build the transform for a tower's size of images."""
        return EvalTransform(self, size)


class TrainTransform:
    """Random crop, resize, and the augmentations of the configuration.

    Args:
        config: the augmentations.
        size: of the result.
    """

    def __init__(self, config: TrainTransformConfig, size: Size):
        self.config = config
        self.size = size
        self.shape = (3, size, size) if isinstance(size, int) else size.shape
        """Shape of the result."""
        narrowest = config.scale[0] * min(config.ratio[0], 1 / config.ratio[1], 1.0)
        side = size if isinstance(size, int) else size.largest_short_side
        self.min_side = math.ceil(side / math.sqrt(narrowest)) if config.dct_scaling else None
        """Shorter side from which on no side of a crop has fewer pixels than the result; None: images are decoded in
        full."""

    def __call__(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        """Transform ``(3, H, W)`` uint8 → uint8 of `shape`; all draws come from `rng`."""
        _check_image(image)
        config, size = self.config, self.size
        own = 1.0 if isinstance(size, int) else image.shape[2] / image.shape[1]
        ratio = config.ratio[0] * own, config.ratio[1] * own
        top, left, height, width = _random_box(image.shape[1], image.shape[2], config.scale, ratio, rng)
        sides = _sides(size, height, width)
        image = _resize(image[:, top : top + height, left : left + width], sides, config.interpolation)
        if config.rotation > 0 or config.translation > 0:
            turn, right, down = rng.uniform(-1, 1, 3).tolist()
            image = F.affine(
                image,
                angle=turn * config.rotation,
                translate=[
                    round(right * (config.translation * sides[1])),
                    round(down * (config.translation * sides[0])),
                ],
                scale=1.0,
                shear=[0.0, 0.0],
                interpolation=InterpolationMode.BILINEAR,
                fill=[255.0, 255.0, 255.0],
            )
        if config.flip and rng.random() < config.flip:
            image = image.flip(2)
        if config.quarter_turns:
            image = image.rot90(int(rng.integers(4)), (1, 2))
        strengths = {name: getattr(config, name) for name in ("brightness", "contrast", "saturation", "hue")}
        if any(strengths.values()):
            for (name, strength), change in zip(strengths.items(), rng.uniform(-1, 1, 4).tolist(), strict=True):
                if strength:
                    image = getattr(F, f"adjust_{name}")(image, change * strength + (name != "hue"))
        return image if isinstance(size, int) else size.cut(image)


class EvalTransform:
    """Resize and centre crop, or squash.

    Args:
        config: the mode.
        size: of the result.
    """

    def __init__(self, config: EvalTransformConfig, size: Size):
        self.config = config
        self.size = size

    def __call__(self, image: Tensor) -> Tensor:
        """Transform ``(3, H, W)`` uint8 → ``(3, S, S)``, or the patches of `PatchBudget.cut`, uint8."""
        _check_image(image)
        size, (height, width) = self.size, image.shape[1:]
        sides = _sides(size, height, width)
        if isinstance(size, int) and self.config.mode == "crop":
            # Cropping first gives the same pixels up to the border, and resizes less.
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            image = image[:, top : top + side, left : left + side]
        image = _resize(image, sides, self.config.interpolation)
        return image if isinstance(size, int) else size.cut(image)


def as_pixels(image: Tensor, size: Size) -> Tensor:
    """Return a transformed image as ``(3, H, W)``, also one of patches."""
    return image if isinstance(size, int) else size.join(image)


def _check_image(image: Tensor) -> None:
    if image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8:
        raise ShapeError(f"got an image of shape {tuple(image.shape)} and {image.dtype}; expected (3, H, W) uint8")


def _sides(size: Size, height: int, width: int) -> tuple[int, int]:
    """Return height and width to which an image of this height and width is resized."""
    if isinstance(size, int):
        return size, size
    rows, columns = size.grid(height, width)
    return rows * size.patch_size, columns * size.patch_size


def _resize(image: Tensor, sides: tuple[int, int], interpolation: Interpolation) -> Tensor:
    if image.shape[1:] == sides:
        return image
    if image.stride(0) == 1:
        # A crop of a decoded (channels-last) image: torch's vectorised kernel needs it contiguous (2x at 224 px).
        image = image[None].contiguous(memory_format=torch.channels_last)[0]
    return interpolate(image[None], sides, mode=interpolation, antialias=True)[0]


def _random_box(
    height: int, width: int, scale: Range, ratio: Range, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a crop: area by `scale`, proportions log-uniform in `ratio`.

    The distribution is that of torchvision's RandomResizedCrop (Szegedy et al., 2015): ten tries, then the centre.
    """
    draws = rng.random((10, 4)) if scale[0] < 1 or ratio[0] < 1 or ratio[1] > 1 else np.zeros((0, 4))
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for share, proportion, down, right in draws.tolist():
        area = height * width * (scale[0] + share * (scale[1] - scale[0]))
        aspect = math.exp(log_low + proportion * (log_high - log_low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    aspect = min(max(width / height, ratio[0]), ratio[1])
    w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    return (height - h) // 2, (width - w) // 2, h, w
