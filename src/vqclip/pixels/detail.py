"""Detail codebooks: what an image's semantic ids leave out, for the pixel decoder alone.

    images → patches and convolutions → stage 0 | stage 1 | ...     each stage has channels and codebooks of its own
    ids    (B, N, C + stages · Cs), the semantic ones first

The frozen tokenizer is not touched: its ids and embeddings are the same to the bit, and those who want these alone take
``ids[..., :C]``. Stages are ordered: in training some samples have only the first few of them, or none ("nested
dropout", Rippel et al. 2014, https://arxiv.org/abs/1402.0915), so that any number of stages can be decoded.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS, MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError, name_section
from vqclip.nn.inputs import require_codes, require_ids
from vqclip.nn.precision import full_precision
from vqclip.quantizers import Product, QuantizerConfig, QuantizerOutput
from vqclip.quantizers.stats import random_integers
from vqclip.seeds import derive_seed
from vqclip.towers.image import Normalize


class _Fold(nn.Module):
    """``(B, C, H f, W f)`` → ``(B, C f², H, W)``; unlike `nn.PixelUnshuffle` also for B = 0."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, "b c (h p) (w q) -> b (c p q) h w", p=self.factor, q=self.factor)


class _Branch(nn.Module):
    """Pixels → features of the tokens: a linear map of each token's pixels, plus convolutions.

    Each stage of a 3×3 convolution folds the grid first, the mirror image of the convolutional decoder. The linear map
    learns at once, while convolutions need many steps. No layer joins the samples of a batch.
    """

    def __init__(self, config: DetailConfig, dim: int, pixels: int, image_size: int):
        super().__init__()
        self.normalize, layers, before = Normalize(image_size), list[nn.Module](), 3
        for number, factor in enumerate(reversed(prime_factors(pixels))):
            after = min(config.max_channels, config.channels << number)
            layers += [_Fold(factor), nn.Conv2d(factor**2 * before, after, 3, padding=1)]
            layers += [nn.GroupNorm(after // config.channels_per_group, after), nn.SiLU()]
            before = after
        self.layers = nn.Sequential(*layers, nn.Conv2d(before, dim, 1))
        self.patches = nn.Sequential(_Fold(pixels), nn.Conv2d(3 * pixels**2, dim, 1))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W)`` uint8 or 0..1 → ``(B, N, dim)``."""
        x = self.normalize(images)
        return (self.layers(x) + self.patches(x)).flatten(2).transpose(1, 2)


class Detail(nn.Module):
    """Images → detail ids → vectors, on the tokenizer's grid of tokens. Built by `DetailConfig.build`.

    Args:
        branch: images ``(B, 3, H, W)`` uint8 or 0..1 → ``(B, N, quantizer.dim)``.
        quantizer: one part for each stage.
        dropout: see `DetailConfig`.
        pixels: height and width in pixels of a token's part of the image.
    """

    def __init__(self, branch: nn.Module, quantizer: Product, dropout: float, pixels: int):
        super().__init__()
        self.branch, self.quantizer, self.dropout, self.pixels = branch, quantizer, dropout, pixels
        self.patches = nn.Linear(quantizer.dim, 3 * pixels**2, bias=False)
        nn.init.zeros_(self.patches.weight)  # begins as a decoder without it

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.quantizer.codebooks

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.quantizer.dim

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """K of each of the codebooks, stage after stage."""
        return self.quantizer.codebook_sizes

    def forward(self, images: Tensor, stages: Tensor | None = None) -> QuantizerOutput:
        """Run the training path. Contains no collective.

        Args:
            images: ``(B, 3, H, W)`` uint8 or 0..1.
            stages: ``(B,)`` int64, number of stages of each sample, from `draw_stages`; None: all.

        Returns:
            Vectors ``(B, N, dim)``, 0 in the channels of left-out stages; ids and statistics of all stages.
        """
        out = self.quantizer(self.branch(images))
        return out if stages is None else QuantizerOutput(self._keep(out.vectors, stages), out.ids, out.stats)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode images ``(B, 3, H, W)`` to ids ``(B, N, Cd)`` int64, stage after stage, without autocast."""
        with full_precision(images.device):
            return self.quantizer.encode(self.branch(images))

    def decode(self, ids: Tensor, stages: int | None = None) -> Tensor:
        """Map the ids ``(B, N, Cd)`` of all stages, or of the first ones, to vectors ``(B, N, dim)``.

        Left-out ids, and ids of -1, add 0.

        Args:
            ids: of any integer type.
            stages: number of first stages to use; None: all that the ids have.

        Raises:
            ShapeError: more ids than codebooks, an id outside its codebook, or another shape or dtype.
            ConfigError: more stages than the ids have.
        """
        ids = require_ids(ids)  # int64, which has room for -1
        columns, most = ids.shape[-1], len(self.codebook_sizes)
        if columns > most:
            raise ShapeError(f"detail ids: got {columns} a token; expected at most {most}, of {self.stages} stages")
        if stages is not None:
            needed = stages * (most // self.stages) if type(stages) is int else -1
            if not 0 <= needed <= columns:
                raise ConfigError(
                    f"detail: got {stages!r} stages for {columns} detail ids a token; expected 0 to {self.stages} "
                    f"stages of {most // self.stages} ids"
                )
            ids, columns = ids[..., :needed], needed
        ids = F.pad(ids, (0, most - columns), value=-1)
        require_codes(ids, self.codebook_sizes, "detail ids")  # the quantizer would name itself
        return self.quantizer.decode(ids)

    def add(self, vectors: Tensor) -> Tensor:
        """Map vectors ``(B, N, dim)`` to what they add to the image, ``(B, 3, H, W)``: a linear map for each token.

        Trained with a random number of stages, linear maps find principal components in order (Rippel et al. 2014).
        """
        side = math.isqrt(vectors.shape[1])
        x = self.patches(vectors.to(self.patches.weight.dtype))
        return rearrange(x, "b (h w) (c p q) -> b c (h p) (w q)", h=side, c=3, p=self.pixels)

    @torch.compiler.disable  # or the number of the step would compile each step again
    def draw_stages(self, places: Tensor, step: int) -> Tensor:
        """Draw the number of stages of each sample of a training step, the same on any number of ranks.

        A share `dropout` of the samples has none, the others have 1 to all, each number equally often. Keyed by (key of
        the quantizer, step, place).

        Args:
            places: ``(B,)`` int64, positions of the samples in the global batch.
            step: number of the optimizer step.

        Returns:
            ``(B,)`` int64.
        """
        if self.dropout == 0:
            return torch.full_like(places, self.stages)
        key = derive_seed(self.quantizer.key, "detail stages", step)
        number = random_integers(torch.full((), key, device=places.device), places)
        low = number & (2**30 - 1)
        return torch.where(low < self.dropout * 2**30, 0, 1 + (number >> 30) % self.stages)

    def _keep(self, vectors: Tensor, stages: Tensor) -> Tensor:
        stage_of = torch.arange(self.dim, device=vectors.device) // (self.dim // self.stages)
        return torch.where(stage_of < stages[:, None, None], vectors, 0)


class DetailConfig(Config):
    """Detail codebooks beside a tokenizer's: a thin stack of convolutions on pixels, and its quantizer."""

    quantizer: QuantizerConfig
    """The quantizer of one stage; its width times `stages` is the width of the detail vectors."""
    stages: int = Field(4, ge=1, le=MAX_CODEBOOKS)
    """Number of stages, the most important first."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """Share of the training samples without any stage, from semantic ids alone. The others have 1 to all stages, each
    number equally often. With 0, every sample has all, and images can be decoded from all stages only."""
    channels: int = Field(16, ge=2, le=MAX_WIDTH)
    """Channels after the first convolution; each further one has twice as many."""
    max_channels: int = Field(128, ge=2, le=MAX_WIDTH)
    """Most channels of a convolution."""
    channels_per_group: int = Field(8, ge=2)
    """Number of channels that are normalised together; must divide `channels` and `max_channels`."""

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> DetailConfig:
        require_groups(self.channels, self.max_channels, self.channels_per_group)
        return self

    def build(self, num_tokens: int, image_size: int) -> Detail:
        """Make the module with random weights (torch's global generator).

        Args:
            num_tokens: N of the tokenizer, a square number.
            image_size: height and width of the images in pixels.

        Raises:
            ConfigError: the tokens are no square grid, or do not divide the image, or the quantizer has no codes.
        """
        with name_section("detail.quantizer"):
            quantizer = Product(self.quantizer.build(), self.stages)
        if not quantizer.codebook_sizes:
            raise ConfigError(
                f"detail.quantizer: got kind {self.quantizer.kind!r}, which has no codes; expected another"
            )
        pixels = pixels_per_token(num_tokens, image_size)
        return Detail(_Branch(self, quantizer.dim, pixels, image_size), quantizer, self.dropout, pixels)


def pixels_per_token(num_tokens: int, image_size: int) -> int:
    """Return the height and width in pixels of a token's part of the image.

    Raises:
        ConfigError: the tokens are no square grid, or do not divide the image.
    """
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or image_size % side:
        raise ConfigError(
            f"pixels: got {num_tokens} tokens for images of {image_size} x {image_size} pixels; expected a square grid "
            "of tokens whose side divides the image's"
        )
    return image_size // side


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of ``number``, largest first."""
    factors, factor = [], 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            factors.append(factor)
            number //= factor
    return factors[::-1]


def require_groups(channels: int, max_channels: int, channels_per_group: int) -> None:
    """Raise ValueError unless the groups of a normalisation divide the channels."""
    if channels % channels_per_group or max_channels % channels_per_group:
        raise ValueError(
            f"got channels {channels}, max_channels {max_channels} and channels_per_group {channels_per_group}; "
            "expected channels that are multiples of channels_per_group"
        )
