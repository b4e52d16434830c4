"""The folder of token shards: the layout of their ids, and `manifest.json` with settings, numbers and checksums.

Shapes: N token positions, n of them real, C codebooks a token. Ids are stored without their padding, ``(n, C)``, in the
smallest of uint8, uint16, uint32 and int64 for the largest codebook: no value is reserved for padding, and the array's
length is the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from vqclip.config import Config
from vqclip.data.work_folder import MANIFEST_FILE, SETTINGS_FILE, FolderManifest
from vqclip.errors import CheckpointError, DataError
from vqclip.io.json_files import read_checked
from vqclip.nn.precision import Precision

SUFFIX = ".parquet"
"""Ending of the names of token shards."""
VERSIONS = {"format": "vqclip tokens", "format_version": 3}
"""Format and version of the JSON files."""

_MAX_IDS = 1 << 20
"""Largest N·C: a padded sample takes 8 MiB; no tokenizer has as many ids."""
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def id_type(codebook_sizes: Sequence[int]) -> np.dtype:
    """Return the smallest of uint8, uint16, uint32 and int64 for these codebooks."""
    smallest = np.min_scalar_type(max(codebook_sizes) - 1)
    return smallest if smallest.itemsize < 8 else np.dtype(np.int64)


class IdLayout(Config):
    """Shape and range of the ids of one modality."""

    num_tokens: int = Field(ge=1, le=_MAX_IDS)
    """N, the token positions of a sample."""
    codebook_sizes: tuple[Annotated[int, Field(ge=1, le=2**63)], ...] = Field(min_length=1, max_length=4096)
    """K of each of the C codebooks."""
    padded: bool
    """Whether a sample may have fewer than N tokens."""

    @model_validator(mode="after")
    def _check_size(self) -> IdLayout:
        if self.size > _MAX_IDS:
            raise ValueError(
                f"{self.num_tokens} tokens with ids of {len(self.codebook_sizes)} codebooks; expected at most "
                f"{_MAX_IDS} ids a sample"
            )
        return self

    @property
    def size(self) -> int:
        """N·C, the largest number of ids of a sample."""
        return self.num_tokens * len(self.codebook_sizes)

    @property
    def type(self) -> np.dtype:
        """Data type of stored ids."""
        return id_type(self.codebook_sizes)

    def is_inside(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each id of ``(..., C)`` is inside of its codebook."""
        last = np.array([size - 1 for size in self.codebook_sizes], dtype=self.type)
        inside: np.ndarray = (ids >= 0) & (ids <= last)
        return inside

    def __str__(self) -> str:
        tokens = f"{'1 to ' if self.padded else ''}{self.num_tokens} tokens"
        return f"{tokens} of the codebook sizes {', '.join(map(str, self.codebook_sizes))}"

    def pad(self, ids: np.ndarray) -> np.ndarray:
        """Convert stored ids ``(n, C)`` to the tokenizer's ``(N, C)`` int64, -1 at padding."""
        whole = np.full((self.num_tokens, len(self.codebook_sizes)), -1, dtype=np.int64)
        whole[: len(ids)] = ids
        return whole


class TokenizerInfo(Config):
    """The tokenizer that made the ids."""

    image: _Hash | None
    """`vqclip.tokenizer.stored.fingerprint` of the image tokenizer; None without image ids."""
    text: _Hash | None
    """Fingerprint of the text tokenizer; None without text ids."""
    weights: _Hash
    """SHA-256 of the folder's `model.safetensors`."""
    config: _Hash
    """SHA-256 of its `config.json`."""
    id_layout: int
    """Version of the layout of ids."""


class Settings(Config):
    """Everything that determines the bytes of token shards."""

    tokenizer: TokenizerInfo
    """The tokenizer."""
    image: IdLayout | None
    """Layout of image ids; None if images were not tokenized."""
    text: IdLayout | None
    """Layout of text ids; None if texts were not tokenized."""
    context_length: int | None
    """Longest text in tokens, beyond which captions were cut; None if texts were not tokenized."""
    batch_size: int = Field(ge=1)
    """Samples at once; the shape of a batch may change the last bits of the features before quantization."""
    precision: Precision
    """Floating-point type that the tokenizer computed in."""
    device: str
    """Type of the device."""
    threads: int = Field(ge=1)
    """CPU threads of a process, which change the order of sums."""
    max_pixels: int = Field(ge=1)
    """Larger images are bad samples."""
    made_with: dict[str, str]
    """Versions of the libraries that decode and compute."""
    data: dict[str, Any]
    """Fingerprint of the tokenized source."""
    shards: tuple[dict[str, Any], ...]
    """Its shards in order, as of `ShardedSource.shards`; each became one token shard."""


class Manifest(FolderManifest):
    """A whole folder of token shards."""

    settings: Settings
    """Settings of all shards."""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        for number, shard in enumerate(self.shards):
            if shard.name != f"{number:05d}{SUFFIX}":
                raise ValueError(f"shards: got {shard.name!r}, expected {number:05d}{SUFFIX}")
        if self.samples != (total := sum(shard.samples for shard in self.shards)):
            raise ValueError(f"samples: got {self.samples}, expected {total}, the sum over its shards")
        return self


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a finished folder.

    Raises:
        DataError: it is missing, damaged or of another version; the message says what to do.
    """
    path = folder / MANIFEST_FILE
    if not path.exists() and (folder / SETTINGS_FILE).exists():
        done = len([*folder.glob(f"*{SUFFIX}")])
        raise DataError(f"{folder}: is not finished ({done} shards are); run the same `vqclip tokenize` command again")
    remedy, hint = "tokenize again, or use the vqclip that wrote it", "; expected a folder that `vqclip tokenize` wrote"
    try:
        return read_checked(path, Manifest, VERSIONS, remedy, hint)
    except CheckpointError as error:
        raise DataError(str(error)) from None
