"""Storage of a sample's ids, the same for every format of shards.

Shapes: N token positions, n of them real, C codebooks a token. Ids are stored without their padding, ``(n, C)``, in the
smallest of uint8, uint16, int32 and int64 for the largest codebook: no value is reserved for padding, and the array's
length is the number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from vqclip.config import Config
from vqclip.errors import DataError, ShapeError

__all__ = ["MAX_IDS", "IdLayout", "TokenRecord", "id_type", "require_key", "require_valid", "strip_padding"]

_OUTSIDE = re.compile(r"[/\\]|[A-Za-z]:|(.*[/\\])?\.\.([/\\]|$)|.*\0", re.DOTALL)
"""Names that leave the folder when unpacked on some system, /x, C:x, a/../x; or that end early, at a zero byte."""
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

    def require(self, ids: np.ndarray, place: str) -> np.ndarray:
        """Return stored ids after checking them.

        Raises:
            DataError: another type or shape, or an id outside of its codebook; ``place`` names the sample.
        """
        shape = f"({f'1 to {self.num_tokens}' if self.padded else self.num_tokens}, {len(self.codebook_sizes)})"
        least = 1 if self.padded else self.num_tokens
        fits = ids.ndim == 2 and least <= ids.shape[0] <= self.num_tokens and ids.shape[1] == len(self.codebook_sizes)
        if not fits or ids.dtype != self.type:
            raise DataError(f"{place}: ids {ids.shape} {ids.dtype}; expected {shape} {self.type}", "damaged ids")
        if (ids >= np.array(self.codebook_sizes, dtype=np.uint64)).any() or (ids < 0).any():
            raise DataError(f"{place}: an id is outside of its codebook, {self.codebook_sizes}", "damaged ids")
        return ids

    def pad(self, ids: np.ndarray) -> np.ndarray:
        """Convert stored ids ``(n, C)`` to the tokenizer's ``(N, C)`` int64, -1 at padding."""
        whole = np.full((self.num_tokens, len(self.codebook_sizes)), -1, dtype=np.int64)
        whole[: len(ids)] = ids
        return whole


def require_valid(record: TokenRecord, place: str) -> TokenRecord:
    """Return a record after checking everything except its ids.

    Raises:
        DataError: a value of a wrong type; ``place`` names the sample.
    """
    texts = (record.key, *record.captions)
    numbers = (record.sample_id, record.label)
    right = all(type(each) is int and -1 <= each < 2**63 for each in numbers) and record.sample_id >= 0
    if not record.captions or not all(isinstance(each, str) for each in texts) or not right:
        raise DataError(f"{place}: expected a key, captions, a sample id and perhaps a label", "damaged sample")
    return record


def require_key(key: str, place: str) -> None:
    """Raise DataError for a key that, as a file name, could leave the folder that it is unpacked into."""
    if _OUTSIDE.match(key):
        raise DataError(
            f"{place}: its name would leave the folder that it is unpacked into; expected a relative path without ..",
            "unsafe name",
        )


def id_type(codebook_sizes: Sequence[int]) -> np.dtype:
    """Return the smallest of uint8, uint16, int32 and int64 for these codebooks."""
    largest = max(codebook_sizes) - 1
    for kind in (np.uint8, np.uint16, np.int32):
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
