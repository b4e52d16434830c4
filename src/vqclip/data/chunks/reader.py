"""Random access to the samples of shards that are read chunk by chunk.

chunk, number = divmod(sample, samples of a chunk)
if the node's cache has no table of the chunk: fetch the chunk, compare its digest, parse its headers, store its table
row = the table's row `number`; the member is in the table's file, or in the tar where that is on this machine

Nothing here grows with the number of samples, and each process opens one table at a time.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from vqclip.data.chunks.cache import ChunkCache
from vqclip.data.chunks.index_file import ByteRange, ChunkIndex
from vqclip.data.chunks.scan import scan_chunk
from vqclip.data.chunks.store import ChunkStore
from vqclip.data.chunks.table import ROW, Extent, Row, make_table, parse_row
from vqclip.data.members import KINDS, SampleTable
from vqclip.data.remote.retry import Deadline
from vqclip.data.shard import Shard
from vqclip.data.sources.reader import TarReader
from vqclip.errors import DataError, StorageError

__all__ = ["ChunkReader"]

logger = logging.getLogger("vqclip.data")
T = TypeVar("T")

_TABLE = ROW + 16
"""Bytes of the table for a sample, about: its row and its name."""


class _OpenTable(NamedTuple):
    """An open table of a chunk."""

    chunk: int
    file: int
    """Its descriptor."""
    digest: bytes
    ranges: tuple[ByteRange, ...]


class ChunkReader(TarReader):
    """Reads members of samples through a chunk index; the other reader is `vqclip.data.sources.reader.ShardReader`.

    Works in any process and after a fork or spawn.

    Args:
        shards: plain tar files, here or at URLs.
        index: index of them.
        store: reads their bytes.
        cache: the node's cache of tables and chunks.
        total_s: longest time for a chunk.
    """

    def __init__(
        self, shards: Sequence[Shard], index: ChunkIndex, store: ChunkStore, cache: ChunkCache, total_s: float
    ):
        self._table: _OpenTable | None = None  # the one in use; first, since `__del__` needs it
        self._last: tuple[int, Row] | None = None
        self._shards, self._cache, self._total_s = shards, cache, total_s
        self.index = index
        self.store = store
        self.is_remote = any(not isinstance(shard, Path) for shard in shards)
        """True if any shard is at a URL."""

    def __len__(self) -> int:
        return self.index.samples

    def key(self, index: int) -> str:
        """Return the sample's name in its shard."""
        extent = self._row(index).key
        name = self._from_table(self._chunk_of(index), lambda table: _read_extent(table.file, extent))
        return name.decode("utf-8", "backslashreplace")

    def _shard_and_key(self, index: int) -> tuple[str, str]:
        shard = self._shards[self._shard_of(index)]
        try:
            return str(shard), self.key(index)
        except DataError:  # the message is about another failure, and must not be lost
            return str(shard), f"number {index} of the source"

    def place(self, index: int) -> str:
        """Return shard and sample, ``00003.tar/000031415``."""
        return f"{self.index.shard_name(self._shard_of(index))}/{self.key(index)}"

    def count(self, kind: str) -> int:
        """Return the number of samples with a member of this kind (see `vqclip.data.index.KINDS`)."""
        return int(self.index.members[KINDS.index(kind)])

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """File name, size and samples of every shard; the index has checksums of chunks only."""
        counts = (self.index.firsts[1:] - self.index.firsts[:-1]).tolist()
        sizes = zip(self._shards, self.index.lengths.tolist(), counts, strict=True)
        return [{"name": shard.name, "bytes": size, "samples": count} for shard, size, count in sizes]

    @property
    def sha256(self) -> str:
        """Checksum of the content; names and folders of the files do not matter."""
        return self.index.content

    def read(self, index: int, kind: str) -> bytes:
        """Read one member of one sample; see `TarReader.read`."""
        extent: Extent | None = getattr(self._row(index), kind)
        self._require_readable(index, kind, extent and extent.size)
        assert extent is not None
        chunk = self._chunk_of(index)
        if self._has_data(chunk):
            return self._from_table(chunk, lambda table: _read_extent(table.file, extent))
        ranges = self._from_table(chunk, lambda table: table.ranges)
        data = self.store.read([_shift(ranges, extent)])
        if zlib.crc32(data) != extent.crc:
            raise StorageError(
                f"{self.name(index)}: its bytes have changed since the chunk was verified, and neither size nor time "
                "of the shard has. Is the disk damaged, or was the shard written to? Restore it, or index it again",
                "changed shard",
            )
        return data

    def fetch(self, chunk: int) -> None:
        """Put the table of a chunk into the node's cache, unless it is there."""
        os.close(self._open(chunk))

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards and tables."""
        return int(self.index.lengths.sum()) + len(self) * _TABLE

    @property
    def cache_room(self) -> int:
        """Bytes of the cache that are never removed as long as no more is used at a time."""
        return self._cache.room

    def cached_bytes(self, chunk: int) -> int:
        """Return about how many bytes of the cache a chunk takes."""
        data = sum(each.end - each.first for each in self.index.ranges(chunk)) if self._has_data(chunk) else 0
        return data + self.index.chunk * _TABLE

    def close(self) -> None:
        """Close the open table; it is opened again on demand."""
        if self._table is not None:
            os.close(self._table.file)
            self._table = self._last = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        # A descriptor is not valid in a spawned worker.
        return {**self.__dict__, "_table": None, "_last": None}

    def _chunk_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index // self.index.chunk

    def _shard_of(self, index: int) -> int:
        return int(self.index.firsts.searchsorted(index, side="right")) - 1

    def _has_data(self, chunk: int) -> bool:
        """Return whether the table of a chunk holds its bytes too: a shard of it is not on this machine."""
        return self.is_remote and any(
            not isinstance(self._shards[each.shard], Path) for each in self.index.ranges(chunk)
        )

    def _row(self, index: int) -> Row:
        if self._last is None or self._last[0] != index:
            number, place = index % self.index.chunk, index % self.index.chunk * ROW
            row = self._from_table(
                self._chunk_of(index),
                lambda table: parse_row(table.digest, number, os.pread(table.file, ROW, place)),
            )
            self._last = index, row  # of a sample, text and image are read
        return self._last[1]

    def _from_table(self, chunk: int, get: Callable[[_OpenTable], T | None]) -> T:
        """Return what `get` reads from the table of a chunk; the table is made again if it reads None: damage."""
        for again in (False, True):
            if self._table is None or self._table.chunk != chunk:
                self.close()
                self._table = _OpenTable(chunk, self._open_needed(chunk), self._digest(chunk), self.index.ranges(chunk))
            try:
                found = get(self._table)
            except OSError as error:
                logger.warning("%s: chunk %d cannot be read from the cache: %s", self.index.path, chunk, error.strerror)
                found = None
            if found is not None:
                return found
            self.close()
            if not again:
                logger.warning("%s: chunk %d is damaged in the cache and is fetched again", self.index.path, chunk)
                self._cache.remove(self._key(chunk))
        raise StorageError(
            f"{self._cache.folder}: chunk {chunk} of {self.index.path} is damaged whenever it is read; check the disk, "
            "or set VQCLIP_CACHE to a folder on another one"
        )

    def _open(self, chunk: int) -> int:
        deadline = Deadline(self._total_s)  # also of a fetch that begins after a wait for another one
        return self._cache.open(self._key(chunk), lambda: self._make(chunk, deadline), deadline)

    def _open_needed(self, chunk: int) -> int:
        try:
            return self._open(chunk)
        except StorageError as error:
            if error.kind == "changed shard" and self.is_remote:
                # Otherwise the next start would find this index, whatever is beside the shards by then.
                self.index.path.unlink(missing_ok=True)
            raise

    def _key(self, chunk: int) -> str:
        return f"{self._digest(chunk).hex()}-{'chunk' if self._has_data(chunk) else 'table'}"

    def _digest(self, chunk: int) -> bytes:
        return self.index.digests[chunk].tobytes()

    def _make(self, chunk: int, deadline: Deadline) -> bytes:
        """Fetch a chunk, verify it, and return its table.

        Raises:
            StorageError: it has other bytes than were indexed, also when it is read again.
        """
        data, samples = self._read_verified(chunk, deadline)
        return make_table(self._digest(chunk), samples, data, self._has_data(chunk))

    def _read_verified(self, chunk: int, deadline: Deadline) -> tuple[bytes, SampleTable]:
        ranges = self.index.ranges(chunk)
        data = self.store.read(ranges, deadline)
        try:
            return data, scan_chunk(self.index, chunk, data, self._shards)
        except StorageError as error:  # damaged on the way
            logger.warning("%s; read again", error)
        self.store.discard(ranges)
        data = self.store.read(ranges, deadline)
        return data, self._scan_again(chunk, data)

    def _scan_again(self, chunk: int, data: bytes) -> SampleTable:
        try:
            return scan_chunk(self.index, chunk, data, self._shards)
        except StorageError as error:
            raise StorageError(
                f"{error} (It is chunk {chunk} of {self.index.path}, and was read twice. With another index, a run "
                "that has checkpoints reports the difference, and continues if run.resume_allow contains data.)",
                error.kind,
            ) from None


def _read_extent(file: int, extent: Extent) -> bytes | None:
    """Read a part of a file; None if it is damaged."""
    data = os.pread(file, extent.size, extent.offset)
    return data if len(data) == extent.size and zlib.crc32(data) == extent.crc else None


def _shift(ranges: Sequence[ByteRange], extent: Extent) -> ByteRange:
    """Return the place in its shard of a part of a chunk."""
    at = extent.offset
    for each in ranges:
        if at <= each.end - each.first:  # no member begins where its range does: its header is before it
            return ByteRange(each.shard, each.first + at, each.first + at + extent.size)
        at -= each.end - each.first
    raise StorageError(
        "the index has other byte ranges than the one with which a chunk was verified; make it again: vqclip data "
        "index SOURCE",
        "changed shard",
    )
