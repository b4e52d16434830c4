"""Storage of a sample's ids.

Shapes: N token positions, n of them real, C codebooks a token. Ids are stored without their padding, ``(n, C)``, in the
smallest of uint8, uint16, uint32 and int64 for the largest codebook: no value is reserved for padding, and the array's
length is the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from vqclip.config import Config
from vqclip.errors import ShapeError

__all__ = ["MAX_IDS", "IdLayout", "TokenRecord", "id_type", "strip_padding"]

MAX_IDS = 1 << 20
"""Largest N·C: a padded sample takes 8 MiB; no tokenizer has as many ids."""


class TokenRecord(NamedTuple):
    """One sample of a token shard."""

    key: str
    """The sample's name in its original shard."""
    sample_id: int
    """Its number over all original shards, unusable samples included."""
    label: int
    """Class number; -1 without one."""
    captions: tuple[str, ...]
    """All captions, at least one."""
    image: np.ndarray | None
    """``(N, C)`` ids; None if images were not tokenized."""
    texts: tuple[np.ndarray, ...] | None
    """``(n, C)`` ids of each caption; None if texts were not tokenized."""


class IdLayout(Config):
    """Shape and range of the ids of one modality."""

    num_tokens: int = Field(ge=1, le=MAX_IDS)
    """N, the token positions of a sample."""
    codebook_sizes: tuple[Annotated[int, Field(ge=1, le=2**63)], ...] = Field(min_length=1, max_length=4096)
    """K of each of the C codebooks."""
    padded: bool
    """Whether a sample may have fewer than N tokens."""

    @model_validator(mode="after")
    def _check_size(self) -> IdLayout:
        if self.size > MAX_IDS:
            raise ValueError(
                f"{self.num_tokens} tokens with ids of {len(self.codebook_sizes)} codebooks; expected at most "
                f"{MAX_IDS} ids a sample"
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


def id_type(codebook_sizes: Sequence[int]) -> np.dtype:
    """Return the smallest of uint8, uint16, uint32 and int64 for these codebooks."""
    largest = max(codebook_sizes) - 1
    for kind in (np.uint8, np.uint16, np.uint32):
        if largest <= np.iinfo(kind).max:
            return np.dtype(kind)
    return np.dtype(np.int64)


def strip_padding(ids: np.ndarray, codebook_sizes: Sequence[int]) -> np.ndarray:
    """Convert ids ``(N, C)`` int64 with -1 at padding to their stored form ``(n, C)``.

    Raises:
        ShapeError: a token without ids precedes one with ids, or a token has ids of only some codebooks.
    """
    real = (ids >= 0).any(axis=1)
    count = int(real.sum())
    if (ids[:count] < 0).any() or not count:
        raise ShapeError(
            f"ids: {count} tokens of {len(ids)} have ids; expected the first tokens to have ids of all "
            f"{len(codebook_sizes)} codebooks"
        )
    return ids[:count].astype(id_type(codebook_sizes))
