"""The image tokenizer: images → ids → vectors and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vqclip.data.decode import pil_to_uint8
from vqclip.data.transforms import EvalTransform, EvalTransformConfig
from vqclip.errors import ShapeError, VqclipError
from vqclip.nn.inputs import require_image, require_images
from vqclip.nn.precision import Precision
from vqclip.pixels.decoder import attach
from vqclip.pixels.losses import PixelTrainingConfig
from vqclip.tokenizer.base import Tokenizer, TokenizerConfig
from vqclip.towers import ImageTower, ImageTowerConfig

if TYPE_CHECKING:
    from PIL.Image import Image


class Preprocess:
    """PIL image → ``(3, H, W)``, without a model, so that little is pickled for a worker.

    Args:
        transform: transform of evaluation.
        dtype: float32 for 0..1, as open_clip's callers expect; uint8 for 0..255.
    """

    def __init__(self, transform: EvalTransform, dtype: torch.dtype = torch.float32):
        self.transform, self.dtype = transform, dtype

    def __call__(self, image: Image) -> Tensor:
        """Prepare one image of any mode and size.

        Raises:
            ShapeError: not a PIL image.
        """
        require_image(image)
        pixels = self.transform(pil_to_uint8(image))
        return pixels if self.dtype == torch.uint8 else pixels.to(self.dtype).div_(255)


class ImageTokenizer(Tokenizer):
    """Images → ids → vectors and embeddings. Built by `ImageTokenizerConfig.build`.

    Attributes:
        config: its configuration.
        preprocess: one PIL image → ``(3, H, W)`` uint8, as in evaluation: composited on white, resized, cropped.
    """

    modality = "image"
    config: ImageTokenizerConfig
    tower: ImageTower

    def __init__(self, config: ImageTokenizerConfig, embed_dim: int):
        config = config.resolve()
        tower = config.tower.build()
        super().__init__(config, tower, embed_dim, tower.num_tokens)
        self.transform = config.preprocess.build(self.tower.image_size)
        self.preprocess = Preprocess(self.transform, torch.uint8)

    def mask(self, inputs: Tensor) -> None:
        """Return None: every patch is real."""

    def encode(self, images: Tensor | Image | Sequence[Image], precision: Precision = "fp32") -> Tensor:
        """Encode images to ids ``(B, N, C)`` int64.

        Args:
            images: ``(B, 3, H, W)`` uint8 (0..255) or float (0..1) at the tower's size, one PIL image, or several.
            precision: of the tower, whatever autocast the caller uses; see `embed`.

        Raises:
            ShapeError: for a tensor of another shape, dtype or range (which is not checked under `torch.compile`).
        """
        return self._encode(self.batch(images), precision)

    def encode_pixels(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Encode images to all ids that `decode_pixels` can use: ``(B, N, C + Cd)`` int64.

        The first C are those of `encode`, bit for bit; the Cd detail ids follow, stage after stage, if the pixel
        decoder has detail codebooks.

        Args:
            images: as of `encode`.

        Raises:
            ShapeError: as of `encode`.
        """
        inputs = self.batch(images)
        ids = self._encode(inputs, "fp32")
        if self.pixels is None or self.pixels.detail is None:
            return ids
        return torch.cat((ids, self.pixels.detail.encode(inputs)), dim=-1)

    def encode_detail(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Encode images to the detail ids alone: ``(B, N, Cd)`` int64; see `encode_pixels`.

        Raises:
            VqclipError: the tokenizer has no detail codebooks.
            ShapeError: as of `encode`.
        """
        if self.pixels is None or self.pixels.detail is None:
            raise VqclipError("this image tokenizer has no detail codebooks; expected a pixel decoder with `detail`")
        return self.pixels.detail.encode(self.batch(images))

    def batch(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Turn the input of `encode` into that of `features`: a tensor, checked, on the tokenizer's device.

        Raises:
            ShapeError: see `encode`.
        """
        if not isinstance(images, Tensor):
            pixels = [self.preprocess(image) for image in require_images(images)]
            size = self.tower.image_size
            images = torch.stack(pixels) if pixels else torch.empty(0, 3, size, size, dtype=torch.uint8)
        elif images.is_floating_point() and not torch.compiler.is_compiling():
            _require_unit_range(images)
        return images.to(self.device)


class ImageTokenizerConfig(TokenizerConfig):
    """An image tokenizer."""

    tower: ImageTowerConfig
    """From pixels to patch features."""
    preprocess: EvalTransformConfig = EvalTransformConfig()
    """Resizing and cropping to the tower's size, outside training."""
    pixels: PixelTrainingConfig | None = None
    """Pixel decoder that trains together with the tokenizer; null: none."""

    @torch.inference_mode(False)  # so that it can be used outside of inference mode
    def build(self, embed_dim: int) -> ImageTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        tokenizer = ImageTokenizer(self, embed_dim)
        if self.pixels is not None:
            sizes = tokenizer.quantizer.dim, tokenizer.num_tokens, tokenizer.tower.image_size
            attach(tokenizer, self.pixels.build(*sizes))
        return tokenizer


def _require_unit_range(images: Tensor) -> None:
    if not bool(((images >= 0) & (images <= 1)).all()):  # false for NaN, too
        raise ShapeError(
            f"images: got floating point from {float(images.min()):g} to {float(images.max()):g}, expected 0 to 1: "
            "neither 0..255 (for which there is uint8) nor normalised, which the tower does; resizing may overshoot: "
            "clamp(0, 1)"
        )
