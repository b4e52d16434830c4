"""Sources of plain tars that are read in chunks."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vqclip.data.chunks.cache import ChunkCache
from vqclip.data.chunks.index_file import ChunkIndex, open_index
from vqclip.data.chunks.make import CHUNK, make_index
from vqclip.data.chunks.reader import ChunkReader
from vqclip.data.chunks.store import ChunkStore
from vqclip.data.remote import RemoteConfig
from vqclip.data.shard import Part, Shard
from vqclip.errors import DataError
from vqclip.io.cache import cache_folder

if TYPE_CHECKING:
    from vqclip.data.sources.base import Source

__all__ = ["ChunkedTars", "IndexPart"]

logger = logging.getLogger("vqclip.data")


class TarConfig(Protocol):
    """Configuration of a source of tars."""

    @property
    def remote(self) -> RemoteConfig:
        """Download and caching of shards at URLs."""
        ...

    def shards(self) -> Sequence[Shard]:
        """Return the tars."""
        ...

    def build(self, cache: Path | None = None) -> Source:
        """Open them to be read sample by sample."""
        ...


@dataclass(frozen=True)
class ChunkedTars:
    """Prepares and opens a source of tars to be read in chunks.

    A source with tars at URLs or compressed ones is read sample by sample.
    """

    config: TarConfig
    """Configuration of the source."""
    chunk: int
    """Samples of a chunk of the order."""
    open: Callable[[ChunkReader], Source]
    """Makes the source."""

    def shards(self) -> Sequence[Shard | Part]:
        """Return the index of the chunks, or the tars; see `SourceConfigBase.shards`."""
        shards = self.config.shards()
        return [IndexPart(tuple(shards), self.chunk)] if all(map(_is_plain, shards)) else shards

    def build(self, cache: Path | None = None) -> Source:
        """Open the data; see `SourceConfigBase.build`."""
        shards, remote = self.config.shards(), self.config.remote
        if not all(map(_is_plain, shards)):
            return self.config.build(cache)
        index = IndexPart(tuple(shards), self.chunk).load(cache)
        chunks = ChunkCache((cache or cache_folder()) / "chunks", remote.cache_bytes)
        return self.open(ChunkReader(shards, index, ChunkStore(shards, index), chunks, remote.total_s))


@dataclass(frozen=True)
class IndexPart:
    """The index of the chunks of a source."""

    tars: tuple[Shard, ...]
    chunk: int
    """Samples of a chunk of the order; chunks of the index divide it."""

    def __str__(self) -> str:
        return f"{self.tars[0]} and {len(self.tars) - 1} more"

    def prepare(self, cache: Path | None = None) -> None:
        """Make the index, unless it is there and fits the tars."""
        path = self._path(cache)
        if path.exists():
            try:
                if _is_current(open_index(path), self.tars):
                    return
            except DataError as error:
                logger.warning("%s", error)
        make_index(self.tars, path, choose_chunk(self.chunk))

    def load(self, cache: Path | None = None) -> ChunkIndex:
        """Open the index, after making a missing one.

        Raises:
            DataError: it cannot be made, or does not fit the tars.
        """
        path = self._path(cache)
        if not path.exists():
            self.prepare(cache)
        index = open_index(path, verify=False)
        if not _is_current(index, self.tars):
            self.prepare(cache)
            index = open_index(path, verify=False)
        return index

    def _path(self, cache: Path | None) -> Path:
        digest = hashlib.sha256(b"%d" % choose_chunk(self.chunk))
        for tar in self.tars:
            digest.update(b"\0" + (os.fsencode(tar) if isinstance(tar, Path) else tar.key.encode()))
        return (cache or cache_folder()) / "index" / f"{digest.hexdigest()[:24]}.chunks"


def choose_chunk(chunk: int) -> int:
    """Return the samples of a chunk of the index, for an order with chunks of ``chunk`` samples, which it divides."""
    sizes = [size for size in range(CHUNK // 4, CHUNK + 1) if chunk % size == 0]
    return max(sizes, default=chunk)


def _is_current(index: ChunkIndex, tars: Sequence[Shard]) -> bool:
    """Return whether an index of local tars has their present sizes and times."""
    if len(tars) != index.shards:
        return False
    for number, tar in enumerate(tars):
        if isinstance(tar, Path):
            status = tar.stat()
            if (status.st_size, str(status.st_mtime_ns)) != (int(index.lengths[number]), index.tag(number)):
                return False
    return True


def _is_plain(shard: Shard) -> bool:
    return isinstance(shard, Path)
