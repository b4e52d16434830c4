"""How the ids of a sample are stored, whatever the format of the shard.

Shapes: N token positions, n of them real, C codebooks a token. Ids are stored without their padding, ``(n, C)``, in the
smallest of uint8, uint16, int32 and int64 that holds the largest codebook: no value is lost to a mark for padding, and
the length is that of the array.
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
"""Names that lead elsewhere when they are unpacked on some system, /x, C:x, a/../x; or that end early, at a zero."""
MAX_IDS = 1 << 20
"""N·C at most: 8 MiB of a padded sample, and more than any tokenizer has."""


class TokenRecord(NamedTuple):
    """One sample of a token shard."""

    key: str
    """Its name in the shard that it came from."""
    sample_id: int
    """Its number over all shards of the data that were tokenized, unusable samples counted."""
    label: int
    """Class number, -1 where there is none."""
    captions: tuple[str, ...]
    """All captions, at least one."""
    image: np.ndarray | None
    """``(N, C)`` ids; None where images were not tokenized."""
    texts: tuple[np.ndarray, ...] | None
    """``(n, C)`` ids of each caption; None where texts were not tokenized."""


class IdLayout(Config):
    """What the ids of one modality look like."""

    num_tokens: int = Field(ge=1, le=MAX_IDS)
    """N, the token positions of a sample."""
    codebook_sizes: tuple[Annotated[int, Field(ge=1, le=2**63)], ...] = Field(min_length=1, max_length=4096)
    """K of each of the C codebooks."""
    padded: bool
    """Whether a sample may have fewer than N tokens."""

    @model_validator(mode="after")
    def _bounded(self) -> IdLayout:
        if self.size > MAX_IDS:
            raise ValueError(
                f"{self.num_tokens} tokens with ids of {len(self.codebook_sizes)} codebooks; expected at most "
                f"{MAX_IDS} ids a sample"
            )
        return self

    @property
    def size(self) -> int:
        """N·C, ids of a sample at most."""
        return self.num_tokens * len(self.codebook_sizes)

    @property
    def type(self) -> np.dtype:
        """What ids are stored in."""
        return id_type(self.codebook_sizes)

    def require(self, ids: np.ndarray, place: str) -> np.ndarray:
        """The ids, if they can be those of a sample.

        Raises:
            DataError: they have another type or shape, or one lies outside its codebook; ``place`` names the sample.
        """
        shape = f"({f'1 to {self.num_tokens}' if self.padded else self.num_tokens}, {len(self.codebook_sizes)})"
        least = 1 if self.padded else self.num_tokens
        fits = ids.ndim == 2 and least <= ids.shape[0] <= self.num_tokens and ids.shape[1] == len(self.codebook_sizes)
        if not fits or ids.dtype != self.type:
            raise DataError(f"{place}: ids {ids.shape} {ids.dtype}; expected {shape} {self.type}", "damaged ids")
        if (ids >= np.array(self.codebook_sizes, dtype=np.uint64)).any() or (ids < 0).any():
            raise DataError(f"{place}: an id lies outside of its codebook, {self.codebook_sizes}", "damaged ids")
        return ids

    def pad(self, ids: np.ndarray) -> np.ndarray:
        """Stored ids ``(n, C)`` → ``(N, C)`` int64 as the tokenizer gave them, -1 at padding."""
        whole = np.full((self.num_tokens, len(self.codebook_sizes)), -1, dtype=np.int64)
        whole[: len(ids)] = ids
        return whole


def require_valid(record: TokenRecord, place: str) -> TokenRecord:
    """The record, if what it says besides ids is of the right kinds.

    Raises:
        DataError: it is not; ``place`` names the sample.
    """
    texts = (record.key, *record.captions)
    numbers = (record.sample_id, record.label)
    right = all(type(each) is int and -1 <= each < 2**63 for each in numbers) and record.sample_id >= 0
    if not record.captions or not all(isinstance(each, str) for each in texts) or not right:
        raise DataError(f"{place}: expected a key, captions, a sample id and perhaps a label", "damaged sample")
    return record


def require_key(key: str, place: str) -> None:
    """Raises DataError for a key that, as a file's name, could lead out of the folder that it is unpacked into."""
    if _OUTSIDE.match(key):
        raise DataError(
            f"{place}: its name leads out of the folder that it is unpacked into; expected a relative path without ..",
            "unsafe name",
        )


def id_type(codebook_sizes: Sequence[int]) -> np.dtype:
    """The smallest of uint8, uint16, int32 and int64 that holds every id."""
    largest = max(codebook_sizes) - 1
    for kind in (np.uint8, np.uint16, np.int32):
        if largest <= np.iinfo(kind).max:
            return np.dtype(kind)
    return np.dtype(np.int64)


def strip_padding(ids: np.ndarray, codebook_sizes: Sequence[int]) -> np.ndarray:
    """Ids ``(N, C)`` int64, -1 at padding → ``(n, C)`` as they are stored.

    Raises:
        ShapeError: a token without ids stands before one with them, or has ids of some codebooks alone.
    """
    real = (ids >= 0).any(axis=1)
    count = int(real.sum())
    if (ids[:count] < 0).any() or not count:
        raise ShapeError(
            f"ids: {count} tokens of {len(ids)} have ids; expected those to be the first, with ids of all "
            f"{len(codebook_sizes)} codebooks"
        )
    return ids[:count].astype(id_type(codebook_sizes))
