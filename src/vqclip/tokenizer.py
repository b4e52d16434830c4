"""Tokenizers: image or text → ids → vectors → joint embedding.

    tower → project to the quantizer → quantizer → project back → pool → unit-norm embedding
                                           └→ ids

Everything after the quantizer sees the codes alone, so the embedding that training optimises is the one that stored
ids give: ``tok.embed(tok.encode(x))`` equals ``tok(x).embedding`` bit for bit in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.data.decode import pil_to_uint8
from vqclip.data.transforms import EvalTransformConfig
from vqclip.errors import ConfigError, ShapeError
from vqclip.inputs import require_ids, require_picture, require_pictures
from vqclip.pooling import PooledEmbedding, isometric_
from vqclip.pretrained import write_folder
from vqclip.projection import LinearProjectionConfig, Normalization, Projection, ProjectionConfig, normalized
from vqclip.quantizers import QuantizerConfig, Stats
from vqclip.quantizers.base import check_channels
from vqclip.towers import ImageTower, ImageTowerConfig, TextTower, TextTowerConfig
from vqclip.towers.text import heads_divide_width

if TYPE_CHECKING:
    from PIL.Image import Image


ConfigT = TypeVar("ConfigT", bound="_TokenizerConfig")


@contextmanager
def tower_errors_in(section: str) -> Iterator[None]:
    """A tower's errors name keys of ``tower``; within this context, of ``section``, the key path of that tower."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith(("tower:", "tower.")):
            raise
        raise ConfigError(section + str(error).removeprefix("tower")) from error


class TokenizerOutput(NamedTuple):
    """What a tokenizer gives in training."""

    embedding: Tensor
    """``(B, E)`` unit-norm, through the quantizer, gradients straight-through."""
    ids: Tensor
    """``(B, N, C)`` int64, -1 at padding."""
    stats: Stats
    """This rank's sums for the quantizer's losses and metrics."""


class Tokenizer(nn.Module):
    """What image and text tokenizers share: everything from tower features on.

    Args:
        config: everything but the tower.
        tower: `ImageTower` or `TextTower`.
        embed_dim: E, width of the joint embedding.
    """

    modality: str
    config: Any

    def __init__(self, config: _TokenizerConfig, tower: ImageTower | TextTower, embed_dim: int):
        super().__init__()
        self.config = config
        quantizer = config.quantizer.build()
        self.tower = tower
        into = config.project_in.layers(tower.width, quantizer.dim)
        self.project_in = Projection(nn.LayerNorm(tower.width), *into)
        self.normalize = config.normalize
        if config.normalize != "none":
            least = 3 if config.normalize == "layer" else 2  # taking off the mean costs one more
            check_channels(f"{self.modality}.normalize {config.normalize}", quantizer.dim, least)
        self.quantizer = quantizer
        self.project_out = Projection(*config.project_out.layers(quantizer.dim, config.width))
        self.pool = PooledEmbedding(tower.num_tokens, config.width, embed_dim, config.heads, config.depth)
        for part in (self.project_in, self.project_out, self.pool):
            isometric_(part)
        self.embed_dim = embed_dim

    @property
    def num_tokens(self) -> int:
        """N, tokens a sample (for text: positions, padding included)."""
        return self.tower.num_tokens

    @property
    def fewest_tokens(self) -> int:
        """How few of the N positions a batch may come with: N, or less where those at the end may be padding."""
        return self.num_tokens

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """K of each of the C codebooks."""
        return self.quantizer.codebook_sizes

    @property
    def bits_per_sample(self) -> float:
        """Tokens × Σ log2(codebook size); for text that of a caption that fills every position."""
        return self.num_tokens * self.quantizer.bits

    def mask(self, inputs: Tensor) -> Tensor | None:
        """``(B, N)`` bool, True at real tokens, or None where every token is real."""
        raise NotImplementedError

    def ids_mask(self, ids: Tensor) -> Tensor | None:
        """`mask`, read off the ids ``(B, N, C)``: a token is absent when all of its ids are -1."""
        return (ids >= 0).any(dim=-1)

    def forward(self, inputs: Tensor) -> TokenizerOutput:
        """The training path: a batch as `preprocess` makes it → embedding, ids, statistics. Holds no collective."""
        return self._quantized(*self.features(inputs))

    def features(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the quantizer is given: a batch as `preprocess` makes it → ``(B, N, quantizer.dim)``, and its `mask`."""
        mask = self.mask(inputs)
        return normalized(self.project_in(self.tower(inputs), mask), self.normalize), mask

    def continuous(self, inputs: Tensor) -> Tensor:
        """``(B, E)``: the embedding with the quantizer bypassed, to tell what quantization costs."""
        return self._continuous(*self.features(inputs))

    def with_continuous(self, inputs: Tensor) -> tuple[TokenizerOutput, Tensor]:
        """`forward` and `continuous` from one pass of the tower."""
        features, mask = self.features(inputs)
        return self._quantized(features, mask), self._continuous(features, mask)

    def _quantized(self, features: Tensor, mask: Tensor | None) -> TokenizerOutput:
        out = self.quantizer(features, mask)
        return TokenizerOutput(self._embed(out.vectors, mask), out.ids, out.stats)

    def _continuous(self, features: Tensor, mask: Tensor | None) -> Tensor:
        return self._embed(self.quantizer.continuous(features, mask), mask)

    @torch.no_grad()
    def _encode(self, inputs: Tensor) -> Tensor:
        return self.quantizer.encode(*self.features(inputs))

    def decode(self, ids: Tensor) -> Tensor:
        """Ids ``(B, N, C)`` int64 → vectors ``(B, N, D)`` for a downstream model, 0 for a token without ids (all -1).

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes, mask = self._lookup(ids), self.ids_mask(ids)
        vectors = self._project_out(codes, mask)
        return vectors if mask is None else vectors * mask.unsqueeze(-1)

    def embed(self, ids: Tensor) -> Tensor:
        """Ids ``(B, N, C)`` int64 → joint embedding ``(B, E)``, unit-norm: from the codes alone.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        return self._embed(self._lookup(ids), self.ids_mask(ids))

    def _lookup(self, ids: Tensor) -> Tensor:
        require_ids(ids)
        codebooks = len(self.codebook_sizes)
        if ids.ndim != 3 or not self.fewest_tokens <= ids.shape[1] <= self.num_tokens or ids.shape[2] != codebooks:
            tokens = f"{self.num_tokens}" if self.fewest_tokens == self.num_tokens else f"1 to {self.num_tokens}"
            raise ShapeError(f"ids: got shape {tuple(ids.shape)}, expected (B, {tokens}, {codebooks})")
        return self.quantizer.decode(ids)

    def _embed(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        return self.pool(self._project_out(vectors, mask), mask)

    def _project_out(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        # Codes are fp32 numbers whatever the module's dtype is.
        return self.project_out(vectors.to(self.pool.position.dtype), mask)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write this tokenizer to a folder that `vqclip.load_tokenizer` reads."""
        state = {f"{self.modality}.{key}": value for key, value in self.state_dict().items()}
        write_folder(Path(folder), {self.modality: self.section()}, state)

    def section(self) -> dict[str, object]:
        """This tokenizer's part of ``config.json``."""
        return self.config.architecture().model_dump(mode="json") | {"embed_dim": self.embed_dim}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.pool.position.device


class ImageTokenizer(Tokenizer):
    """Images → ids → vectors and embeddings. Built by `ImageTokenizerConfig.build`.

    Attributes:
        config: what it was built from.
        preprocess: one PIL image → ``(3, H, W)`` uint8, as in evaluation.
    """

    modality = "image"
    config: ImageTokenizerConfig
    tower: ImageTower

    def __init__(self, config: ImageTokenizerConfig, embed_dim: int):
        super().__init__(config, config.tower.build(), embed_dim)
        self.transform = config.preprocess.build(self.tower.image_size)

    def mask(self, inputs: Tensor) -> None:
        """Every patch is real."""

    def ids_mask(self, ids: Tensor) -> Tensor | None:
        """As for any tokenizer; None where every patch is there, as in training, so that the sums are the same."""
        mask = super().ids_mask(ids)
        if torch.compiler.is_compiling():  # looking at values would break the graph
            return mask
        return None if mask is not None and bool(mask.all()) else mask

    def preprocess(self, image: Image) -> Tensor:
        """One PIL image of any mode and size → ``(3, H, W)`` uint8: composited on white, resized, cropped."""
        require_picture(image)
        return self.transform(pil_to_uint8(image))

    def encode(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Images → ids ``(B, N, C)`` int64.

        Args:
            images: ``(B, 3, H, W)`` uint8 (0..255) or float (0..1) at the tower's size, one PIL image, or several.

        Raises:
            ShapeError: for a tensor of another shape, dtype or range (which is not checked under `torch.compile`).
        """
        if not isinstance(images, Tensor):
            pixels = [self.preprocess(image) for image in require_pictures(images)]
            size = self.tower.image_size
            images = torch.stack(pixels) if pixels else torch.empty(0, 3, size, size, dtype=torch.uint8)
        elif images.is_floating_point() and not torch.compiler.is_compiling():
            _require_unit_range(images)
        return self._encode(images.to(self.device))


class TextTokenizer(Tokenizer):
    """Captions → ids → vectors and embeddings. Built by `TextTokenizerConfig.build`.

    Attributes:
        config: what it was built from.
        preprocess: captions → token numbers ``(B, N)`` int64 of the byte-pair vocabulary, 0-padded.
    """

    modality = "text"
    tower: TextTower

    def __init__(self, config: TextTokenizerConfig, embed_dim: int):
        super().__init__(config, config.tower.build(), embed_dim)
        self.preprocess = config.tower.vocabulary()

    def mask(self, inputs: Tensor) -> Tensor:
        """``(B, N)`` bool, True at real tokens."""
        return self.tower.mask(inputs)

    @property
    def fewest_tokens(self) -> int:
        """1, or N where the tower sees the padding."""
        return self.num_tokens if self.tower.sees_padding else 1

    def needed_tokens(self, tokens: Tensor) -> int:
        """How many columns of ``(B, N)`` token numbers hold a caption's; the others change nothing but the time.

        In steps of 8, so that kernels and compiled graphs meet few shapes; N where the tower sees the padding. Looks at
        values: ask where they are, before they go to another device.
        """
        longest = int(self.mask(tokens).any(dim=0).sum())
        return max(self.fewest_tokens, min(self.num_tokens, 8 * max(1, math.ceil(longest / 8))))

    def encode(self, captions: Sequence[str] | Tensor) -> Tensor:
        """Captions (``list[str]``, or token numbers ``(B, N)``) → ids ``(B, N, C)`` int64, -1 at padding.

        Raises:
            ShapeError: for anything else; for token numbers outside the vocabulary and rows without an end mark, which
                `preprocess` never makes (the last two are not checked under `torch.compile`).
        """
        if isinstance(captions, Tensor):
            tokens = captions
            if not torch.compiler.is_compiling():
                self.tower.require_captions(tokens)
        else:
            tokens = self.preprocess(captions)
        return self._encode(tokens.to(self.device))


def _require_unit_range(images: Tensor) -> None:
    if not bool(((images >= 0) & (images <= 1)).all()):  # false for NaN, too
        raise ShapeError(
            f"images: got floating point from {float(images.min()):g} to {float(images.max()):g}, expected 0 to 1: "
            "neither 0..255 (for which there is uint8) nor normalised, which the tower does; resizing may overshoot: "
            "clamp(0, 1)"
        )


class _TokenizerConfig(Config):
    if TYPE_CHECKING:
        tower: Any
    quantizer: QuantizerConfig
    """What turns features into codes."""
    width: int = Field(256, ge=8)
    """D, width of the vectors that are rebuilt from the codes."""
    heads: int = Field(4, ge=1)
    """Attention heads after the quantizer; must divide `width`."""
    depth: int = Field(1, ge=0)
    """Transformer blocks between the codes and the pooling."""
    project_in: ProjectionConfig = LinearProjectionConfig()
    """From the tower's features to the quantizer's channels."""
    normalize: Normalization = "none"
    """What is done to those channels before they are quantized: layer (mean 0, variance 1), l2 (length √D), none."""
    project_out: ProjectionConfig = LinearProjectionConfig()
    """From the codes to `width`."""

    _heads_divide_width = model_validator(mode="after")(heads_divide_width)

    def architecture(self: ConfigT) -> ConfigT:
        """The same network with random weights: what is read and written beside weights, so that none are fetched."""
        tower = self.tower
        return self.model_copy(update={"tower": tower.model_copy(update=tower.random_weights)})


class ImageTokenizerConfig(_TokenizerConfig):
    """An image tokenizer."""

    tower: ImageTowerConfig
    """What turns pixels into patch features."""
    preprocess: EvalTransformConfig = EvalTransformConfig()
    """How an image is brought to the tower's size outside training."""

    @torch.inference_mode(False)  # so that one made in inference mode can be used outside of it
    def build(self, embed_dim: int) -> ImageTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        return ImageTokenizer(self, embed_dim)


class TextTokenizerConfig(_TokenizerConfig):
    """A text tokenizer."""

    tower: TextTowerConfig
    """What turns captions into per-token features."""

    @torch.inference_mode(False)  # so that one made in inference mode can be used outside of it
    def build(self, embed_dim: int) -> TextTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        return TextTokenizer(self, embed_dim)
