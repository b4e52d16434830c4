"""The chunks that a node needs next, fetched by all its data workers together.

The cache of a node holds the chunks of the present window, which are needed in each of its rounds. What is left of the
cache is for the next window, which is fetched after the first round of the present one. Before, chunks of the present
window may have been unused for longer than those of the former one, which the cache should remove.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.utils.data import get_worker_info

from vqclip.data.chunks.ahead import FetchAhead, PlannedFetch
from vqclip.data.chunks.reader import ChunkReader
from vqclip.data.order import GlobalOrder, WindowedOrder
from vqclip.errors import ConfigError

__all__ = ["ChunkSupply", "NodeNeeds", "find_needs"]

logger = logging.getLogger("vqclip.data")


class NodeNeeds:
    """Chunks that a node needs, in the order of need.

    Args:
        readers: readers of the sources at URLs, by number of the source.
        order: a windowed order.
        batch_size: G.
        rank: a rank of the node.
        nodes: node of every rank.
    """

    def __init__(
        self, readers: Mapping[int, ChunkReader], order: GlobalOrder, batch_size: int, rank: int, nodes: Sequence[int]
    ):
        assert isinstance(order.kind, WindowedOrder)
        self.readers, self._order, self._chunk = readers, order, order.kind.chunk
        self._batch_size, self._rank, self._nodes = batch_size, rank, nodes

    def window_bytes(self, source: int) -> int:
        """Return about how many bytes of the cache a window of a source takes."""
        reader = self.readers[source]
        chunk = min(self._chunk, len(reader))
        mean = reader.total_bytes / len(reader) * chunk
        return round(self._order.window_chunks(source, self._rank, self._nodes) * mean)

    def room_ahead(self) -> dict[int, int]:
        """Return the bytes that may be fetched ahead of each source: what windows leave of the cache.

        Raises:
            ConfigError: the windows of all sources do not fit in the cache.
        """
        sizes = {source: self.window_bytes(source) for source in self.readers}
        room = self._cache_room
        if sum(sizes.values()) > room:
            shown = " + ".join(f"{size / 2**30:.3g}" for size in sizes.values())
            raise ConfigError(
                f"data.order.window: a window takes {shown} GiB of the cache of a node, which has {room / 2**30:.3g} "
                f"GiB (remote.cache_gib, less 5 %). Expected a smaller window or a larger cache, best twice as large "
                "as the window: see vqclip data plan"
            )
        left = (room - sum(sizes.values())) // len(sizes)
        # Chunks of the window after the next one would be unused for longer than the last window, and be removed first.
        return {source: min(left, size) for source, size in sizes.items()}

    def warn_of_small_cache(self) -> None:
        """Log a warning if the data do not fit in the cache, and neither do two windows."""
        if sum(reader.total_bytes for reader in self.readers.values()) <= self._cache_room:
            return
        for source, room in self.room_ahead().items():
            if room < (window := self.window_bytes(source)):
                logger.warning(
                    "data.sources[%d]: the cache has room for %.2f windows of %.3g GiB; below two, chunks are fetched "
                    "late, and some more than once. Raise remote.cache_gib, or lower data.order.window",
                    source,
                    1 + room / window,
                    window / 2**30,
                )

    def warn_of_shared_chunks(self) -> None:
        """Log a warning if windows have too few lanes for the nodes, so that several nodes fetch the same chunks."""
        for source in self.readers:
            lanes, fetched = self._order.shared_lanes(source, self._nodes)
            if fetched > 1.1 * lanes:
                logger.warning(
                    "data.sources[%d]: lanes of chunks in a window: %d, and nodes: %d; so a chunk is fetched by %.1f "
                    "nodes in the mean. Raise data.order.window, or use fewer nodes: see vqclip data plan",
                    source,
                    lanes,
                    len(set(self._nodes)),
                    fetched / lanes,
                )

    @property
    def _cache_room(self) -> int:
        return min(reader.cache_room for reader in self.readers.values())

    def position(self, step: int, source: int) -> int:
        """Return how many samples of a source the steps before `step` have used, over all epochs."""
        return self._order.count_used(step, self._batch_size, source)

    def round(self, source: int) -> int:
        """Return the samples of a round of a window: one of each chunk, of all nodes."""
        assert isinstance(self._order.kind, WindowedOrder)
        return min(self._order.kind.window, -(-len(self.readers[source]) // self._chunk))

    @property
    def local_rank(self) -> tuple[int, int]:
        """Number of this rank among those of its node, and how many they are."""
        mine = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._rank]]
        return mine.index(self._rank), len(mine)

    def plan(self, steps: range, source: int) -> Iterator[PlannedFetch]:
        """Yield the chunks of the index that some steps need; see the module's docstring."""
        delay = self.round(source)
        stop = math.inf if steps.stop == sys.maxsize else self.position(steps.stop, source)
        reader, size = self.readers[source], len(self.readers[source])
        chunk, part = min(self._chunk, size), reader.index.chunk
        for need in self._order.needs(steps.start, self._batch_size, source, self._rank, self._nodes):
            if (place := need.passes * size + need.place) >= stop:
                return
            first, end = need.chunk * chunk, min((need.chunk + 1) * chunk, size)
            for number in range(first // part, -(-end // part)):
                yield PlannedFetch(place + delay, reader.cached_bytes(number), number)


def find_needs(
    sources: Sequence[object], order: GlobalOrder, batch_size: int, rank: int, nodes: Sequence[int]
) -> NodeNeeds | None:
    """Return what a node needs of the sources with shards at URLs that are read in chunks; None if there are none.

    Raises:
        ConfigError: the windows of these sources do not fit in the cache.
    """
    readers = {number: getattr(source, "chunks", None) for number, source in enumerate(sources)}
    remote = {number: reader for number, reader in readers.items() if reader is not None and reader.is_remote}
    if not remote:
        return None
    needs = NodeNeeds(remote, order, batch_size, rank, nodes)
    needs.room_ahead()
    return needs


class ChunkSupply:
    """Fetches a worker's part of the chunks that its node needs: nothing until `advance` is called in a process.

    Args:
        needs: of the node.
        steps: that all workers make.
        workers: processes that make the batches of this rank; 0: this one.
        lead: steps by which the workers of one rank may be ahead of those of another rank.
    """

    def __init__(self, needs: NodeNeeds, steps: range, workers: int = 0, lead: int = 0):
        self._needs, self._steps, self._workers = needs, steps, max(workers, 1)
        self._lead = lead if needs.local_rank[1] > 1 else 0
        self._begun = torch.full((self._workers,), steps.start)  # the step that each worker makes now
        if workers:
            self._begun.share_memory_()
        self._ahead: dict[int, FetchAhead] = {}

    def advance(self, step: int) -> None:
        """Fetch ahead of the slowest worker; this one begins a step."""
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        self._begun[number] = step
        slowest = max(self._steps.start, int(self._begun.min()) - self._lead)
        for source in self._needs.readers:
            if source not in self._ahead:
                self._ahead[source] = self._fetch_ahead(source, number)
            self._ahead[source].advance(self._needs.position(slowest, source))

    def close(self) -> None:
        """End the threads after the chunks that they fetch now."""
        for ahead in self._ahead.values():
            ahead.close()
        self._ahead = {}

    def _fetch_ahead(self, source: int, number: int) -> FetchAhead:
        local_rank, local_ranks = self._needs.local_rank
        return FetchAhead(
            self._needs.plan(self._steps, source),
            self._needs.readers[source].fetch,
            self._needs.room_ahead()[source],
            local_rank * self._workers + number,
            local_ranks * self._workers,
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ahead": {}}  # threads are of one process
