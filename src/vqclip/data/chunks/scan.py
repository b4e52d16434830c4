"""Read the bytes of shards or chunks: the samples in them and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vqclip.data.chunks.index_file import DIGEST, ChunkIndex, chunk_digest
from vqclip.data.members import MemberTable, SampleTable
from vqclip.data.shard import Shard
from vqclip.data.tar import TarWalk
from vqclip.errors import DataError, StorageError

__all__ = ["ShardPart", "scan_chunk", "scan_shard"]


class ShardPart(NamedTuple):
    """The part of an index that comes from one shard."""

    begins: np.ndarray
    """``(samples,)`` int64: byte where each sample begins."""
    digests: np.ndarray
    """``(samples, 16)`` uint8: the first bytes of the SHA-256 of each sample's bytes."""
    members: np.ndarray
    """``(4,)`` int64: samples with each of `vqclip.data.members.KINDS`."""


def scan_shard(shard: Shard, blocks: Iterable[bytes], length: int) -> ShardPart:
    """Index one shard in one pass over its bytes.

    Args:
        shard: for messages.
        blocks: all its bytes, in order.
        length: their number.

    Raises:
        DataError: it is damaged, or members of other samples are between those of a sample.
    """
    samples = _Samples(shard, 0)
    samples.read(TarWalk(shard, length), blocks)
    table = samples.members.finish()
    digests = np.frombuffer(b"".join(samples.digests), np.uint8).reshape(-1, DIGEST)
    begins, members = np.array(samples.begins, dtype=np.int64), (table.offsets >= 0).sum(axis=0)
    return ShardPart(begins, digests, members)


def scan_chunk(index: ChunkIndex, chunk: int, data: bytes, shards: Sequence[Shard]) -> SampleTable:
    """Return the samples in the bytes of a chunk, after comparing the bytes with the index.

    Args:
        index: the index.
        chunk: number of the chunk.
        data: the bytes of ``index.ranges(chunk)``, joined.
        shards: the shards, for messages.

    Returns:
        Offsets count from the beginning of ``data``.

    Raises:
        StorageError: they are not the bytes that were indexed; its `kind` is "changed shard".
    """
    tables, digests, at = [], [], 0
    ranges = index.ranges(chunk)
    try:
        for number, first, end in ranges:
            samples = _Samples(shards[number], first)
            samples.read(TarWalk(shards[number], int(index.lengths[number]), first, end), [data[at : at + end - first]])
            tables.append(_shift_offsets(samples.members.finish(), at - first))
            digests += samples.digests
            at += end - first
        fits = at == len(data) and chunk_digest(b"".join(digests)) == index.digests[chunk].tobytes()
        reason = "another digest"
    except DataError as error:
        fits, reason = False, str(error)
    if not fits or len(digests) != len(index.samples_of(chunk)):
        places = ", ".join(f"bytes {first} to {end} of {shards[number]}" for number, first, end in ranges)
        raise StorageError(
            f"{places}: changed since they were indexed, or damaged ({reason}). Restore the former file, or make the "
            "index again: vqclip data index SOURCE",
            "changed shard",
        )
    return tables[0] if len(tables) == 1 else _join_tables(tables)


class _Samples:
    """Members and digests of the samples in consecutive bytes of a shard, the first of which begins a sample."""

    def __init__(self, shard: Shard, first: int):
        self.members = MemberTable(shard, neighbours=True)
        self.begins: list[int] = []
        self.digests: list[bytes] = []
        self._at, self._hash = first, hashlib.sha256()

    def read(self, tar: TarWalk, blocks: Iterable[bytes]) -> None:
        first = self._at
        for data, members in tar.walk(blocks):
            for begin in self.members.add(members):
                if self.begins:
                    self._hash.update(data[: begin - self._at])
                    data = data[begin - self._at :]
                    self._at = begin
                    self._finish_sample()
                self.begins.append(begin if self.begins else first)
            self._hash.update(data)
            self._at += len(data)
        if self.begins:
            self._finish_sample()

    def _finish_sample(self) -> None:
        self.digests.append(self._hash.digest()[:DIGEST])
        self._hash = hashlib.sha256()


def _shift_offsets(table: SampleTable, by: int) -> SampleTable:
    return table._replace(offsets=np.where(table.offsets >= 0, table.offsets + by, -1))


def _join_tables(tables: Sequence[SampleTable]) -> SampleTable:
    bases = np.cumsum([0, *(len(table.keys) for table in tables[:-1])])
    return SampleTable(
        b"".join(table.keys for table in tables),
        np.concatenate([table.key_ends + base for table, base in zip(tables, bases, strict=True)]),
        np.concatenate([table.offsets for table in tables]),
        np.concatenate([table.sizes for table in tables]),
    )
