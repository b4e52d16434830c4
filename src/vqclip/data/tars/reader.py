"""Random access to the samples of shards, under any order.

    place of a member       of tars on this machine: in the index (`TarIndex.member`)
                            else: in the table of its chunk, in the node's cache
    its bytes               in the tar on this machine, or in the cache beside the table

    chunk missing in the cache: fetch its bytes, compare its digest, parse its headers, store table and bytes

Nothing here grows with the number of samples, and each process opens one table at a time. A table is a file:

    rows   64 bytes a sample: offset, size and CRC-32 of its image, .txt, .json, .cls and name; CRC-32 of the row
    names  of the samples
    bytes  of the chunk, where a shard of it is not on this machine

Offsets of names count from the start of the table; those of members too where the bytes follow, otherwise from the
start of the chunk. The checksum of a row covers the digest of the chunk and the number of the row: a damaged table, or
that of another chunk, gives no sample.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.retry import Deadline
from vqclip.data.shard import Shard
from vqclip.data.sources.base import MAX_BYTES
from vqclip.data.table_file import Texts
from vqclip.data.tars.headers import TarWalk
from vqclip.data.tars.index import ByteRange, TarIndex, chunk_digest
from vqclip.data.tars.members import AMBIGUOUS, KINDS, NONE, USUAL, MemberRules, MemberScan, SampleTable
from vqclip.data.tars.store import ShardStore, is_whole
from vqclip.errors import DataError, StorageError, encodable, printable

__all__ = ["ROW", "TarReader", "scan_chunk"]

logger = logging.getLogger("vqclip.data")
T = TypeVar("T")

_COLUMNS = (*KINDS, "key")
_FORMAT = f"<{3 * len(_COLUMNS)}I"
ROW = struct.calcsize(_FORMAT) + 4
"""Bytes of a row."""
_TABLE = ROW + 16
"""Bytes of the table for a sample, about: its row and its name."""
_MAX_NAME = 1 << 20
"""Bytes of the name of a sample at most; `vqclip.data.tars.headers` reads fewer."""
_SHOWN_KEY = 200
"""Characters of a sample's name in messages; every bad sample is logged, and a tar allows 65,536 characters."""


class Extent(NamedTuple):
    """Place of some bytes, and their checksum."""

    offset: int
    size: int
    crc: int


class _OpenTable(NamedTuple):
    """An open table of a chunk."""

    chunk: int
    file: int
    """Its descriptor."""
    digest: bytes
    ranges: tuple[ByteRange, ...]


class TarReader:
    """Reads members of samples. Works in any process and after a fork or spawn.

    Args:
        shards: tar files, here or at URLs.
        index: index of them.
        rules: the rules by which it groups members.
        cache: the node's cache of tables and chunks.
        total_s: longest time for a chunk.
    """

    def __init__(
        self, shards: Sequence[Shard], index: TarIndex, rules: MemberRules, cache: BoundedCache, total_s: float = 60.0
    ):
        self._table: _OpenTable | None = None  # the one in use; first, since `__del__` needs it
        self._last: tuple[int, list[Extent]] | None = None
        self._shards, self._cache, self._total_s = shards, cache, total_s
        self.index, self.rules = index, rules
        self.store = ShardStore(shards, index)
        self.is_remote = not all(map(is_whole, shards))
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
        column, length = KINDS.index(kind), len(self)
        if not 0 <= index < length:
            raise IndexError(index)
        if self._in_place:
            offset, size = self.index.member(index, column)
        else:
            offset, size, crc = self._extents(index)[column]
        if offset < 0 or size > MAX_BYTES[kind]:
            raise self._unusable(index, kind, offset, size)
        if not self._in_place:
            return self._read_from_chunk(index, Extent(offset, size, crc))
        shard = self.index.shard_of(index)
        path = self._shards[shard]
        if not isinstance(path, Path):
            return self.store.read([ByteRange(shard, offset, offset + size)])
        try:
            return self.store.files.read(path, self.store.stamp(shard), offset, size, "")
        except StorageError as error:
            raise StorageError(f"{self.name(index)}{error}", error.kind) from None

    def text(self, index: int, kind: str, data: bytes) -> str:
        """Return the member that `read` has returned as text, without white space or a byte order mark around it.

        Raises:
            DataError: it is not UTF-8.
        """
        try:
            return data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name(index)}: .{kind} is not UTF-8: {error.reason} at byte {error.start}", "not UTF-8"
            ) from None

    def key(self, index: int) -> str:
        """Return the sample's name in its shard: the path of its members without their endings."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.index.keys is not None:
            return _printable_key(self.index.keys.read(index))
        extent = self._extents(index)[-1]
        name = self._from_table(index // self.index.chunk, lambda table: _read_extent(table.file, extent))
        return name.decode()

    def name(self, index: int) -> str:
        """Return shard and sample, for messages."""
        shard = self._shards[self.index.shard_of(index)]
        try:
            key = self.key(index)
        except DataError:  # the message is about another failure, and must not be lost
            return f"{shard}: sample number {index} of the source"
        if len(key) > _SHOWN_KEY:
            key = f"{key[:_SHOWN_KEY]}... ({len(key)} characters)"
        return printable(f"{shard}: sample {key}", one_line=True)

    def place(self, index: int) -> str:
        """Return shard and sample, ``00003.tar/000031415``, without the folders that all shards have in common."""
        return f"{self.index.shard_name(self.index.shard_of(index))}/{self.key(index)}"

    def count(self, kind: str) -> int:
        """Return the number of samples with a member of this kind (see `KINDS`)."""
        return self.index.facts.members[KINDS.index(kind)]

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """File name, size, samples and ``sha256`` of every shard: that of the digests of its samples."""
        counts = np.diff(self.index.firsts).tolist()
        facts = zip(self._shards, self.index.lengths.tolist(), counts, self.index.shard_digests, strict=True)
        return [
            {"name": encodable(shard.name), "bytes": size, "samples": count, "sha256": digest.tobytes().hex()}
            for shard, size, count, digest in facts
        ]

    @property
    def sha256(self) -> str:
        """Checksum of the content; names and folders of the files do not matter."""
        return self.index.facts.content

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

    def _read_from_chunk(self, index: int, extent: Extent) -> bytes:
        chunk = index // self.index.chunk
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

    def _has_data(self, chunk: int) -> bool:
        """Return whether the table of a chunk holds its bytes too: a shard of it is not on this machine."""
        return self.is_remote and any(not is_whole(self._shards[each.shard]) for each in self.index.ranges(chunk))

    def _extents(self, index: int) -> list[Extent]:
        """Return the extents of the members and the name of a sample, from the table of its chunk."""
        if self._last is None or self._last[0] != index:
            chunk, number = divmod(index, self.index.chunk)
            row = self._from_table(
                chunk, lambda table: _parse_row(table.digest, number, os.pread(table.file, ROW, number * ROW))
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
        return self._cache.open(self._key(chunk), lambda part: part.write(self._make(chunk, deadline)), deadline)

    def _open_needed(self, chunk: int) -> int:
        try:
            return self._open(chunk)
        except StorageError as error:
            if error.kind == "changed shard" and self.is_remote:
                # Otherwise the next start would find this index, whatever is beside the shards by then.
                self.index.path.unlink(missing_ok=True)
            raise

    def _key(self, chunk: int) -> str:
        rules = "" if self.rules == USUAL else f"-{zlib.crc32(repr(self.rules).encode()):08x}"
        return f"{self._digest(chunk).hex()}-{'chunk' if self._has_data(chunk) else 'table'}{rules}"

    def _digest(self, chunk: int) -> bytes:
        return self.index.digests[chunk].tobytes()

    def _make(self, chunk: int, deadline: Deadline) -> bytes:
        """Fetch a chunk, verify it, and return its table.

        Raises:
            StorageError: it has other bytes than were indexed, also when it is read again.
        """
        ranges = self.index.ranges(chunk)
        for is_last in (False, True):
            data = self.store.read(ranges, deadline)
            try:
                samples = scan_chunk(self.index, chunk, data, self._shards, self.rules)
                break
            except StorageError as error:
                if is_last:
                    raise StorageError(
                        f"{error} (It is chunk {chunk} of {self.index.path}, and was read twice. With another index, a "
                        "run that has checkpoints reports the difference, and continues if run.resume_allow contains "
                        "data.)",
                        error.kind,
                    ) from None
                logger.warning("%s; read again", error)  # it may have been damaged on the way
                self.store.discard(ranges)
        return _make_table(self._digest(chunk), samples, data, self._has_data(chunk))


def scan_chunk(
    index: TarIndex, chunk: int, data: bytes, shards: Sequence[Shard], rules: MemberRules = USUAL
) -> SampleTable:
    """Return the samples in the bytes of a chunk, after comparing the bytes with the index.

    Args:
        index: the index.
        chunk: number of the chunk.
        data: the bytes of ``index.ranges(chunk)``, joined.
        shards: the shards, for messages.
        rules: the rules by which the index groups members.

    Returns:
        Offsets count from the beginning of ``data``.

    Raises:
        StorageError: they are not the bytes that were indexed; its `kind` is "changed shard".
    """
    keys, offsets, sizes, digests, at = [], [], [], b"", 0
    ranges = index.ranges(chunk)
    try:
        for number, first, end in ranges:
            walk = TarWalk(shards[number], int(index.lengths[number]), first, end)
            scan = MemberScan(shards[number], first, rules).read(walk, [data[at : at + end - first]])
            table = scan.table
            keys += [table.keys.read(row) for row in range(len(table))]
            offsets.append(np.where(table.offsets >= 0, table.offsets + at - first, table.offsets))
            sizes.append(table.sizes)
            digests += scan.digests.tobytes()
            at += end - first
        fits = at == len(data) and chunk_digest(digests) == index.digests[chunk].tobytes()
        reason = "another digest"
    except DataError as error:
        fits, reason = False, str(error)
    if not fits or len(keys) != len(index.samples_of(chunk)):
        places = ", ".join(f"bytes {first} to {end} of {shards[number]}" for number, first, end in ranges)
        raise StorageError(
            f"{places}: changed since they were indexed, or damaged ({reason}). Restore the former file, or make the "
            "index again: vqclip data index SOURCE",
            "changed shard",
        )
    return SampleTable(Texts.join(keys), np.concatenate(offsets), np.concatenate(sizes))


def _make_table(digest: bytes, samples: SampleTable, data: bytes, with_data: bool) -> bytes:
    """Return the table of a chunk.

    Args:
        digest: of the chunk.
        samples: its samples, with offsets in ``data``.
        data: bytes of the chunk, less than 4 GiB with the table.
        with_data: append the bytes of the chunk.
    """
    view, count = memoryview(data), len(samples)
    names = [_printable_key(samples.keys.read(number)).encode() for number in range(count)]
    name_at, data_at = count * ROW, count * ROW + sum(map(len, names))
    rows = bytearray()
    for number, name in enumerate(names):
        fields: list[int] = []
        for offset, size in zip(samples.offsets[number].tolist(), samples.sizes[number].tolist(), strict=True):
            if offset >= 0:
                fields += [offset + data_at * with_data, size, zlib.crc32(view[offset : offset + size])]
            else:
                fields += [offset + 2**32, 0, 0]
        body = struct.pack(_FORMAT, *fields, name_at, len(name), zlib.crc32(name))
        rows += body + _row_checksum(digest, number, body).to_bytes(4, "little")
        name_at += len(name)
    return b"".join([rows, *names, data if with_data else b""])


def _parse_row(digest: bytes, number: int, body: bytes) -> list[Extent] | None:
    """Return the extents in a row of the table of the chunk with this digest; None if it is damaged."""
    body, checksum = body[:-4], body[-4:]
    if len(body) != ROW - 4 or checksum != _row_checksum(digest, number, body).to_bytes(4, "little"):
        return None
    extents = [Extent(*each) for each in struct.iter_unpack("<3I", body)]
    if extents[-1].size > _MAX_NAME:
        return None
    return [each._replace(offset=each.offset - 2**32) if each.offset >= 2**32 - 2 else each for each in extents]


def _printable_key(key: str) -> str:
    """Return the name of a sample with escapes for bytes that are not UTF-8."""
    try:
        return key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # of an index that was not made by vqclip
        return encodable(key)


def _row_checksum(digest: bytes, number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(digest + number.to_bytes(4, "little")))


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
