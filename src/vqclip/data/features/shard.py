"""The file of one shard of features.

    int64[5]   mark, samples S, entries E, rows R, checksum of these and of the tables
    int64[R]   checksum of each row
    int32[S+1] entries of sample i: first[i] to first[i + 1]; none for a bad sample
    int32[E]   row of each entry: of each view of an image, of each caption of a text
    zeros      up to a multiple of 64 bytes
    R rows     (N, D) numbers each

Equal captions share a row. A row is verified whenever it is read, so that no start has to read whole shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "Header", "ShardContent", "ShardTable", "checksum", "parse_header", "parse_table"]

MARK = 0x32_54_41_45_46_51_56  # "VQFEAT2"
_HEADER = np.dtype("<i8")
_TABLE = np.dtype("<i4")
HEADER_BYTES = 5 * _HEADER.itemsize
_ALIGNMENT = 64


def checksum(data: bytes, key: int) -> int:
    """Return a 64-bit checksum of some bytes, which any flipped bit changes, and of the place that they belong to.

    The sum of the 8-byte words, each times a different odd number. It detects accidents, not forgeries.

    Args:
        data: the bytes.
        key: 64-bit number of the place.
    """
    words = np.frombuffer(data + bytes(-len(data) % 8), _HEADER)
    with np.errstate(over="ignore"):  # sums are taken modulo 2^64
        return int((words * _odd_numbers(len(words))).sum() + np.int64(key))


@functools.lru_cache(maxsize=8)
def _odd_numbers(count: int) -> np.ndarray:
    return np.arange(1, 2 * count, 2, dtype=_HEADER)


@dataclass(frozen=True)
class ShardContent:
    """Features of the samples of a shard."""

    entries: Sequence[Sequence[int]]
    """Rows of each sample; none for a bad one."""
    rows: Tensor
    """``(R, N, D)`` in the stored dtype, on the CPU."""

    def write(self, file: BinaryIO, key: int) -> None:
        """Write the file; ``key``: see `FeatureFolder.key`."""
        counts = [len(rows) for rows in self.entries]
        first = np.cumsum([0, *counts]).astype(_TABLE)
        flat = np.array([row for rows in self.entries for row in rows], _TABLE)
        rows = self.rows.contiguous().flatten(1).view(torch.uint8).numpy()
        sums = np.array([checksum(row.tobytes(), key) for row in rows], _HEADER)
        tables = b"".join(part.tobytes() for part in (sums, first, flat))
        sizes = np.array([MARK, len(counts), len(flat), len(rows)], _HEADER).tobytes()
        start = sizes + np.array(checksum(sizes + tables, key), _HEADER).tobytes() + tables
        file.write(start + bytes(-len(start) % _ALIGNMENT))
        file.write(rows.reshape(-1).data)


class Header(NamedTuple):
    """Sizes of a shard."""

    samples: int
    entries: int
    rows: int
    checksum: int
    """Checksum of sizes and tables."""

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables."""
        return self.rows * _HEADER.itemsize + (self.samples + 1 + self.entries) * _TABLE.itemsize

    @property
    def rows_at(self) -> int:
        """Position of the first row."""
        return -(-(HEADER_BYTES + self.table_bytes) // _ALIGNMENT) * _ALIGNMENT


class ShardTable(NamedTuple):
    """Places of the rows of each sample."""

    first: np.ndarray
    rows: np.ndarray
    sums: np.ndarray
    """Checksum of each row."""
    rows_at: int
    """Position of the first row in the file."""

    def rows_of(self, place: int) -> np.ndarray:
        """Return the rows of a sample of the shard; empty for a bad one."""
        return self.rows[self.first[place] : self.first[place + 1]]


def parse_header(data: bytes) -> Header:
    """Read the header.

    Raises:
        ValueError: it is not one.
    """
    if len(data) != HEADER_BYTES:
        raise ValueError("cut short")
    mark, samples, entries, rows, found = np.frombuffer(data, _HEADER).tolist()
    if mark != MARK or min(samples, entries, rows) < 0:
        raise ValueError("not a shard of features")
    return Header(samples, entries, rows, found)


def parse_table(header: Header, data: bytes, key: int) -> ShardTable:
    """Read the tables behind a header.

    Raises:
        ValueError: a byte of them has changed, or they belong to another shard.
    """
    if len(data) != header.table_bytes:
        raise ValueError("cut short")
    sizes = np.array([MARK, header.samples, header.entries, header.rows], _HEADER).tobytes()
    if checksum(sizes + data, key) != header.checksum:
        raise ValueError("its tables have changed")
    sums, table = np.frombuffer(data, _HEADER, header.rows), np.frombuffer(data, _TABLE, -1, 8 * header.rows)
    return ShardTable(table[: header.samples + 1], table[header.samples + 1 :], sums, header.rows_at)
