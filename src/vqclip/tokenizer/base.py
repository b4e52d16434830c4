"""What the tokenizers of images and texts share: everything from tower features on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError, ShapeError
from vqclip.inputs import require_ids
from vqclip.pooling import PooledEmbedding, isometric_
from vqclip.pretrained import write_folder
from vqclip.projection import LinearProjectionConfig, Normalization, Projection, ProjectionConfig, normalized
from vqclip.quantizers import QuantizerConfig, Stats
from vqclip.quantizers.checks import check_channels
from vqclip.towers import ImageTower, TextTower
from vqclip.towers.text import heads_divide_width

ConfigT = TypeVar("ConfigT", bound="TokenizerConfig")


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


class Tokenizer(nn.Module, ABC):
    """What image and text tokenizers share: everything from tower features on.

    Args:
        config: everything but the tower.
        tower: `ImageTower` or `TextTower`.
        embed_dim: E, width of the joint embedding.
    """

    modality: str
    config: Any

    def __init__(self, config: TokenizerConfig, tower: ImageTower | TextTower, embed_dim: int):
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

    @abstractmethod
    def mask(self, inputs: Tensor) -> Tensor | None:
        """``(B, N)`` bool, True at real tokens, or None where every token is real."""

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


class TokenizerConfig(Config):
    """What the sections of both modalities have; each adds its ``tower``."""

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
