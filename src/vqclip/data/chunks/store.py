"""Bytes of shards, on this machine or at URLs, without a download of whole shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vqclip.data.chunks.index_file import ByteRange, ChunkIndex
from vqclip.data.open_files import OpenFiles
from vqclip.data.remote import RemoteShard
from vqclip.data.remote.retry import Deadline
from vqclip.data.remote.transfer import NoRangesError
from vqclip.data.shard import Shard
from vqclip.errors import StorageError

__all__ = ["ChunkStore"]

logger = logging.getLogger("vqclip.data")


class ChunkStore:
    """Reads ranges of bytes of shards.

    May be used by several threads, after a fork, and in spawned workers. A server that answers a request for a part of
    a shard with all of it is asked for whole shards from then on, which go to the cache of shards; they must fit in it.

    Args:
        shards: tar files, here or at URLs, not compressed.
        index: their sizes and tags.
    """

    def __init__(self, shards: Sequence[Shard], index: ChunkIndex):
        self._shards, self._index = shards, index
        self._files = OpenFiles()
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
            if isinstance(where, RemoteShard):
                deadline = deadline or Deadline(where.options.total_s)
                parts.append(self._fetch(where, shard, first, end, deadline))
            else:
                assert isinstance(where, Path), "compressed shards have no ranges"
                stamp = int(self._index.lengths[shard]), int(self._index.tag(shard))
                parts.append(self._files.read(where, stamp, first, end - first, str(where)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def discard(self, ranges: Sequence[ByteRange]) -> None:
        """Remove copies of whole shards from the cache, so that the next `read` asks the server."""
        for each in ranges:
            where = self._shards[each.shard]
            if isinstance(where, RemoteShard):
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
        file = shard.open(length)
        if os.fstat(file).st_size != length:  # a copy of a former file
            os.close(file)
            shard.discard()
            file = shard.open(length)
        try:
            if (now := os.fstat(file).st_size) != length:
                raise shard.change_error(f"{length} bytes", f"{now} bytes")
            return os.pread(file, end - first, first)
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
