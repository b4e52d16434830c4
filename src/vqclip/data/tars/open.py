"""Index and open a list of tars.

parts()  what is to be done before the first sample is read: check the index, or read the shards that it lacks
open()   the index beside the shards or in the cache, else a new one in the cache  ->  TarReader
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vqclip.data.remote import RemoteConfig
from vqclip.data.remote.cache import BoundedCache
from vqclip.data.shard import Part, Shard
from vqclip.data.tars.index import TarIndex, open_index
from vqclip.data.tars.locate import cached_index, data_folder, find_index, lock_index
from vqclip.data.tars.make import CHUNK, IndexMaker, Parts
from vqclip.data.tars.members import USUAL, MemberRules
from vqclip.data.tars.reader import TarReader
from vqclip.data.tars.store import is_whole
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import cache_folder

__all__ = ["TarSet", "choose_chunk", "describe_left_out"]

logger = logging.getLogger("vqclip.data")

MAX_CHUNK = 1 << 30
"""Bytes of the largest chunk that is read: each thread that fetches has one in memory."""
_SHOWN = 3


@dataclass(frozen=True)
class TarSet:
    """A list of tars that are read as one."""

    shards: Sequence[Shard]
    remote: RemoteConfig
    rules: MemberRules = USUAL
    """Rules by which members are grouped."""
    leave_out: bool = False
    """Leave out shards that are missing or damaged."""
    chunk: int | None = None
    """Samples of a chunk of the order, which those of the index divide; None: any."""

    def parts(self) -> Sequence[Part]:
        """Return what is to be done before the first sample is read; see `SourceConfigBase.shards`.

        Raises:
            DataError: a shard is missing; or they are at URLs, do not fit in the cache, and have no index.
            ConfigError: chunks of the index do not fit those of the order.
        """
        if (index := self._find(None)) is not None:
            return [_IndexCheck(index.path)]
        maker = self._maker(None)
        return [_ShardPart(maker, number) for number in maker.missing()]

    def open(self, cache: Path | None = None) -> TarReader:
        """Open the tars, after indexing those that are not indexed.

        Args:
            cache: folder of the index and of chunks; default `vqclip.io.files.cache_folder()`.

        Raises:
            DataError: a shard is damaged, or the index of these tars cannot be used.
            ConfigError: chunks of the index do not fit those of the order.
        """
        index = self._find(cache)  # which is falsy if all tars are empty
        index = self._write(cache) if index is None else index
        if index.facts.damaged and not self.leave_out:
            name, problem = next(iter(index.facts.damaged.items()))
            raise DataError(
                f"{problem} ({index.path} leaves out {len(index.facts.damaged)} shards, the first {name}; copy them "
                "again, or set bad_shards: leave_out)"
            )
        if index.keys is None or not self._is_local:
            self._require_chunks(index)
        total = int(index.lengths.sum())
        if not self._is_local and self.chunk is None and total > self.remote.cache_bytes:
            logger.warning(
                "%s and %d more: %.2f GiB of shards do not fit in remote.cache_gib=%g; in the full order most reads "
                "fetch a chunk of %d samples. Choose data.order=windowed, raise the limit, or copy the shards",
                self.shards[0],
                len(self.shards) - 1,
                total / 2**30,
                self.remote.cache_gib,
                index.chunk,
            )
        chunks = BoundedCache((cache or cache_folder()) / "chunks", self.remote.cache_bytes)
        return TarReader(self.shards, index, self.rules, chunks, self.remote.total_s)

    @property
    def _is_local(self) -> bool:
        return all(map(is_whole, self.shards))

    def _require_chunks(self, index: TarIndex) -> None:
        """Raise DataError if an index cannot be read in chunks."""
        if index.facts.scattered:
            raise DataError(
                f"{index.facts.scattered}: members of other samples are between those of a sample, so that samples "
                "cannot be read in chunks. Pack the shard again, with the members of a sample beside each other "
                "(vqclip data pack), or copy the shards to this machine"
            )
        if index.facts.largest > MAX_CHUNK:
            raise DataError(
                f"{index.path}: a chunk of {index.chunk} samples has {index.facts.largest / 2**30:.3g} GiB; at most "
                f"{MAX_CHUNK / 2**30:g} GiB are read at a time. Index the data with fewer samples in a chunk: vqclip "
                "data index SOURCE --chunk 16"
            )

    def _maker(self, cache: Path | None) -> IndexMaker:
        # Another list of shards of the same folder uses the same parts.
        folder = str(data_folder(self.shards) or cached_index(self.shards).stem)
        name = f"{hashlib.sha256(folder.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.parts"
        parts = Parts((cache or cache_folder()) / "index" / name)
        maker = IndexMaker(self.shards, parts, self.rules, self.leave_out)
        size = sum(each.length for each in maker.facts)
        if size > self.remote.cache_bytes and not self._is_local:
            raise DataError(
                f"{self.shards[0]} and {len(self.shards) - 1} more: no index of these {size / 2**30:.3g} GiB of "
                "shards, neither beside them nor in the cache. Make it once, with any number of machines: vqclip data "
                f"index SOURCE. (Without one, data are read that fit in remote.cache_gib={self.remote.cache_gib:g}.)"
            )
        return maker

    def _find(self, cache: Path | None) -> TarIndex | None:
        """Open the index of the tars; None if it is missing, outdated, or can be made again with other chunks."""
        index = find_index(self.shards, self.rules, cache)
        if index is None or self.chunk is None or self.chunk % index.chunk == 0:
            return index
        if self._is_local and index.keys is not None:  # no chunk is read
            return index
        if self._is_local and index.path == cached_index(self.shards, self.rules, cache):
            return None
        raise ConfigError(
            f"data.order.chunk: got {self.chunk}, and the index {index.path} has chunks of {index.chunk} samples; "
            f"expected a multiple of {index.chunk}, or index the data again: vqclip data index SOURCE --chunk "
            f"{choose_chunk(self.chunk)}"
        )

    def _write(self, cache: Path | None) -> TarIndex:
        """Join the parts of the index; one process of those that share a cache does it, and the others wait."""
        path = cached_index(self.shards, self.rules, cache)
        with lock_index(path, "write"):  # `find_index` takes the other lock
            index = self._find(cache)
            return self._maker(cache).write(path, choose_chunk(self.chunk or CHUNK)) if index is None else index


@dataclass(frozen=True)
class _ShardPart:
    """A tar whose part of the index is to be made."""

    maker: IndexMaker
    number: int

    @property
    def path(self) -> Shard:
        """The tar."""
        return self.maker.shards[self.number]

    def __str__(self) -> str:
        return str(self.path)

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


def describe_left_out(index: TarIndex) -> tuple[str, ...]:
    """Return short sentences on shards and members that are left out, and on samples with two members of a kind."""
    facts, notes = index.facts, list[str]()
    if facts.damaged:
        shown = "; ".join(f"{name}: {problem}" for name, problem in [*facts.damaged.items()][:_SHOWN])
        notes.append(f"left out: {len(facts.damaged)} shards that are missing or damaged ({shown})")
    if facts.ignored:
        notes.append(f"left out: {sum(facts.ignored.values())} members that end like images ({_show(facts.ignored)})")
    if facts.ambiguous:
        notes.append(
            f"{sum(facts.ambiguous.values())} samples have two members for one purpose ({_show(facts.ambiguous)}); "
            "they are bad unless image_member or caption_member chooses"
        )
    return tuple(notes)


def _show(counts: Mapping[str, int]) -> str:
    shown = [f"{name} {count}" for name, count in sorted(counts.items(), key=lambda each: -each[1])[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(counts) > _SHOWN else shown)
