"""Sources of plain tars that are read in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vqclip.data.chunks.cache import ChunkCache
from vqclip.data.chunks.index_file import ChunkIndex, open_index
from vqclip.data.chunks.location import cached_index, find_index, lock_index
from vqclip.data.chunks.make import CHUNK, IndexMaker
from vqclip.data.chunks.parts import LocalParts
from vqclip.data.chunks.reader import ChunkReader
from vqclip.data.chunks.store import ChunkStore
from vqclip.data.remote import GzipShard, RemoteConfig, is_gzip
from vqclip.data.shard import Part, Shard
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import cache_folder

if TYPE_CHECKING:
    from vqclip.data.sources.base import Source

__all__ = ["ChunkedTars", "choose_chunk"]

MAX_CHUNK = 1 << 30
"""Bytes of the largest chunk that is read: each thread that fetches has one in memory."""


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
    """Prepares and opens a source of tars to be read in chunks; one with compressed tars is read sample by sample."""

    config: TarConfig
    """Configuration of the source."""
    chunk: int
    """Samples of a chunk of the order; those of the index divide it."""
    open: Callable[[ChunkReader], Source]
    """Makes the source."""

    def shards(self) -> Sequence[Shard | Part]:
        """Return what is to be done before the first sample is read; see `SourceConfigBase.shards`.

        Raises:
            DataError: the shards are at URLs, do not fit in the cache, and have no index.
            ConfigError: chunks of the index do not fit those of the order.
        """
        if not self._is_plain:
            return self._tars
        if self._index is not None:
            return [_IndexCheck(self._index.path)]
        return [_TarPart(self._maker, number) for number in self._maker.missing()]

    def build(self, cache: Path | None = None) -> Source:
        """Open the data; see `SourceConfigBase.build`."""
        if not self._is_plain:
            return self.config.build(cache)
        remote, tars = self.config.remote, self._tars
        index = self._index if cache is None else self._find(cache)
        index = index or self._write(cache)
        if index.largest > MAX_CHUNK:
            raise DataError(
                f"{index.path}: a chunk of {index.chunk} samples has {index.largest / 2**30:.3g} GiB; at most "
                f"{MAX_CHUNK / 2**30:g} GiB are read at a time. Index the data with fewer samples in a chunk: vqclip "
                "data index SOURCE --chunk 16"
            )
        chunks = ChunkCache((cache or cache_folder()) / "chunks", remote.cache_bytes)
        return self.open(ChunkReader(tars, index, ChunkStore(tars, index), chunks, remote.total_s))

    @cached_property
    def _tars(self) -> Sequence[Shard]:
        return self.config.shards()

    @cached_property
    def _is_plain(self) -> bool:
        return not any(isinstance(tar, GzipShard) or is_gzip(tar.name) for tar in self._tars)

    @cached_property
    def _is_local(self) -> bool:
        return all(isinstance(tar, Path) for tar in self._tars)

    @cached_property
    def _index(self) -> ChunkIndex | None:
        """The index in the default cache, as it was when it was first asked for: it takes time for many shards."""
        return self._find(None)

    @cached_property
    def _maker(self) -> IndexMaker:
        path = cached_index(self._tars)
        maker = IndexMaker(self._tars, LocalParts(path.with_suffix(".parts")))
        size = sum(each.length for each in maker.facts)
        if not self._is_local and size > self.config.remote.cache_bytes:
            raise DataError(
                f"{self._tars[0]} and {len(self._tars) - 1} more: no index of these {size / 2**30:.3g} GiB of shards, "
                "neither beside them nor in the cache. Make it once, with any number of machines: vqclip data index "
                f"SOURCE. (Without one, data are read that fit in remote.cache_gib={self.config.remote.cache_gib:g}.)"
            )
        return maker

    def _find(self, cache: Path | None) -> ChunkIndex | None:
        """Open the index of the tars; None if it is missing, outdated, or can be made again with other chunks."""
        path = find_index(self._tars, cache)
        if path is None:
            return None
        index = open_index(path, verify=False)
        if self.chunk % index.chunk == 0:
            return index
        if self._is_local and path == cached_index(self._tars, cache):
            return None
        raise ConfigError(
            f"data.order.chunk: got {self.chunk}, and the index {path} has chunks of {index.chunk} samples; expected a "
            f"multiple of {index.chunk}, or index the data again: vqclip data index SOURCE --chunk "
            f"{choose_chunk(self.chunk)}"
        )

    def _write(self, cache: Path | None) -> ChunkIndex:
        """Join the parts of the index; one process of those that share a cache does it, and the others wait."""
        path = cached_index(self._tars, cache)
        with lock_index(path, "write"):  # `find_index` takes the other lock
            return self._find(cache) or self._maker.write(path, choose_chunk(self.chunk))


@dataclass(frozen=True)
class _TarPart:
    """A tar whose part of the index is to be made."""

    maker: IndexMaker
    number: int

    def __str__(self) -> str:
        return str(self.maker.shards[self.number])

    def prepare(self, cache: Path | None = None) -> None:
        self.maker.read(self.number)


@dataclass(frozen=True)
class _IndexCheck:
    """An index that is to be verified."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def prepare(self, cache: Path | None = None) -> None:
        try:
            open_index(self.path)
        except DataError as error:
            if self.path.parent != cache_folder() / "index":
                raise
            self.path.unlink(missing_ok=True)
            raise DataError(f"{error}. It was in the cache and is removed: start again") from None


def choose_chunk(chunk: int) -> int:
    """Return the samples of a chunk of the index, for an order with chunks of ``chunk`` samples, which it divides."""
    sizes = [size for size in range(CHUNK // 4, CHUNK + 1) if chunk % size == 0]
    return max(sizes, default=chunk)
