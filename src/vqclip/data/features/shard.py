"""The file of one shard of features.

    int64[4]   mark, samples S, entries E, rows R
    int32[S+1] entries of sample i: first[i] to first[i + 1]; none for a bad sample
    int32[E]   row of each entry: of each view of an image, of each caption of a text
    zeros      up to a multiple of 64 bytes
    R rows     (N, D) numbers each

Equal captions share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "ShardContent", "ShardTable", "parse_header", "parse_table"]

MARK = 0x31_54_41_45_46_51_56  # "VQFEAT1"
_HEADER = np.dtype("<i8")
_TABLE = np.dtype("<i4")
HEADER_BYTES = 4 * _HEADER.itemsize
_ALIGNMENT = 64


@dataclass(frozen=True)
class ShardContent:
    """Features of the samples of a shard."""

    entries: Sequence[Sequence[int]]
    """Rows of each sample; none for a bad one."""
    rows: Tensor
    """``(R, N, D)`` in the stored dtype, on the CPU."""

    def write(self, file: BinaryIO) -> None:
        """Write the file."""
        counts = [len(rows) for rows in self.entries]
        first = np.cumsum([0, *counts]).astype(_TABLE)
        flat = np.array([row for rows in self.entries for row in rows], _TABLE)
        header = np.array([MARK, len(counts), len(flat), len(self.rows)], _HEADER)
        start = b"".join(part.tobytes() for part in (header, first, flat))
        file.write(start + bytes(-len(start) % _ALIGNMENT))
        file.write(self.rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)


class _Header(NamedTuple):
    samples: int
    entries: int
    rows: int

    @property
    def table_bytes(self) -> int:
        """Bytes of both tables."""
        return (self.samples + 1 + self.entries) * _TABLE.itemsize

    @property
    def rows_at(self) -> int:
        """Position of the first row."""
        return -(-(HEADER_BYTES + self.table_bytes) // _ALIGNMENT) * _ALIGNMENT


class ShardTable(NamedTuple):
    """Places of the rows of each sample."""

    first: np.ndarray
    rows: np.ndarray
    rows_at: int
    """Position of the first row in the file."""

    def rows_of(self, place: int) -> np.ndarray:
        """Return the rows of a sample of the shard; empty for a bad one."""
        return self.rows[self.first[place] : self.first[place + 1]]


def parse_header(data: bytes) -> _Header:
    """Read the header.

    Raises:
        ValueError: it is not one.
    """
    if len(data) != HEADER_BYTES:
        raise ValueError("cut short")
    mark, *sizes = np.frombuffer(data, _HEADER).tolist()
    if mark != MARK or min(sizes) < 0:
        raise ValueError("not a shard of features")
    return _Header(*sizes)


def parse_table(header: _Header, data: bytes) -> ShardTable:
    """Read the tables behind a header."""
    table = np.frombuffer(data, _TABLE)
    return ShardTable(table[: header.samples + 1], table[header.samples + 1 :], header.rows_at)
