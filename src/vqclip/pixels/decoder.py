"""Pixel decoders: the code vectors of an image → the image.

    vectors (B, N, D), and those of detail ids → layers on the grid of tokens → (B, 3, H, W), about 0..1

Each kind is a config class beside its module, and one entry of `PixelDecoderConfig`. No layer joins the samples of a
batch, so an image is the same in every batch, up to rounding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config, parse_config
from vqclip.config.bounds import MAX_STAGES, MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError, name_section
from vqclip.nn.layers import Block, heads_divide_width
from vqclip.pixels.detail import Detail, DetailConfig, pixels_per_token, prime_factors, require_groups
from vqclip.quantizers import Stats

PIXELS_FILE = "pixels.safetensors"
"""File of a decoder's weights in a tokenizer folder."""
ImageSize = Annotated[int, Field(ge=8, le=4096)]
"""H = W of the images in pixels."""


class PixelDecoder(nn.Module):
    """Code vectors → images.

    Args:
        config: its configuration, which a tokenizer folder stores.
        layers: ``(B, N, D + detail.dim)`` → ``(B, 3, H, W)``.
        dim: D, width of the vectors.
        num_tokens: N.
        detail: its detail codebooks, if it has any.
    """

    def __init__(
        self, config: PixelsConfig, layers: nn.Module, dim: int, num_tokens: int, detail: Detail | None = None
    ):
        super().__init__()
        self.config, self.layers, self.detail = config, layers, detail
        self.dim, self.num_tokens = dim, num_tokens

    @property
    def image_size(self) -> int:
        """H = W of the images in pixels."""
        return self.config.image_size

    @property
    def stages(self) -> int | None:
        """Number of first residual stages that pixels are decoded from; None: all."""
        return self.config.decoder.stages

    def forward(self, vectors: Tensor, detail: Tensor | None = None) -> Tensor:
        """Decode code vectors, with gradients.

        Args:
            vectors: ``(B, N, D)`` floating point, from ``tokenizer.quantizer``, of its first `stages` if the decoder
                has this setting; 0 for an absent token.
            detail: ``(B, N, detail.dim)`` floating point, from `Detail`; None: no detail stage.

        Returns:
            ``(B, 3, H, W)`` float32 (float64 for a decoder in float64), also under autocast; 0 is black and 1 is
            white, and values may be a little outside of 0..1.

        Raises:
            ShapeError: another shape.
        """
        if vectors.ndim != 3 or tuple(vectors.shape[1:]) != (self.num_tokens, self.dim):
            raise ShapeError(
                f"vectors: got shape {tuple(vectors.shape)}, expected (B, {self.num_tokens}, {self.dim}), as "
                "tokenizer.quantizer.decode(ids) gives them"
            )
        if vectors.shape[0] == 0:  # not every layer of torch has a backward without samples
            one = [None if each is None else F.pad(each, (0, 0, 0, 0, 0, 1)) for each in (vectors, detail)]
            return self(*one)[:0]
        dtype = next(self.layers.parameters()).dtype
        if self.detail is None:
            if detail is not None:
                raise ShapeError("detail: got vectors for a decoder without detail codebooks; expected None")
            pixels = self.layers(vectors.to(dtype))
        else:
            shape = (*vectors.shape[:2], self.detail.dim)
            detail = vectors.new_zeros(shape) if detail is None else detail
            if tuple(detail.shape) != shape:
                raise ShapeError(f"detail: got shape {tuple(detail.shape)}, expected {shape}")
            pixels = self.layers(torch.cat((vectors, detail), dim=-1).to(dtype)) + self.detail.add(detail)
        # Around 0, half precision has more digits than around 0.5.
        return pixels.to(torch.promote_types(pixels.dtype, torch.float32)) + 0.5

    def reconstruct(self, vectors: Tensor, images: Tensor, places: Tensor, step: int) -> tuple[Tensor, Stats]:
        """Decode as in training: with detail codebooks, each sample has its own number of stages. No collective.

        Args:
            vectors: as of `forward`.
            images: ``(B, 3, H, W)`` uint8, which the detail codebooks read.
            places: ``(B,)`` int64, positions of the samples in the global batch.
            step: number of the optimizer step.

        Returns:
            Images as of `forward`, and the statistics of the detail codebooks; empty without any.
        """
        if self.detail is None:
            return self(vectors), Stats()
        out = self.detail(images, self.detail.draw_stages(places, step))
        return self(vectors, out.vectors), out.stats

    def split(self, ids: Tensor, semantic: int, stages: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the tokenizer's ids, and the vectors of the detail ids behind them for `forward`.

        Args:
            ids: ``(B, N, C)`` integers, or up to ``(B, N, C + Cd)``.
            semantic: C, number of the tokenizer's codebooks.
            stages: number of first detail stages to use; None: all that the ids have.

        Raises:
            ShapeError, ConfigError: see `Detail.decode`; also for ``stages`` without detail codebooks.
        """
        if self.detail is not None:
            return ids[..., :semantic], self.detail.decode(ids[..., semantic:], stages)
        if stages is not None:
            raise ConfigError(f"detail: got {stages} stages; expected None, as this decoder has no detail codebooks")
        return ids, None


class _Transformer(nn.Module):
    """Transformer blocks over the tokens; each token becomes a patch of pixels, and convolutions join the patches."""

    def __init__(self, config: TransformerPixelsConfig, dim: int, num_tokens: int, pixels: int):
        super().__init__()
        self.side = math.isqrt(num_tokens)
        self.into = nn.Linear(dim, config.width)
        self.position = nn.Parameter(torch.randn(num_tokens, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        fold = 2 if pixels % 2 == 0 else 1  # convolutions at half the size cost a quarter
        self.patch = pixels // fold
        self.patches = nn.Linear(config.width, config.channels * self.patch**2)
        self.out = nn.Sequential(
            nn.Conv2d(config.channels, config.channels, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(config.channels, 3 * fold**2, 3, padding=1),
            nn.PixelShuffle(fold),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        x = self.into(vectors) + self.position
        for block in self.blocks:
            x = block(x, None)
        x = self.patches(self.norm(x))
        side, patch = self.side, self.patch
        return self.out(rearrange(x, "b (h w) (c p q) -> b c (h p) (w q)", h=side, w=side, p=patch, q=patch))


class _Residual(nn.Module):
    """Two 3×3 convolutions with group normalisation, added to the input."""

    def __init__(self, channels: int, per_group: int):
        super().__init__()
        groups = channels // per_group
        self.layers = nn.Sequential(
            nn.GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class _Convolutional(nn.Module):
    """Stages of residual blocks, each of which enlarges the grid; the last ones have the fewest channels."""

    def __init__(self, config: ConvolutionalPixelsConfig, dim: int, num_tokens: int, pixels: int):
        super().__init__()
        self.side = math.isqrt(num_tokens)
        factors = prime_factors(pixels) or [1]
        widths = [config.channels]
        for factor in reversed(factors[:-1]):
            widths.insert(0, min(config.max_channels, factor * widths[0]))
        self.position = nn.Parameter(torch.randn(num_tokens, dim) * 0.02)
        self.into = nn.Conv2d(dim, widths[0], 3, padding=1)
        layers: list[nn.Module] = []
        for factor, before, after in zip(factors, widths, widths[1:], strict=False):
            layers += [_Residual(before, config.channels_per_group) for _ in range(config.blocks)]
            layers += [nn.Conv2d(before, factor**2 * after, 3, padding=1), nn.PixelShuffle(factor)]
        last = widths[-1]
        layers += [_Residual(last, config.channels_per_group) for _ in range(config.blocks)]
        self.stages = nn.Sequential(*layers)
        self.out = nn.Sequential(
            nn.GroupNorm(last // config.channels_per_group, last),
            nn.SiLU(),
            nn.Conv2d(last, 3 * factors[-1] ** 2, 3, padding=1),
            nn.PixelShuffle(factors[-1]),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        x = rearrange(vectors + self.position, "b (h w) d -> b d h w", h=self.side, w=self.side)
        return self.out(self.stages(self.into(x)))


class _LayersConfig(Config, ABC):
    """Layers of a decoder."""

    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] | None = None
    """Number of first stages of a residual quantizer that pixels are decoded from, while the embedding reads all of
    them; null: all."""

    @abstractmethod
    def layers(self, dim: int, num_tokens: int, image_size: int) -> nn.Module:
        """Make the layers, ``(B, N, dim)`` → ``(B, 3, H, W)``; see `build`."""

    def build(self, dim: int, num_tokens: int, image_size: int) -> PixelDecoder:
        """Make a decoder with random weights (torch's global generator), without detail codebooks.

        Args:
            dim: D, width of the vectors.
            num_tokens: N, a square number.
            image_size: height and width of the images in pixels.

        Raises:
            ConfigError: the tokens are no square grid, or do not divide the image, or the image has another size than
                `ImageSize` allows.
        """
        return parse_config(PixelsConfig, {"decoder": self, "image_size": image_size}).build(dim, num_tokens)


class TransformerPixelsConfig(_LayersConfig):
    """Transformer blocks over the tokens, each of which becomes a patch of pixels.

    After the decoder of ViT-VQGAN (Yu et al. 2021, https://arxiv.org/abs/2110.04627); two convolutions at the end hide
    the borders of the patches.
    """

    kind: Literal["transformer"] = "transformer"
    """Transformer blocks."""
    width: int = Field(256, ge=8, le=MAX_WIDTH)
    """Width of the blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads; must divide `width`."""
    depth: int = Field(4, ge=1, le=128)
    """Number of blocks."""
    channels: int = Field(16, ge=1, le=MAX_WIDTH)
    """Channels of the convolutions at the end."""

    _heads_divide_width = model_validator(mode="after")(heads_divide_width)

    def layers(self, dim: int, num_tokens: int, image_size: int) -> nn.Module:
        """Make the layers; see `build`."""
        return _Transformer(self, dim, num_tokens, pixels_per_token(num_tokens, image_size))


class ConvolutionalPixelsConfig(_LayersConfig):
    """Residual blocks of convolutions (as in VQGAN, Esser et al. 2021), in stages that enlarge the grid of tokens.

    A stage doubles height and width; where the pixels of a token are no power of 2, the first stages have the other
    prime factors (14 pixels: 7, then 2).
    """

    kind: Literal["convolutional"] = "convolutional"
    """Convolutions."""
    channels: int = Field(32, ge=2, le=MAX_WIDTH)
    """Channels of the last stage, from which the colours are computed; a stage that doubles the
    height has twice as many as the next one."""
    max_channels: int = Field(256, ge=2, le=MAX_WIDTH)
    """Most channels of a stage."""
    blocks: int = Field(1, ge=0, le=32)
    """Residual blocks of each stage."""
    channels_per_group: int = Field(8, ge=2)
    """Number of channels that are normalised together; must divide `channels` and `max_channels`."""

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> ConvolutionalPixelsConfig:
        require_groups(self.channels, self.max_channels, self.channels_per_group)
        return self

    def layers(self, dim: int, num_tokens: int, image_size: int) -> nn.Module:
        """Make the layers; see `build`."""
        return _Convolutional(self, dim, num_tokens, pixels_per_token(num_tokens, image_size))


PixelDecoderConfig = Annotated[TransformerPixelsConfig | ConvolutionalPixelsConfig, Field(discriminator="kind")]
"""Any pixel decoder, chosen by ``kind``."""


class PixelsConfig(Config):
    """A pixel decoder and the size of its images."""

    decoder: PixelDecoderConfig = ConvolutionalPixelsConfig()
    """Layers of the decoder."""
    image_size: ImageSize
    """Height and width of the images in pixels; a multiple of the side of the token grid."""
    detail: DetailConfig | None = None
    """Further codebooks, whose ids hold what the tokenizer's ids leave out; null: none."""

    @torch.inference_mode(False)  # so that it can be used outside of inference mode
    def build(self, dim: int, num_tokens: int) -> PixelDecoder:
        """Make the decoder with random weights (torch's global generator).

        Args:
            dim: D, width of the vectors.
            num_tokens: N, a square number.

        Raises:
            ConfigError: the tokens are no square grid, or do not divide the image.
        """
        detail = None if self.detail is None else self.detail.build(num_tokens, self.image_size)
        width = dim if detail is None else dim + detail.dim
        return PixelDecoder(self, self.decoder.layers(width, num_tokens, self.image_size), dim, num_tokens, detail)


def attach(tokenizer: Any, decoder: PixelDecoder) -> None:
    """Make a pixel decoder a part of an image tokenizer: of its `decode_pixels`, and of the folder that it writes.

    The ids, embeddings and fingerprint of the tokenizer do not change.

    Args:
        tokenizer: an image tokenizer, with a tower or without, such as ``model.image``; its decoder is replaced.
        decoder: made for the width of its codes and its number of tokens.

    Raises:
        ConfigError: a text tokenizer, a decoder of other sizes or of stages that the quantizer lacks, or detail
            codebooks for images of another size than those of the tower.
    """
    modality = getattr(tokenizer, "modality", None)
    if modality != "image":
        kind = f"tokenizer of modality {modality!r}" if modality else type(tokenizer).__name__
        raise ConfigError(f"pixels: got a {kind}, expected a tokenizer of images, such as model.image")
    tokenizer.require_image_size("a pixel decoder")
    if not isinstance(decoder, PixelDecoder):
        raise ConfigError(
            f"pixels: got a {type(decoder).__name__}, expected a PixelDecoder, as PixelsConfig.build makes"
        )
    got, expected = (decoder.num_tokens, decoder.dim), (tokenizer.num_tokens, tokenizer.quantizer.dim)
    if got != expected:
        raise ConfigError(
            f"pixels: got a decoder of {got[0]} tokens with {got[1]} channels for a tokenizer of {expected[0]} tokens "
            f"with {expected[1]} channels; expected decoder.build(tokenizer.quantizer.dim, tokenizer.num_tokens, ...)"
        )
    if decoder.stages is not None:
        with name_section("pixels.decoder"):
            tokenizer.quantizer.require_first_stages(decoder.stages)
    tower = getattr(tokenizer, "tower", None)  # absent from a tokenizer that only decodes
    if decoder.detail is not None and tower is not None and tower.image_size != decoder.image_size:
        raise ConfigError(
            f"pixels.image_size: got {decoder.image_size} for a decoder with detail codebooks, which read the images "
            f"of the tokenizer; expected {tower.image_size}, as tokenizer.tower.image_size"
        )
    tokenizer.pixels = decoder
