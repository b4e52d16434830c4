"""Bytes of shards: of files on this machine, which stay open, and of parts of shards at URLs."""

from __future__ import annotations

import logging
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from vqclip.data.remote import GzipShard, RemoteShard, is_gzip
from vqclip.data.remote.retry import Deadline
from vqclip.data.remote.transfer import NoRangesError
from vqclip.data.shard import Shard
from vqclip.data.tars.index import ByteRange, TarIndex
from vqclip.errors import StorageError
from vqclip.io.files import Stamp

__all__ = ["OpenFiles", "ShardStore", "is_whole"]

logger = logging.getLogger("vqclip.data")


def is_whole(shard: Shard) -> bool:
    """Return whether a shard is a file on this machine, or becomes one: a compressed one is unpacked into the cache."""
    return not isinstance(shard, RemoteShard) or is_gzip(shard.name)


class ShardStore:
    """Reads ranges of bytes of shards.

    May be used by several threads, after a fork, and in spawned workers. A server that answers a request for a part of
    a shard with all of it is asked for whole shards from then on, which go to the cache of shards; they must fit in it.
    So do compressed shards, unpacked.

    Args:
        shards: tar files, here or at URLs.
        index: their sizes and tags.
    """

    def __init__(self, shards: Sequence[Shard], index: TarIndex):
        self._shards, self._index = shards, index
        self.files = OpenFiles()
        """The files on this machine."""
        self._whole: set[str] = set()

    def read(self, ranges: Sequence[ByteRange], deadline: Deadline | None = None) -> bytes:
        """Return the bytes of all ranges, one after the other.

        Args:
            ranges: each of at least one byte.
            deadline: ends all waits for the server; default `remote.total_s` of the first shard at a URL.

        Raises:
            StorageError: a shard cannot be read; or it has another size than in the index, or, on this machine, another
                modification time (`kind` is then "changed shard"); or a server sends whole shards only, for which the
                cache is too small. Bytes at URLs may come from a changed shard of the same size: compare a checksum.
        """
        parts = []
        for shard, first, end in ((each.shard, each.first, each.end) for each in ranges):
            where = self._shards[shard]
            if isinstance(where, Path):
                parts.append(self.files.read(where, self.stamp(shard), first, end - first, str(where)))
            elif isinstance(where, GzipShard) or is_gzip(where.name):
                parts.append(self._read_whole(where, int(self._index.lengths[shard]), first, end))
            else:
                deadline = deadline or Deadline(where.options.total_s)
                parts.append(self._fetch(where, shard, first, end, deadline))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stamp(self, shard: int) -> tuple[int, int]:
        """Return size and modification time of a shard on this machine when it was indexed."""
        return int(self._index.lengths[shard]), int(self._index.tag(shard))

    def discard(self, ranges: Sequence[ByteRange]) -> None:
        """Remove copies of whole shards from the cache, so that the next `read` asks the server."""
        for each in ranges:
            where = self._shards[each.shard]
            if not isinstance(where, Path):
                where.discard()

    def _fetch(self, shard: RemoteShard, number: int, first: int, end: int, deadline: Deadline) -> bytes:
        length = int(self._index.lengths[number])
        if shard.host not in self._whole:
            try:
                return shard.read(first, end, length, deadline)
            except NoRangesError:
                if shard.host not in self._whole:  # another thread may have been first
                    self._require_room(shard)
                    self._whole.add(shard.host)
                    logger.warning("%s: the server sends no parts of files: shards are fetched whole, cached", shard)
        return self._read_whole(shard, length, first, end)

    def _read_whole(self, shard: RemoteShard | GzipShard, length: int, first: int, end: int) -> bytes:
        file = shard.open(length)
        if os.fstat(file).st_size != length:  # a copy of a former file
            os.close(file)
            shard.discard()
            file = shard.open(length)
        try:
            if (now := os.fstat(file).st_size) != length:
                raise StorageError(
                    f"{shard}: has changed since it was indexed: {length} bytes then, {now} bytes now", "changed shard"
                )
            return _pread(file, first, end - first)
        finally:
            os.close(file)

    def _require_room(self, shard: RemoteShard) -> None:
        """Raise StorageError if the cache cannot hold all shards of a host: each would be fetched for every chunk."""
        pairs = zip(self._shards, self._index.lengths, strict=True)
        size = sum(int(length) for each, length in pairs if isinstance(each, RemoteShard) and each.host == shard.host)
        if size > shard.options.cache_bytes:
            raise StorageError(
                f"{shard}: the server sends no parts of files, and its {size / 2**30:.3g} GiB of shards do not fit in "
                f"remote.cache_gib={shard.options.cache_gib:g}, so that each would be fetched many times. Expected a "
                "server that answers requests with Range, or a larger cache"
            )


def _most_open_files() -> int:
    """Return a quarter of the files that this process may open, at most 1,024."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if allowed == resource.RLIM_INFINITY else max(1, min(1024, allowed // 4))


class OpenFiles:
    """Reads shards by `pread`, and keeps the recently used ones open.

    Works in several threads, after a fork and in spawned workers: reading does not move a file position, and files are
    opened on demand.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._most = _most_open_files()
        weakref.finalize(self, _close_all, self._files)  # `__del__` fails when the interpreter ends
        self._lock = threading.Lock()

    def read(self, path: Path, stamp: tuple[int, int], first: int, size: int, name: str) -> bytes:
        """Read bytes of a shard.

        Args:
            path: the shard.
            stamp: its size and modification time in nanoseconds when it was indexed.
            first: the first byte.
            size: number of bytes.
            name: for messages.

        Raises:
            StorageError: it cannot be read, or has changed (`kind` is then "changed shard").
        """
        try:
            with self._lock:
                file = os.dup(self._open(path, stamp, name))
            try:
                data = os.pread(file, size, first)
                if len(data) < size:  # one call returns at most 2 GiB
                    data += _pread(file, first + len(data), size - len(data))
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(f"{name}: cannot be read: {error.strerror}", "unreadable shard") from None
        if len(data) != size:
            raise StorageError(f"{name}: the shard became shorter while it was in use", "changed shard")
        return data

    def _open(self, path: Path, stamp: tuple[int, int], name: str) -> int:
        file = self._files.pop(path, None)
        if file is None:
            # Non-blocking: a pipe in place of the shard must not make the run wait.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if Stamp.of(file) != stamp:  # before every read, as the file may change while it is open
                raise StorageError(
                    f"{name}: the shard has changed since it was indexed; start the run again", "changed shard"
                )
        except BaseException:  # a stale handle of a network disk too: the next read opens the file again
            os.close(file)
            raise
        self._files[path] = file  # the last one used
        if len(self._files) > self._most:
            os.close(self._files.popitem(last=False)[1])
        return file

    def close(self) -> None:
        """Close the files; they are opened again on demand."""
        with self._lock:
            _close_all(self._files)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # descriptors are not valid in a spawned worker


def _close_all(files: OrderedDict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _pread(file: int, first: int, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file; one call may return less, and at most 2 GiB."""
    data = os.pread(file, size, first)
    while 0 < len(data) < size and (more := os.pread(file, size - len(data), first + len(data))):
        data += more
    return data
