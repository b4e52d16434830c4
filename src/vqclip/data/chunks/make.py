"""Make the index of the chunks of a data set: a part for each shard, then one file.

    survey the shards: sizes and tags
    for each shard without a part, in a random order of this process:  read it once, write its part
    when all parts are there:  join them

Processes and machines that share the folder of the parts divide the work through it: each takes shards in an order of
its own and skips those that have a part. Two may read one shard at the same time, mostly near the end; they write the
same bytes.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import numpy as np

from vqclip.data.chunks.index_file import DIGEST, ChunkIndex, IndexContent, chunk_digest, open_index, write_index
from vqclip.data.chunks.location import shard_names
from vqclip.data.chunks.parts import LocalParts, PartFolder, ShardFacts, dump_part, parse_part, part_name
from vqclip.data.chunks.scan import ShardPart, scan_shard
from vqclip.data.chunks.survey import read_shard, survey
from vqclip.data.members import KINDS
from vqclip.data.shard import Shard
from vqclip.errors import DataError, StorageError

__all__ = ["CHUNK", "IndexMaker", "make_index"]

logger = logging.getLogger("vqclip.data")

CHUNK = 128
"""Samples of a chunk by default."""
T = TypeVar("T")
_SHOWN = 5
_READERS = 16
"""Parts that are read at a time."""
_POLL_S = 0.2


def make_index(shards: Sequence[Shard], path: Path, chunk: int = CHUNK, parts: PartFolder | None = None) -> ChunkIndex:
    """Read all shards that have no part yet, write their index, and open it.

    Args:
        shards: plain tars.
        path: the file to write.
        chunk: samples of a chunk.
        parts: folder of the parts; default a folder beside ``path``.

    Raises:
        DataError: a shard is damaged or cannot be indexed by chunks, or the index cannot be written.
    """
    maker = IndexMaker(shards, parts or LocalParts(path.with_name(f"{path.name}.parts")))
    maker.read_all()
    return maker.write(path, chunk)


class IndexMaker:
    """Makes the parts of an index, and joins them.

    Args:
        shards: plain tars.
        parts: folder of the parts.

    Raises:
        DataError: a shard is compressed or missing.
        StorageError: a server cannot be reached.
    """

    def __init__(self, shards: Sequence[Shard], parts: PartFolder):
        self.shards, self._parts = shards, parts
        found = survey(shards)
        self.facts = [ShardFacts(name, *each) for name, each in zip(shard_names(shards), found, strict=True)]
        self._stopped = threading.Event()

    def find_current(self, path: Path, chunk: int) -> ChunkIndex | None:
        """Open an index; None if there is none, or it is damaged or of other shards or chunks."""
        if not path.exists():
            return None
        try:
            index = open_index(path)
        except DataError as error:
            logger.warning("%s", error)
            return None
        fits = index.chunk == chunk and index.lengths.tolist() == [each.length for each in self.facts]
        fits = fits and index.has_names([each.name for each in self.facts])
        return index if fits and index.has_tags([each.tag for each in self.facts]) else None

    def missing(self) -> list[int]:
        """Return the numbers of the shards without a part."""
        there = self._parts.list()
        return [number for number, facts in enumerate(self.facts) if part_name(facts) not in there]

    def read(self, number: int) -> None:
        """Make the part of a shard, unless another process has made it.

        Raises:
            DataError: the shard is damaged, or cannot be indexed by chunks.
            StorageError: it cannot be fetched, or the part cannot be written.
        """
        name = part_name(self.facts[number])
        if not self._parts.has(name):
            self._parts.write(name, dump_part(self._scan(number)))

    def read_all(self, workers: int = 1, report: Callable[[int, int], object] = lambda shards, size: None) -> None:
        """Make all missing parts.

        Args:
            workers: threads; each reads a shard.
            report: called in this thread with the shards that are finished since the last call, and their bytes.

        Raises:
            DataError: shards are damaged; all others have been read.
            StorageError: a server cannot be reached.
        """
        left = self.missing()
        random.Random(os.urandom(8)).shuffle(left)
        done: list[int] = []
        damaged: list[DataError] = []
        with ThreadPoolExecutor(workers, "index") as pool:
            try:
                running = {pool.submit(self._work, left, done, damaged) for _ in range(workers)}
                while running:
                    finished, running = wait(running, _POLL_S)
                    count = len(done)
                    report(count, sum(self.facts[number].length for number in done[:count]))
                    del done[:count]
                    for each in finished:
                        each.result()
            finally:
                self._stopped.set()  # after an interrupt or an error the other threads stop within their shards
        self._stopped.clear()
        if damaged:
            lines = "".join(f"\n  {error}" for error in damaged[:_SHOWN]) if len(damaged) > 1 else ""
            raise DataError(
                str(damaged[0]) if len(damaged) == 1 else f"{len(damaged)} shards cannot be indexed:{lines}"
            )

    def write(self, path: Path, chunk: int = CHUNK) -> ChunkIndex:
        """Join the parts to an index, write it, and open it.

        Raises:
            DataError: it cannot be written, or a shard whose part is missing is damaged.
        """
        with ThreadPoolExecutor(_READERS, "parts") as pool:
            content = join_parts(self.facts, _map_ahead(pool, self._part, range(len(self.facts))), chunk)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return write_index(path, content)
        except OSError as error:
            raise DataError(
                f"{path}: the index cannot be written ({error.strerror}); expected a folder with room: name another "
                "with --out, or set VQCLIP_CACHE"
            ) from None

    def _work(self, left: list[int], done: list[int], damaged: list[DataError]) -> None:
        while not self._stopped.is_set():
            try:
                number = left.pop()
            except IndexError:
                return
            try:
                self.read(number)
            except _Stopped:
                return
            except StorageError:
                self._stopped.set()
                raise
            except DataError as error:
                damaged.append(error)
            done.append(number)

    def _part(self, number: int) -> ShardPart:
        facts = self.facts[number]
        content = self._parts.read(part_name(facts))
        part = parse_part(content, facts) if content is not None else None
        if part is None:
            part = self._scan(number)
            self._parts.write(part_name(facts), dump_part(part))
        return part

    def _scan(self, number: int) -> ShardPart:
        shard, facts = self.shards[number], self.facts[number]
        return read_shard(
            shard, facts.length, facts.tag, lambda blocks: scan_shard(shard, self._until_stopped(blocks), facts.length)
        )

    def _until_stopped(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            if self._stopped.is_set():
                raise _Stopped
            yield block


class _Stopped(Exception):
    """Another thread failed, or the user interrupted the work."""


def _map_ahead(pool: ThreadPoolExecutor, function: Callable[[int], T], numbers: range) -> Iterator[T]:
    """Yield the results of a function in order, with some of the next calls under way."""
    running: deque[Future[T]] = deque()
    for number in numbers:
        running.append(pool.submit(function, number))
        if len(running) > 2 * _READERS:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def join_parts(shards: Sequence[ShardFacts], parts: Iterable[ShardPart], chunk: int) -> IndexContent:
    """Return the content of an index.

    Args:
        shards: names, sizes and tags of all shards.
        parts: of all shards, in order.
        chunk: samples of a chunk.
    """
    counts, starts, digests = [], [], bytearray()
    members, total, rest = np.zeros(len(KINDS), np.int64), 0, b""
    step = chunk * DIGEST
    for part in parts:
        starts.append(part.begins[-total % chunk :: chunk])
        samples = rest + part.digests.tobytes()
        end = len(samples) // step * step
        digests += b"".join(chunk_digest(samples[at : at + step]) for at in range(0, end, step))
        rest = samples[end:]
        total += len(part.begins)
        counts.append(len(part.begins))
        members += part.members
    if rest:
        digests += chunk_digest(rest)
    return IndexContent(
        chunk=chunk,
        names=[each.name for each in shards],
        tags=[each.tag for each in shards],
        lengths=np.array([each.length for each in shards], dtype=np.int64),
        firsts=np.cumsum([0, *counts], dtype=np.int64),
        starts=np.concatenate([np.zeros(0, np.int64), *starts]),
        digests=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST),
        members=members.tolist(),
    )
