"""Random access to the samples of shards, under any order.

    place of a member       of tars on this machine: in the index (`TarIndex.member`)
                            else: in the table of its chunk, in the node's cache
    its bytes               in the tar on this machine, or in the cache behind the table

    chunk missing in the cache: fetch its bytes, compare its digest, parse its headers, store table and bytes

Nothing here grows with the number of samples, and each process opens one chunk at a time. In the cache it is a file:

    head    bytes of the table, and CRC-32 of the digest of the chunk and the table, each uint32
    table   uint32 (samples, 4, 3): offset in the chunk, size and CRC-32 of image, .txt, .json and .cls
            uint32 (samples,): end of each name; names of the samples
    bytes   of the chunk, if a shard is not on this machine

So a damaged table, or that of another chunk, gives no sample, and every member is compared with its checksum.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.files import Shard
from vqclip.data.remote.retry import Deadline
from vqclip.data.sources.base import MAX_BYTES
from vqclip.data.tars.index import ByteRange, TarIndex, scan_chunk
from vqclip.data.tars.members import AMBIGUOUS, KINDS, NONE, USUAL, MemberRules, SampleTable
from vqclip.data.tars.store import open_files
from vqclip.errors import DataError, StorageError, encodable, printable

logger = logging.getLogger("vqclip.data")

_HEAD = "<II"
_ROW = 4 * (3 * len(KINDS) + 1)
"""Bytes of the table for a sample, without its name."""
_TABLE = _ROW + 16
"""About the bytes of the table for a sample, with its name."""
_READ = 16 << 10
"""Bytes that are read first, about those of head and table."""
_SHOWN_KEY = 200
"""Characters of a sample's name in messages; every bad sample is logged, and a tar allows 65,536 characters."""


class _OpenChunk(NamedTuple):
    """An open chunk in the cache."""

    number: int
    file: int
    """Its descriptor."""
    data_at: int
    """Place of its bytes; 0 if they are in the shards alone."""
    places: np.ndarray
    """``(samples, 4, 3)``: offset, size and CRC-32 of each of `KINDS`."""
    name_ends: np.ndarray
    names: bytes


class TarReader:
    """Reads members of samples. Works in any process and after a fork or spawn.

    Args:
        shards: tar files, here or at URLs.
        index: index of them.
        rules: the rules by which it groups members.
        cache: the node's cache of chunks.
        total_s: longest time for a chunk.
        named: the shards in messages; None: ``shards``.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        index: TarIndex,
        rules: MemberRules,
        cache: BoundedCache,
        total_s: float = 60.0,
        named: Sequence[Shard] | None = None,
    ):
        self._chunk: _OpenChunk | None = None  # the one in use; first, since `__del__` needs it
        self._shards, self._named, self._total_s = shards, named or shards, total_s
        self.cache = cache
        self.index, self.rules = index, rules
        self.is_remote = not all(isinstance(each, Path) for each in shards)
        """True if any shard is at a URL, and is read in chunks."""
        self._in_place = index.keys is not None and not self.is_remote  # the index has the places of members

    def __len__(self) -> int:
        return self.index.samples

    def read(self, index: int, kind: str) -> bytes:
        """Read one member of one sample, of a kind of `KINDS`.

        Raises:
            DataError: the sample lacks it, or it is too large.
            StorageError: a shard cannot be read or downloaded, or has changed.
        """
        column = KINDS.index(kind)
        if not 0 <= index < len(self):
            raise IndexError(index)
        if not self._in_place:
            return self._read_from_chunk(index, column)
        offset, size = self.index.member(index, column)
        if offset < 0 or size > MAX_BYTES[kind]:
            raise self._unusable(index, kind, offset, size)
        shard = self.index.shard_of(index)
        path = self._shards[shard]
        assert isinstance(path, Path)
        return open_files.read(path, self.index.stamp(shard), offset, size)

    def key(self, index: int) -> str:
        """Return the sample's name in its shard: the path of its members without their endings."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.index.keys is not None:
            return _printable_key(self.index.keys.read(index))
        number, row = divmod(index, self.index.chunk)
        chunk = self._open_chunk(number)
        return chunk.names[chunk.name_ends[row - 1] if row else 0 : chunk.name_ends[row]].decode()

    def name(self, index: int) -> str:
        """Return shard and sample, for messages."""
        shard = self._named[self.index.shard_of(index)]
        try:
            key = self.key(index)
        except DataError:  # the message is about another failure, and must not be lost
            return f"{shard}: sample number {index} of the source"
        if len(key) > _SHOWN_KEY:
            key = f"{key[:_SHOWN_KEY]}... ({len(key)} characters)"
        return printable(f"{shard}: sample {key}", one_line=True)

    def place(self, index: int) -> str:
        """Return shard and sample, ``00003.tar/000031415``, without the folders that all shards have in common."""
        shard = self.index.names.read(self.index.shard_of(index))
        return f"{printable(shard, one_line=True)}/{self.key(index)}"

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """File name, size, samples and ``sha256`` of every shard: that of the digests of its samples."""
        counts = np.diff(self.index.firsts).tolist()
        facts = zip(self._named, self.index.lengths.tolist(), counts, self.index.shard_digests, strict=True)
        return [
            {"name": encodable(shard.name), "bytes": size, "samples": count, "sha256": digest.tobytes().hex()}
            for shard, size, count, digest in facts
        ]

    def fetch(self, chunk: int) -> None:
        """Put a chunk into the node's cache, unless it is there."""
        os.close(self._open(chunk))

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards and tables."""
        return int(self.index.lengths.sum()) + len(self) * _TABLE

    def cached_bytes(self, chunk: int) -> int:
        """Return about how many bytes of the cache a chunk takes."""
        data = sum(each.end - each.first for each in self.index.ranges(chunk)) if self.is_remote else 0
        return data + self.index.chunk * _TABLE

    def close(self) -> None:
        """Close the open chunk; it is opened again on demand."""
        if self._chunk is not None:
            os.close(self._chunk.file)
            self._chunk = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_chunk": None}  # a descriptor is not valid in a spawned worker

    def _unusable(self, index: int, kind: str, offset: int, size: int) -> DataError:
        """Return the error for a member that is missing, ambiguous or too large."""
        name, what = self.name(index), "image (.jpg, .png, .webp, ...)" if kind == "image" else f".{kind}"
        if offset == NONE:
            return DataError(f"{name}: has no {what}", "missing member")
        if offset == AMBIGUOUS:
            setting = "image_member" if kind == "image" else "caption_member"
            return DataError(f"{name}: has two members for its {what}; choose one by {setting}", "two members")
        return DataError(f"{name}: {kind} of {size} bytes; at most {MAX_BYTES[kind]} are read", "too many bytes")

    # ---- chunks

    def _read_from_chunk(self, index: int, column: int) -> bytes:
        number, row = divmod(index, self.index.chunk)
        for _ in range(2):
            chunk = self._open_chunk(number)
            offset, size, crc = chunk.places[row, column].tolist()
            if offset >= 2**32 - 2 or size > MAX_BYTES[KINDS[column]]:
                raise self._unusable(index, KINDS[column], offset - 2**32 * (offset >= 2**32 - 2), size)
            if chunk.data_at:
                data = _pread(chunk.file, size, chunk.data_at + offset)
            else:
                data = self._read_ranges([_place_in_shard(self.index.ranges(number), offset, size)])
            if len(data) == size and zlib.crc32(data) == crc:
                return data
            if not chunk.data_at:
                raise StorageError(
                    f"{self.name(index)}: its bytes have changed since the chunk was verified, but not size and time "
                    "of the shard. Is the disk damaged, or was it written to? Restore the shard, or index it again",
                    "changed shard",
                )
            self._remove(number)
        raise self._damage_error(number)

    def _open_chunk(self, number: int) -> _OpenChunk:
        """Return a chunk, opened; it is fetched if it is not in the cache, and again if its table is damaged there."""
        if self._chunk is not None and self._chunk.number == number:
            return self._chunk
        self.close()
        for _ in range(2):
            try:
                file = self._open(number)
            except StorageError as error:
                if error.kind == "changed shard" and self.is_remote:
                    # Otherwise the next start would find this index, whatever is beside the shards by then.
                    self.index.path.unlink(missing_ok=True)
                raise
            samples = len(self.index.samples_of(number))
            self._chunk = _parse_table(file, number, samples, self._digest(number), self.is_remote)
            if self._chunk is not None:
                return self._chunk
            os.close(file)
            self._remove(number)
        raise self._damage_error(number)

    def _open(self, chunk: int) -> int:
        deadline = Deadline(self._total_s)  # also of a fetch that begins after a wait for another one
        return self.cache.open(self._key(chunk), lambda: self._make(chunk, deadline), deadline)

    def _remove(self, chunk: int) -> None:
        self.close()
        logger.warning("%s: chunk %d is damaged in the cache and is fetched again", self.index.path, chunk)
        self.cache.remove(self._key(chunk))

    def _damage_error(self, chunk: int) -> StorageError:
        return StorageError(
            f"{self.cache.folder}: chunk {chunk} of {self.index.path} is damaged whenever it is read; check the disk, "
            "or set VQCLIP_CACHE to a folder on another one"
        )

    def _read_ranges(self, ranges: Sequence[ByteRange], deadline: Deadline | None = None) -> bytes:
        """Return the bytes of all ranges, one after the other; may be called by several threads.

        Bytes at URLs may come from a changed shard of the same size: compare a checksum.
        """
        parts = []
        for number, first, end in ranges:
            shard = self._shards[number]
            if isinstance(shard, Path):
                parts.append(open_files.read(shard, self.index.stamp(number), first, end - first))
            else:
                parts.append(shard.read(first, end, int(self.index.lengths[number]), deadline))
        return b"".join(parts)

    def _key(self, chunk: int) -> str:
        rules = "" if self.rules == USUAL else f"-{zlib.crc32(repr(self.rules).encode()):08x}"
        return f"{self._digest(chunk).hex()}-{'chunk' if self.is_remote else 'table'}{rules}"

    def _digest(self, chunk: int) -> bytes:
        return self.index.digests[chunk].tobytes()

    def _make(self, chunk: int, deadline: Deadline) -> bytes:
        """Fetch a chunk, verify it, and return what the cache keeps of it.

        Raises:
            StorageError: it has other bytes than were indexed, also when it is read again.
        """
        ranges = self.index.ranges(chunk)
        for is_last in (False, True):
            data = self._read_ranges(ranges, deadline)
            try:
                samples = scan_chunk(self.index, chunk, data, self._shards, self.rules)
                break
            except StorageError as error:
                if is_last:
                    raise StorageError(
                        f"{error} (It is chunk {chunk} of {self.index.path}, and was read twice. With a new index, a "
                        "run with checkpoints reports the difference; it continues if run.resume_allow contains data.)",
                        error.kind,
                    ) from None
                logger.warning("%s; read again", error)  # it may have been damaged on the way
        return _make_table(self._digest(chunk), samples, data, self.is_remote)


def _make_table(digest: bytes, samples: SampleTable, data: bytes, with_data: bool) -> bytes:
    """Return head and table of a chunk, and its bytes.

    Args:
        digest: of the chunk.
        samples: its samples, with offsets in ``data``.
        data: bytes of the chunk, less than 4 GiB.
        with_data: append the bytes of the chunk.
    """
    view = memoryview(data)
    places = np.stack([samples.offsets, samples.sizes, samples.sizes], axis=2).astype(np.uint32)
    for offset, place in zip(samples.offsets.ravel().tolist(), places.reshape(-1, 3), strict=True):
        place[2] = zlib.crc32(view[offset : offset + int(place[1])]) if offset >= 0 else 0
    names = [_printable_key(samples.keys.read(number)).encode() for number in range(len(samples))]
    ends = np.cumsum([len(name) for name in names], dtype=np.uint32)
    table = b"".join([places.tobytes(), ends.tobytes(), *names])
    head = struct.pack(_HEAD, len(table), zlib.crc32(table, zlib.crc32(digest)))
    return b"".join([head, table, data if with_data else b""])


def _parse_table(file: int, number: int, samples: int, digest: bytes, has_data: bool) -> _OpenChunk | None:
    """Read head and table of a chunk in the cache; None if they are damaged, or those of another chunk."""
    start, head = _pread(file, _READ, 0), struct.calcsize(_HEAD)
    if len(start) < head:
        return None
    size, crc = struct.unpack(_HEAD, start[:head])
    table = start[head : head + size]
    if len(table) < size:
        table += _pread(file, size - len(table), len(start))
    if len(table) != size or size < samples * _ROW or crc != zlib.crc32(table, zlib.crc32(digest)):
        return None
    places = np.frombuffer(table, np.uint32, samples * 3 * len(KINDS)).reshape(samples, len(KINDS), 3)
    ends = np.frombuffer(table, np.uint32, samples, places.nbytes)
    return _OpenChunk(number, file, head + size if has_data else 0, places, ends, table[samples * _ROW :])


def _pread(file: int, size: int, first: int) -> bytes:
    """Read a part of a file in the cache; nothing if the disk cannot."""
    try:
        return os.pread(file, size, first)
    except OSError as error:
        logger.warning("the cache cannot be read: %s", error.strerror)
        return b""


def _printable_key(key: str) -> str:
    """Return the name of a sample with escapes for bytes that are not UTF-8."""
    try:
        return key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # of an index that was not made by vqclip
        return encodable(key)


def _place_in_shard(ranges: Sequence[ByteRange], offset: int, size: int) -> ByteRange:
    """Return the place in its shard of a part of a chunk."""
    at = offset
    for each in ranges:
        if at <= each.end - each.first:  # no member begins where its range does: its header is before it
            return ByteRange(each.shard, each.first + at, each.first + at + size)
        at -= each.end - each.first
    raise StorageError("the index has other byte ranges than its chunk in the cache; make it again", "changed shard")
