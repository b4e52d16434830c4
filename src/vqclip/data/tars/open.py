"""Find, index and open a list of tars.

    find_index      the index beside the shards, or in the cache
    preparations    what is to be done before the first sample is read: copy shards that cannot be read at random
                    places, check the index, or read the shards that it lacks
    TarSet.open     index, or a new one in the cache  ->  TarReader

The name of an index is a function of the names of the shards and of the rules by which their members are grouped, so
training finds what `vqclip data index` wrote, and a folder can have an index for each list of shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.files import RemoteShard, Shard, fetch_bytes
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import beneath, display_url, path_in_url, protocol_of, split_query
from vqclip.data.sources.base import Preparation
from vqclip.data.sources.paths import common_folder
from vqclip.data.tars.index import INDEX_VERSION, TarIndex, find_valid_index, open_index
from vqclip.data.tars.make import CHUNK, IndexMaker, Parts
from vqclip.data.tars.members import USUAL, MemberRules
from vqclip.data.tars.reader import TarReader
from vqclip.data.tars.store import copy_shard, find_copies, local_state, shard_names
from vqclip.errors import ConfigError, DataError, StorageError, count_noun
from vqclip.io.atomic import hold_lock, remove_leftovers, write_file
from vqclip.io.files import cache_folder
from vqclip.process import progress

logger = logging.getLogger("vqclip.data")

MAX_CHUNK = 1 << 30
"""Bytes of the largest chunk that is read: each thread that fetches has one in memory."""
_LARGEST_OF_SHARD = 64 << 20
"""Bytes of a fetched index for each shard at most: a shard of 350 million samples in chunks of 128."""
_DIGITS = 12
_SHOWN = 3
_WAIT_S = 0.2
"""Seconds between two looks at what another process is copying."""


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
    named: Sequence[Shard] | None = None
    """The shards in messages, where some are copies; None: these."""

    def preparations(self) -> Sequence[Preparation]:
        """Return what is to be done before the first sample is read; see `SourceConfigBase.preparations`.

        Raises:
            DataError: a shard is missing; or they are at URLs, do not fit in the cache, and have no index.
            ConfigError: chunks of the index do not fit those of the order.
        """
        if copies := self._find_copies():
            missing = [partial(self._copy, *each) for each in copies.items() if not each[1].exists()]
            return missing or self._with_copies(copies).preparations()
        if (index := self._find()) is not None:
            return [partial(_verify, index.path)]
        maker = self._maker()
        return [partial(maker.part, number) for number in maker.missing()]

    def readable(self) -> TarSet:
        """Return the tars with copies in place of those that cannot be read at random places; missing ones are made.

        Raises:
            DataError: a shard is damaged, or the disk has no room.
        """
        if not (copies := self._find_copies()):
            return self
        for number, path in copies.items():
            while not self._copy(number, path):
                progress.heartbeat()
                time.sleep(_WAIT_S)
        remove_leftovers(path.parent)
        return self._with_copies(copies)

    def _copy(self, number: int, path: Path) -> bool:
        """Copy and index a shard, unless it is copied; return False if another process is copying it."""
        if path.exists():
            return True
        shard, unchecked = self.shards[number], path.with_name(f"{path.name}.unchecked")
        with _cache_errors(path), hold_lock(path.with_name(f"{path.name}.lock"), wait=False) as is_held:
            if not is_held:
                return False
            if path.exists():
                return True
            copy_shard(shard, unchecked, self.leave_out)
            maker = replace(self, shards=[unchecked], named=[shard])._maker()
            maker.facts[0] = replace(maker.facts[0], name=path.name)  # the name that it gets
            try:
                maker.part(0)
            except DataError:  # what is damaged at a URL may be mended there
                unchecked.unlink()
                raise
            unchecked.rename(path)
        return True

    def open(self) -> TarReader:
        """Open the tars, after indexing those that are not indexed.

        Raises:
            DataError: a shard is damaged, or the index of these tars cannot be used.
            ConfigError: chunks of the index do not fit those of the order.
        """
        if (tars := self.readable()) is not self:
            return tars.open()
        index = self._find()  # which is falsy if all tars are empty
        index = self._write() if index is None else index
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
        chunks = BoundedCache(cache_folder() / "chunks", self.remote.cache_bytes)
        return TarReader(self.shards, index, self.rules, chunks, self.remote.total_s, self.named)

    @property
    def _is_local(self) -> bool:
        return all(isinstance(each, Path) for each in self.shards)

    def _find_copies(self) -> dict[int, Path]:
        # Of shards with an index in the cache, made or fetched earlier, the server is known to send parts.
        return find_copies(self.shards, not cached_index(self.shards, self.rules).exists())

    def _with_copies(self, copies: Mapping[int, Path]) -> TarSet:
        shards = [copies.get(number, shard) for number, shard in enumerate(self.shards)]
        return replace(self, shards=shards, named=self.shards)

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

    def _maker(self) -> IndexMaker:
        # Another list of shards of the same folder uses the same parts.
        folder = str(data_folder(self.shards) or cached_index(self.shards).stem)
        name = f"{hashlib.sha256(folder.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.parts"
        parts = Parts(cache_folder() / "index" / name)
        maker = IndexMaker(self.shards, parts, self.rules, self.leave_out, self.named)
        size = sum(each.length for each in maker.facts)
        if size > self.remote.cache_bytes and not self._is_local:
            raise DataError(
                f"{self.shards[0]} and {len(self.shards) - 1} more: no index of these {size / 2**30:.3g} GiB of "
                "shards, neither beside them nor in the cache. Make it once, with any number of machines: vqclip data "
                f"index SOURCE. (Without one, data are read that fit in remote.cache_gib={self.remote.cache_gib:g}.)"
            )
        return maker

    def _find(self) -> TarIndex | None:
        """Open the index of the tars; None if it is missing, outdated, or can be made again with other chunks."""
        index = find_index(self.shards, self.rules)
        if index is None or self.chunk is None or self.chunk % index.chunk == 0:
            return index
        if self._is_local and index.keys is not None:  # no chunk is read
            return index
        if self._is_local and index.path == cached_index(self.shards, self.rules):
            return None
        raise ConfigError(
            f"data.order.chunk: got {self.chunk}, and the index {index.path} has chunks of {index.chunk} samples; "
            f"expected a multiple of {index.chunk}, or index the data again: vqclip data index SOURCE --chunk "
            f"{choose_chunk(self.chunk)}"
        )

    def _write(self) -> TarIndex:
        """Join the parts of the index; one process of those that share a cache does it, and the others wait."""
        path = cached_index(self.shards, self.rules)
        with _lock(path, "write"):  # `find_index` takes the other lock
            index = self._find()
            return self._maker().write(path, choose_chunk(self.chunk or CHUNK)) if index is None else index


def _verify(path: Path) -> None:
    """Verify an index; a damaged one in the cache is removed, so that the next start makes it again."""
    try:
        open_index(path)
    except DataError as error:
        if path.parent != cache_folder() / "index":
            raise
        path.unlink(missing_ok=True)
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
        notes.append(f"left out: {count_noun(len(facts.damaged), 'missing or damaged shard')} ({shown})")
    if facts.ignored:
        members = count_noun(sum(facts.ignored.values()), "member")
        notes.append(f"left out: {members} named like images ({_show(facts.ignored)})")
    if facts.ambiguous:
        samples = count_noun(sum(facts.ambiguous.values()), "sample")
        notes.append(
            f"{samples} with two members for one purpose ({_show(facts.ambiguous)}), bad unless image_member or "
            "caption_member chooses"
        )
    return tuple(notes)


def _show(counts: Mapping[str, int]) -> str:
    shown = [f"{name} {count}" for name, count in sorted(counts.items(), key=lambda each: -each[1])[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(counts) > _SHOWN else shown)


# ---- the place of an index


def index_name(shards: Sequence[Shard], rules: MemberRules = USUAL) -> str:
    """Return the name of the index of some shards, beside them."""
    return f"vqclip-{_digest(shard_names(shards), rules)[:_DIGITS]}.index"


def data_folder(shards: Sequence[Shard]) -> Path | str | None:
    """Return the folder, or its URL, that contains all shards; None if there is none, or only a disk or server does."""
    if not shards:
        return None
    if all(isinstance(each, Path) for each in shards):
        folder = Path(os.path.commonpath([str(Path(str(each)).parent) for each in shards]))
        return None if folder == folder.parent else folder
    if not all(isinstance(each, RemoteShard) for each in shards):
        return None
    parts = [split_query(each.url) for each in shards if isinstance(each, RemoteShard)]
    queries = {query for _, query in parts}
    common = common_folder(path for path, _ in parts).removesuffix("/")
    # With a query for each shard, as in signed URLs, nothing is known about other files.
    return common + queries.pop() if common.count("/") > 1 and len(queries) == 1 else None


def cached_index(shards: Sequence[Shard], rules: MemberRules = USUAL) -> Path:
    """Return the place of the index of some shards in the cache."""
    paths = [path_in_url(each.url) if isinstance(each, RemoteShard) else str(each) for each in shards]
    return cache_folder() / "index" / f"{_digest(paths, rules)[:24]}.tars"


def find_index(shards: Sequence[Shard], rules: MemberRules = USUAL) -> TarIndex | None:
    """Return the index of some shards, opened; None if there is none, or it is outdated.

    That of shards at URLs is fetched from beside them into the cache, once; afterwards the server is not asked.

    Args:
        shards: the tars.
        rules: how their members are grouped.

    Raises:
        StorageError: the server cannot be reached.
    """
    folder, cached = data_folder(shards), cached_index(shards, rules)
    beside = [folder / index_name(shards, rules)] if isinstance(folder, Path) else []
    for place in (*beside, cached):
        if (index := _open_current(place, shards, rules)) is not None:
            return index
    if isinstance(folder, str):
        with _lock(cached, "lock"):
            index = _open_current(cached, shards, rules)
            if index is None and _fetch(beneath(folder, index_name(shards, rules)), shards, cached):
                index = _open_current(cached, shards, rules)
            return index
    return None


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold a lock of this name beside a file in the cache; raise StorageError if the cache cannot be written."""
    with _cache_errors(path), hold_lock(path.with_name(f"{path.name}.{name}")):
        yield


@contextlib.contextmanager
def _cache_errors(path: Path) -> Iterator[None]:
    """Make the folder of a file in the cache, and raise StorageError if the cache cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}); set VQCLIP_CACHE to another folder"
        ) from None


def _open_current(path: Path, shards: Sequence[Shard], rules: MemberRules) -> TarIndex | None:
    """Open an index; None if it is missing or damaged, or of other shards; local ones must be as they were."""
    if (index := find_valid_index(path, verify=False)) is None:
        return None
    states = (local_state(shard) if isinstance(shard, Path) else None for shard in shards)
    if index.has_shards(shard_names(shards), rules, states):
        return index
    if path.parent.name != "index":  # one in the cache is made again, which is said then
        logger.warning("%s: is of other shards, or of these before they changed; it is not used", path)
    return None


def _fetch(url: str, shards: Sequence[Shard], path: Path) -> bool:
    """Fetch and verify an index; return False if there is none."""
    (first, *_) = (each for each in shards if isinstance(each, RemoteShard))
    try:
        content = fetch_bytes(url, first.options, min(first.options.cache_bytes, _LARGEST_OF_SHARD * len(shards)))
    except StorageError as error:
        # A web server may answer anything for a file that is not there; a bucket says it, or access is wrong.
        if error.kind == "gone" and (protocol_of(url) in ("http", "https") or "not found" in str(error)):
            return False
        raise
    aside = path.with_name(f"{path.name}.fetched")  # other processes open what is at the path without the lock
    write_file(aside, content)
    try:
        open_index(aside)
    except DataError as error:
        aside.unlink()
        raise DataError(str(error).replace(str(aside), display_url(url))) from None
    aside.replace(path)
    logger.info("fetched the index %s", path_in_url(url))
    return True


def _digest(names: Sequence[str], rules: MemberRules) -> str:
    more = [f"format {INDEX_VERSION}", *([] if rules == USUAL else [json.dumps(rules.to_json(), sort_keys=True)])]
    return hashlib.sha256("\n".join([*names, *more]).encode("utf-8", "surrogateescape")).hexdigest()
