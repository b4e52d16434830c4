"""The half of a tokenizer that reads codes: ids → vectors → joint embedding, without tower, pictures or captions.

    ids → quantizer → project_out ─→ vectors for a downstream model
                               └→ pool → unit-norm embedding

`vqclip.tokenizer` adds the half that makes the ids. Nothing here imports a tower's library, torchvision or Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_LAYERS, MAX_WIDTH
from vqclip.errors import ShapeError, VqclipError
from vqclip.lm_vocabulary import FlatCodes
from vqclip.nn.attention import heads_divide_width
from vqclip.nn.inputs import require_ids
from vqclip.nn.pooling import PooledEmbedding
from vqclip.nn.projection import LinearProjectionConfig, Projection, ProjectionConfig
from vqclip.quantizers import Quantizer, QuantizerConfig, codebook_matrix

ENCODING_PARTS = ("tower", "project_in")
"""Modules of a tokenizer that `CodeReader` does without."""
ENCODING_KEYS = ("tower", "preprocess", "project_in", "normalize")
"""Keys of a tokenizer's section that say nothing of the half that reads codes."""


class ReadingConfig(Config):
    """What is done with codes: the part of a tokenizer's section that needs no tower."""

    quantizer: QuantizerConfig
    """What turns features into codes."""
    width: int = Field(256, ge=8, le=MAX_WIDTH)
    """D, width of the vectors that are rebuilt from the codes."""
    heads: int = Field(4, ge=1)
    """Attention heads after the quantizer; must divide `width`."""
    depth: int = Field(1, ge=0, le=MAX_LAYERS)
    """Transformer blocks between the codes and the pooling."""
    project_out: ProjectionConfig = LinearProjectionConfig()
    """From the codes to `width`."""

    _heads_divide_width = model_validator(mode="after")(heads_divide_width)

    def reading_parts(
        self, quantizer: Quantizer, num_tokens: int, embed_dim: int
    ) -> tuple[Projection, PooledEmbedding]:
        """What follows the quantizer: ``project_out`` and ``pool``, with random weights."""
        project_out = Projection(*self.project_out.layers(quantizer.dim, self.width))
        return project_out, PooledEmbedding(num_tokens, self.width, embed_dim, self.heads, self.depth)

    def shapes(self, prefix: str, num_tokens: int | None, embed_dim: int) -> dict[str, tuple[int, ...]]:
        """Weights that show these sizes, by their names in a folder, which is judged by them before anything is built.

        Args:
            prefix: how the names begin.
            num_tokens: N; None where it is not known.
            embed_dim: E.
        """
        width = self.width
        position = {} if num_tokens is None else {"position": (num_tokens, width)}
        blocks = {f"blocks.{number}.mlp.0.weight": (4 * width, width) for number in range(self.depth)}
        pooling = {"attention.query.weight": (width, width), "head.weight": (embed_dim, width)}
        return {f"{prefix}pool.{name}": shape for name, shape in (position | blocks | pooling).items()}


class ReadingHalf(nn.Module):
    """What every tokenizer can do with ids, whether it has a tower or not.

    Args:
        quantizer: turns ids into code vectors.
        project_out: code vectors to the vectors that a downstream model is given.
        pool: those to the joint embedding.
        fewest_tokens: how few of the N positions a batch may come with: N, or less where those at the end may be
            padding.
        before: modules that come before the quantizer, by name; they stand first in the list of parameters.
    """

    modality: str
    quantizer: Quantizer
    project_out: Projection
    pool: PooledEmbedding

    def __init__(
        self,
        quantizer: Quantizer,
        project_out: Projection,
        pool: PooledEmbedding,
        fewest_tokens: int,
        before: Mapping[str, nn.Module] | None = None,
    ):
        super().__init__()
        for name, part in (before or {}).items():
            self.add_module(name, part)
        self.quantizer = quantizer
        self.project_out = project_out
        self.pool = pool
        self.fewest_tokens = fewest_tokens

    @property
    def num_tokens(self) -> int:
        """N, tokens a sample (for text: positions, padding included)."""
        return len(self.pool.position)

    @property
    def embed_dim(self) -> int:
        """E, width of the joint embedding."""
        return self.pool.head.out_features

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """K of each of the C codebooks."""
        return self.quantizer.codebook_sizes

    @property
    def bits_per_sample(self) -> float:
        """Tokens × Σ log2(codebook size); for text that of a caption that fills every position."""
        return self.num_tokens * self.quantizer.bits

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.pool.position.device

    def ids_mask(self, ids: Tensor) -> Tensor | None:
        """The mask of tokens, ``(B, N)`` bool, read off the ids ``(B, N, C)``: one is absent when all its ids are -1.

        None for images of which every patch is there, as in training, so that the sums are the same.
        """
        mask = (require_ids(ids) >= 0).any(dim=-1)
        if self.modality != "image" or torch.compiler.is_compiling():  # looking at values would break the graph
            return mask
        return None if bool(mask.all()) else mask

    def decode(self, ids: Tensor) -> Tensor:
        """Ids ``(B, N, C)`` → vectors ``(B, N, D)`` for a downstream model, 0 for a token without ids (all -1).

        The ids may be of any integer type.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes, mask = self._lookup(ids), self.ids_mask(ids)
        vectors = self._project_out(codes, mask)
        return vectors if mask is None else vectors * mask.unsqueeze(-1)

    def embed(self, ids: Tensor) -> Tensor:
        """Ids ``(B, N, C)`` → joint embedding ``(B, E)``, unit-norm: from the codes alone.

        The ids may be of any integer type.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        return self._embed(self._lookup(ids), self.ids_mask(ids))

    def to_vocabulary(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Ids ``(B, N, C)`` → one sequence ``(B, N·C)`` a sample for a language model, each codebook in its own range.

        `FlatCodes` says how, and has an id in place of -1; `vqclip.lm_vocabulary` has other layouts.

        Args:
            ids: as `encode` makes them.
            offset: number of the first code.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
            ConfigError: the tokenizer has no codebook, or more codes than int64 can count.
        """
        return FlatCodes(self.codebook_sizes, offset).to_vocabulary(self._require_shape(ids))

    def from_vocabulary(self, flat: Tensor, offset: int = 0) -> Tensor:
        """What `to_vocabulary` was given, ``(B, N·C)`` → ``(B, N, C)`` int64.

        Raises:
            ShapeError: for another shape (an image has all of its N tokens) or dtype, or an id that is no code of the
                codebook whose place it has.
            ConfigError: as in `to_vocabulary`.
        """
        ids = FlatCodes(self.codebook_sizes, offset).from_vocabulary(flat)
        return self._require_shape(ids, "vocabulary ids as (B, N, C)")

    def codebook(self, codebook: int) -> Tensor:
        """One codebook as a matrix ``(K, d)``, one row a code, of the quantizer's d channels.

        A token's code vector is the sum of its rows over the codebooks; see `codebook_matrix`.

        Raises:
            ShapeError: there is no such codebook, or it has more codes than a matrix should.
        """
        return codebook_matrix(self.quantizer, codebook)

    def _lookup(self, ids: Tensor) -> Tensor:
        return self.quantizer.decode(self._require_shape(ids))

    def _require_shape(self, ids: Tensor, name: str = "ids") -> Tensor:
        ids = require_ids(ids)
        codebooks = len(self.codebook_sizes)
        if ids.ndim != 3 or not self.fewest_tokens <= ids.shape[1] <= self.num_tokens or ids.shape[2] != codebooks:
            tokens = f"{self.num_tokens}" if self.fewest_tokens == self.num_tokens else f"1 to {self.num_tokens}"
            raise ShapeError(f"{name}: got shape {tuple(ids.shape)}, expected (B, {tokens}, {codebooks})")
        return ids

    def _embed(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        return self.pool(self._project_out(vectors, mask), mask)

    def _project_out(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        # Codes are fp32 numbers whatever the module's dtype is.
        return self.project_out(vectors.to(self.pool.position.dtype), mask)


class CodeReader(ReadingHalf):
    """A tokenizer without its tower: ids to vectors and embeddings. ``load_tokenizer(..., encode=False)`` gives one.

    Args:
        modality: ``"image"`` or ``"text"``.
        config: what is done with codes.
        num_tokens: N.
        fewest_tokens: as in `ReadingHalf`.
        embed_dim: E.
    """

    def __init__(self, modality: str, config: ReadingConfig, num_tokens: int, fewest_tokens: int, embed_dim: int):
        quantizer = config.quantizer.build()
        super().__init__(quantizer, *config.reading_parts(quantizer, num_tokens, embed_dim), fewest_tokens)
        self.modality = modality
        self.config = config

    def section(self) -> NoReturn:
        """Raise VqclipError: the fingerprint, by which an index knows its tokenizer, covers the tower too."""
        raise VqclipError(
            "this tokenizer was loaded with encode=False and has no fingerprint, which covers the tower; expected "
            f'load_tokenizer(folder, modality="{self.modality}") to build or search an index'
        )

    def encode(self, inputs: Any) -> NoReturn:
        """Raises VqclipError: there is no tower to encode with."""
        raise VqclipError(
            "this tokenizer was loaded with encode=False, to decode and embed ids, and has no tower; expected "
            f'load_tokenizer(folder, modality="{self.modality}"), which also encodes'
        )
