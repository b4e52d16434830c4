"""Fetch chunks at URLs before they are needed, in threads of all data workers of a node together.

The cache of a node holds the chunks of the present window, which are needed in each of its rounds. What is left of the
cache is for the next window, which is fetched after the first round of the present one. Before, chunks of the present
window may have been unused for longer than those of the former one, which the cache should remove.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info
from typing_extensions import Self

from vqclip.data.order import GlobalOrder, WindowedGlobalOrder
from vqclip.data.tars.reader import TarReader
from vqclip.errors import ConfigError, StorageError

logger = logging.getLogger("vqclip.data")

_THREADS = 4


class PlannedFetch(NamedTuple):
    """A chunk that will be needed."""

    position: int
    """Place of the sample that needs it first; ascending. Behind it, the reader has fetched it."""
    size: int
    """Bytes of the chunk."""
    chunk: int
    """Number of the chunk."""


class FetchAhead:
    """Fetches chunks in the order of need, several at a time, up to a number of bytes ahead of the reader.

    The workers of a machine divide the chunks among them: each takes every K-th. Chunks that the reader has come to
    before are left out: they may not be needed any more. So is a chunk that cannot be fetched, since the reader meets
    the same error when it needs the chunk. Make it in the process that reads: threads do not survive a fork.

    Args:
        plan: the chunks that the machine needs, in the order of need; may be without end.
        fetch: puts a chunk into the cache; called in several threads.
        room: bytes that the workers of the machine together may fetch beyond the position of `advance`; one chunk for
            each worker is always allowed.
        worker: number of this worker, from 0.
        workers: number K of workers of the machine.
        threads: number of chunks that this worker fetches at a time.
    """

    def __init__(
        self,
        plan: Iterable[PlannedFetch],
        fetch: Callable[[int], object],
        room: int,
        worker: int = 0,
        workers: int = 1,
        threads: int = _THREADS,
    ):
        self._plan = itertools.islice(plan, worker, None, workers)
        self._following = next(self._plan, None)
        self._fetch, self._room = fetch, room // workers
        self._ahead: deque[PlannedFetch] = deque()
        self._bytes, self._position = 0, -1
        self._error: BaseException | None = None
        self._allowed = queue.SimpleQueue[PlannedFetch | None]()
        self._threads = [threading.Thread(target=self._run, name="vqclip-fetch", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()
        self.advance(-1)

    def advance(self, position: int) -> None:
        """Allow more chunks to be fetched, since the reader has come to `position`.

        Raises:
            Exception: any error of the threads that is not a StorageError.
        """
        if self._error is not None:
            raise self._error
        self._position = max(position, self._position)
        while self._ahead and self._ahead[0].position <= self._position:
            self._bytes -= self._ahead.popleft().size
        while (planned := self._following) is not None:
            if planned.position > self._position:  # otherwise the reader was faster
                if self._ahead and self._bytes + planned.size > self._room:
                    break
                self._bytes += planned.size
                self._ahead.append(planned)
                self._allowed.put(planned)
            self._following = next(self._plan, None)

    def close(self) -> None:
        """End the threads after the chunks that they fetch now."""
        self._position = sys.maxsize
        for _ in self._threads:
            self._allowed.put(None)

    def _run(self) -> None:
        try:
            while (planned := self._allowed.get()) is not None:
                if planned.position > self._position:
                    with contextlib.suppress(StorageError):
                        self._fetch(planned.chunk)
        except BaseException as error:
            self._error = error


class ChunkSupply:
    """Chunks at URLs that a node needs under a windowed order; fetched ahead after `start`, from `advance` on.

    Args:
        readers: readers of the sources at URLs, by number of the source.
        order: the order.
        rank: a rank of the node.
        nodes: node of every rank.

    Raises:
        ConfigError: the windows of all sources do not fit in the cache of the node.
    """

    def __init__(self, readers: Mapping[int, TarReader], order: WindowedGlobalOrder, rank: int, nodes: Sequence[int]):
        self._readers, self._order, self._rank, self._nodes = readers, order, rank, nodes
        mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        self._local_rank, self._local_ranks = mine.index(rank), len(mine)
        self._cache_room = min(reader.cache.room for reader in readers.values())
        self._ahead: dict[int, FetchAhead] = {}
        self._windows = {source: self._window_bytes(source) for source in readers}
        if sum(self._windows.values()) > self._cache_room:
            shown = " + ".join(f"{size / 2**30:.3g}" for size in self._windows.values())
            raise ConfigError(
                f"data.order.window: a window takes {shown} GiB of the cache of a node, which has "
                f"{self._cache_room / 2**30:.3g} GiB (remote.cache_gib, less 5 %). Expected a smaller window or a "
                "larger cache, best twice as large as the window: see vqclip plan"
            )

    @classmethod
    def find(cls, sources: Sequence[object], order: GlobalOrder, rank: int, nodes: Sequence[int]) -> Self | None:
        """Return what a node needs of sources with shards at URLs, under a windowed order; None if there are none."""
        if not isinstance(order, WindowedGlobalOrder):  # the full order needs all of the data at any time
            return None
        readers = {number: getattr(source, "tars", None) for number, source in enumerate(sources)}
        remote = {number: reader for number, reader in readers.items() if reader is not None and reader.is_remote}
        return cls(remote, order, rank, nodes) if remote else None

    def _window_bytes(self, source: int) -> int:
        """Return about how many bytes of the cache a window of a source takes."""
        reader = self._readers[source]
        mean = reader.total_bytes / len(reader) * min(self._order.chunk, len(reader))
        return round(self._order.window_chunks(source, self._rank, self._nodes) * mean)

    def _room_ahead(self, source: int) -> int:
        """Return the bytes that may be fetched ahead of a source: what windows leave of the cache.

        Chunks of the window after the next one would be unused for longer than the last window, and be removed first.
        """
        left = (self._cache_room - sum(self._windows.values())) // len(self._windows)
        return min(left, self._windows[source])

    def warn(self) -> None:
        """Log a warning if the cache or a window is so small that chunks are fetched more than once."""
        fits = sum(reader.total_bytes for reader in self._readers.values()) <= self._cache_room
        for source, window in self._windows.items():
            if not fits and (room := self._room_ahead(source)) < window:
                logger.warning(
                    "data.sources[%d]: the cache has room for %.2f windows of %.3g GiB; below two, chunks are fetched "
                    "late, and some more than once. Raise remote.cache_gib, or lower data.order.window",
                    source,
                    1 + room / window,
                    window / 2**30,
                )

    def plan(self, steps: range, source: int) -> Iterator[PlannedFetch]:
        """Yield the chunks of the index that some steps need; see the module's docstring."""
        order, reader = self._order, self._readers[source]
        size, chunk, part = len(reader), min(order.chunk, len(reader)), reader.index.chunk
        delay = min(order.window, -(-size // order.chunk))  # a round: a sample of each chunk of a window
        is_endless = steps.stop == sys.maxsize
        stop = math.inf if is_endless else order.count_used(steps.stop, source)
        for used, needed in order.needs(steps.start, source, self._rank, self._nodes):
            if used >= stop:
                return
            first, end = needed * chunk, min((needed + 1) * chunk, size)
            for number in range(first // part, -(-end // part)):
                yield PlannedFetch(used + delay, reader.cached_bytes(number), number)

    def start(self, steps: range, workers: int = 0, lead: int = 0) -> Self:
        """Set what `advance` fetches, in the process that starts the workers; return this supply.

        Args:
            steps: that all workers make.
            workers: processes that make the batches of this rank; 0: this one.
            lead: steps by which the workers of one rank may be ahead of those of another rank.
        """
        self._steps, self._workers = steps, max(workers, 1)
        self._lead = lead if self._local_ranks > 1 else 0
        self._begun = torch.full((self._workers,), steps.start)  # the step that each worker makes now
        if workers:
            self._begun.share_memory_()
        return self

    def advance(self, step: int) -> None:
        """Fetch a worker's part of the chunks, ahead of the slowest worker; this one begins a step."""
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        self._begun[number] = step
        slowest = max(self._steps.start, int(self._begun.min()) - self._lead)
        for source, reader in self._readers.items():
            if source not in self._ahead:
                self._ahead[source] = FetchAhead(
                    self.plan(self._steps, source),
                    reader.fetch,
                    self._room_ahead(source),
                    self._local_rank * self._workers + number,
                    self._local_ranks * self._workers,
                )
            self._ahead[source].advance(self._order.count_used(slowest, source))

    def close(self) -> None:
        """End the threads after the chunks that they fetch now."""
        for ahead in self._ahead.values():
            ahead.close()
        self._ahead = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ahead": {}}  # threads are of one process
