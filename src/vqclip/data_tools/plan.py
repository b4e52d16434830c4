"""Needs of a run in start-up, memory, disk, network and money, by formulas, before any data are read.

    index       24 bytes a chunk, shared by the processes of a node; in the full order 88 bytes a sample in each process
    cache       two windows: the one in use, and the next one, which is fetched meanwhile
    requests    one a chunk, and one more where it crosses the end of a shard; each once an epoch
    extra       chunks that several nodes need, where nodes do not divide the lanes, or ranks the batch
    mixing      with f = batch / chunks of a window: 1 + f * f / 3 up to f = 1, then f + 1 / (3 * f)

A window is used in rounds, which take one sample of each of its chunks. A batch that consists of parts a and b of two
rounds has 2ab / f more pairs of one chunk than independent draws; this is the mean over all places where it may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from vqclip.data.batch_maker import PrefetchPlan
from vqclip.data.chunks.cache import ChunkCache
from vqclip.data.chunks.table import ROW
from vqclip.data.dealing import NodeLayout
from vqclip.data.order import FullOrder, GlobalOrder, WindowedOrder
from vqclip.data_tools.mixing import simulate_mixing
from vqclip.errors import ConfigError

__all__ = ["DataCounts", "FullPlan", "Job", "Plan", "WindowedPlan", "make_plan"]

CHUNK_BYTES, SHARD_BYTES = 24, 96
"""Bytes of a chunk and of a shard in the index."""
SAMPLE_BYTES = 88
"""Bytes of a sample in the indexes of the full order, which every process has."""
WORKER_BYTES = 160e6
"""Private memory of a forked worker; a spawned one has 520e6."""
NAME_BYTES = 16
"""Bytes of the name of a sample in the cache."""
_SIMULATED_STEPS = 16


@dataclass(frozen=True)
class DataCounts:
    """Size of a source."""

    samples: int
    shards: int
    bytes: int
    chunk: int = 128
    """Samples of a chunk of its index."""
    crossing: int | None = None
    """Ends of shards inside a chunk; None: all but the last."""
    weight: float = 1.0
    at_urls: bool = True
    is_indexed: bool = True

    @property
    def requests(self) -> int:
        """Requests that fetch all chunks once."""
        return -(-self.samples // self.chunk) + (self.shards - 1 if self.crossing is None else self.crossing)


@dataclass(frozen=True)
class Job:
    """Processes that train, and how they read; see `vqclip.data.DataConfig`."""

    batch_size: int
    """G, over all nodes."""
    nodes: int = 1
    gpus: int = 1
    """Ranks of a node."""
    order: FullOrder | WindowedOrder = field(default_factory=WindowedOrder)
    cache_gib: float = 100.0
    rate: float = 1000.0
    """Images a second and GPU."""
    workers: int = 2
    prefetch: int = 2
    prefetch_gib: float = 2.0
    image_size: int = 224
    bandwidth: float | None = None
    """Bytes a second that a node can fetch or read; None: unknown."""
    seed: int = 0


def make_plan(data: Sequence[DataCounts], job: Job) -> Plan:
    """Return the plan of a run.

    Args:
        data: sources, at least one.
        job: processes and settings.

    Raises:
        ConfigError: the batch is larger than an epoch, or a chunk of the order is no multiple of the index's.
    """
    return WindowedPlan(data, job) if isinstance(job.order, WindowedOrder) else FullPlan(data, job)


class Plan:
    """Needs of a run, in either order: bytes, seconds, numbers of requests."""

    def __init__(self, data: Sequence[DataCounts], job: Job):
        self.data, self.job = tuple(data), job
        self.order = GlobalOrder([each.samples for each in data], [each.weight for each in data], job.seed, job.order)
        self._epoch = float(sum(self.order.slots))
        if job.batch_size > self.order.epoch_size:
            raise ConfigError(
                f"--batch: got {job.batch_size}, more than the {self.order.epoch_size} samples of an epoch"
            )
        self.samples = sum(each.samples for each in data)
        self.bytes = sum(each.bytes for each in data)
        self.cache_limit = int(job.cache_gib * 2**30)
        """Bytes of the cache that data may take."""
        self.ranks = job.nodes * job.gpus

    @property
    def epoch_steps(self) -> float:
        """Steps of an epoch."""
        return self.order.epoch_size / self.job.batch_size

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, if the images of `Job.rate` come in time."""
        return self.order.epoch_size / (self.job.rate * self.ranks)

    order_text: str
    """Description of the order."""
    index_text: str
    """Place of the index in memory."""

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        raise NotImplementedError

    @property
    def rank_bytes(self) -> float:
        """Memory of a rank beside model and Python: batches prepared ahead, and workers."""
        job, rows = self.job, -(-self.job.batch_size // self.ranks)
        size = rows * 3 * job.image_size**2
        ahead = PrefetchPlan.choose(rows, size, max(job.workers, 1), job.prefetch, int(job.prefetch_gib * 2**30))
        batches = max(1, ahead.tasks * job.workers / ahead.parts)
        return batches * size + job.workers * WORKER_BYTES

    @property
    def node_bytes(self) -> float:
        """Memory of all ranks of a node and of the index."""
        return self.job.gpus * self.rank_bytes + self.index_bytes

    @property
    def preparation_bytes(self) -> float:
        """Bytes that a node reads once, before the first step of the first start."""
        return 0

    @property
    def first_batch_bytes(self) -> float:
        """Bytes that a node reads for its part of the first batch."""
        raise NotImplementedError

    @property
    def cache_bytes(self) -> float:
        """Bytes of the cache that a node needs for data."""
        raise NotImplementedError

    @property
    def epoch_bytes(self) -> float:
        """Bytes that all nodes together fetch, or read from local disks, in an epoch."""
        raise NotImplementedError

    @property
    def epoch_requests(self) -> float:
        """Requests of all nodes in an epoch; none for local data."""
        raise NotImplementedError

    @property
    def node_bytes_s(self) -> float:
        """Bytes a second and node."""
        return self.epoch_bytes / self.epoch_s / self.job.nodes

    @property
    def node_requests_s(self) -> float:
        """Requests a second and node."""
        return self.epoch_requests / self.epoch_s / self.job.nodes

    def price(self, thousand_requests: float, gb: float) -> float:
        """Return the price of an epoch, from that of 1,000 requests and of 1e9 bytes."""
        return self.epoch_requests / 1000 * thousand_requests + self.epoch_bytes / 1e9 * gb

    @property
    def mixing(self) -> float:
        """Expected variance of a batch's topic shares over that of independent draws; see `simulate`."""
        return 1.0

    def simulate(self, steps: int = 1) -> float:
        """Return the same, simulated for the largest source, if each of its shards has one topic.

        Args:
            steps: successive batches that are taken as one.
        """
        data = max(self.data, key=lambda each: each.samples)
        share = data.samples * data.weight / self._epoch
        order = GlobalOrder([data.samples], [1.0], self.job.seed, self.job.order)
        size = max(1, round(self.job.batch_size * share))
        return simulate_mixing(order, size, min(max(data.shards, 2), data.samples), self.job.seed, 4, steps)

    def advice(self) -> list[str]:
        """Return what should be changed, one sentence each."""
        found = []
        if self.job.bandwidth is not None and self.node_bytes_s > self.job.bandwidth:
            rate = self.job.rate * self.job.bandwidth / self.node_bytes_s
            found.append(
                f"the network is too slow: {self.node_bytes_s / 1e6:,.0f} MB/s a node are needed; at "
                f"{self.job.bandwidth / 1e6:,.0f} MB/s a GPU gets {rate:,.0f} images a second"
            )
        return found


class FullPlan(Plan):
    """One order of all samples: indexes in every process, shards fetched whole."""

    order_text = "full"
    index_text = "in every process"

    @property
    def index_bytes(self) -> int:
        """See `Plan.index_bytes`; each process has them."""
        return self.samples * SAMPLE_BYTES

    @property
    def rank_bytes(self) -> float:
        """See `Plan.rank_bytes`, and the indexes."""
        return super().rank_bytes + self.index_bytes

    @property
    def node_bytes(self) -> float:
        """See `Plan.node_bytes`."""
        return self.job.gpus * self.rank_bytes

    @property
    def preparation_bytes(self) -> float:
        """See `Plan.preparation_bytes`: all shards are hashed."""
        return self.bytes

    @property
    def first_batch_bytes(self) -> float:
        """See `Plan.first_batch_bytes`: whole shards, at URLs."""
        return sum(self._batch_shards(each) * self._read_bytes(each) for each in self.data)

    @property
    def cache_bytes(self) -> float:
        """See `Plan.cache_bytes`."""
        return sum(each.bytes for each in self.data if each.at_urls)

    @property
    def epoch_bytes(self) -> float:
        """See `Plan.epoch_bytes`; if the cache holds the data, that of the first epoch."""
        local = sum(each.bytes * each.weight for each in self.data if not each.at_urls)
        return local + sum(self._fetches(each) * each.bytes for each in self.data if each.at_urls)

    @property
    def epoch_requests(self) -> float:
        """See `Plan.epoch_requests`."""
        return sum(self._fetches(each) * each.shards for each in self.data if each.at_urls)

    def advice(self) -> list[str]:
        """See `Plan.advice`."""
        found = super().advice()
        if self.cache_bytes > self.cache_limit:
            found.append(
                f"the data do not fit in remote.cache_gib={self.job.cache_gib:g}: every byte would be fetched "
                f"{self.epoch_bytes / self.cache_bytes:,.0f} times an epoch; choose data.order=windowed"
            )
        if self.index_bytes > 2e9:
            found.append(
                f"each process would hold {self.index_bytes / 1e9:,.1f} GB of indexes; choose data.order=windowed"
            )
        return found

    def _batch_shards(self, each: DataCounts) -> float:
        """Return how many shards a node's part of a batch has samples of."""
        rows = self.job.batch_size * each.samples * each.weight / self._epoch / self.job.nodes
        return min(rows, each.shards * -np.expm1(rows * np.log1p(-1 / each.shards))) if each.shards > 1 else 1.0

    def _read_bytes(self, each: DataCounts) -> float:
        return each.bytes / (each.shards if each.at_urls else each.samples)

    def _fetches(self, each: DataCounts) -> float:
        """Return how often each shard is fetched in an epoch, by all nodes."""
        missing = max(0.0, 1 - self.cache_limit / self.cache_bytes)  # samples come in random order
        return max(self.job.nodes, each.samples * each.weight * missing / each.shards)


class WindowedPlan(Plan):
    """Windows of chunks: one mapped index, chunks fetched once an epoch by the node that owns them."""

    index_text = "shared by the processes of a machine"

    def __init__(self, data: Sequence[DataCounts], job: Job):
        super().__init__(data, job)
        assert isinstance(job.order, WindowedOrder)
        self.kind = job.order
        self.nodes = np.repeat(np.arange(job.nodes), job.gpus).tolist()
        for each in data:
            if self.kind.chunk % each.chunk:
                raise ConfigError(
                    f"data.order.chunk: got {self.kind.chunk}; expected a multiple of the {each.chunk} samples of a "
                    "chunk of the index"
                )
        self.cache_limit = ChunkCache(Path(), int(self.cache_limit)).room
        self.windows = [self.kind.windows(job.seed, n, each.samples, 0) for n, each in enumerate(data)]
        """Windows of a pass through each source."""
        self.window_chunks = [each.chunks / each.windows for each in self.windows]
        """Mean chunks of a window of each source."""

    @property
    def order_text(self) -> str:  # type: ignore[override]
        """See `Plan.order_text`."""
        shown = ", ".join(f"{each.windows:,} of {each.chunks / each.windows:,.0f}" for each in self.windows)
        return f"windowed: {shown} chunks of {self.kind.chunk:,} samples"

    @property
    def index_bytes(self) -> int:
        """See `Plan.index_bytes`; the processes of a node share it."""
        return sum(-(-each.samples // each.chunk) * CHUNK_BYTES + each.shards * SHARD_BYTES for each in self.data)

    @property
    def preparation_bytes(self) -> float:
        """See `Plan.preparation_bytes`."""
        return sum(each.bytes for each in self.data if not each.is_indexed)

    @property
    def first_batch_bytes(self) -> float:
        """See `Plan.first_batch_bytes`; each of its samples is of another chunk, as long as a window has as many."""
        total = 0.0
        for each, chunks in zip(self.data, self.window_chunks, strict=True):
            rows = self.job.batch_size * each.samples * each.weight / self._epoch
            total += min(rows, chunks) / self.job.nodes * self._chunk_bytes(each)
        return total

    @cached_property
    def extra(self) -> list[float]:
        """Chunks of each source that are fetched by a further node, at most, for each chunk."""
        return [self._extra(number) for number in range(len(self.data))]

    @property
    def cache_bytes(self) -> float:
        """See `Plan.cache_bytes`: two windows of the chunks of the node with most of them."""
        return 2 * sum(
            max(self.order.window_chunks(number, node * self.job.gpus, self.nodes) for node in range(self.job.nodes))
            * self._cached_bytes(each)
            for number, each in enumerate(self.data)
        )

    @property
    def epoch_bytes(self) -> float:
        """See `Plan.epoch_bytes`."""
        return sum(
            each.bytes * each.weight * (1 + extra * each.at_urls)
            for each, extra in zip(self.data, self.extra, strict=True)
        )

    @property
    def epoch_requests(self) -> float:
        """See `Plan.epoch_requests`."""
        return sum(
            each.requests * each.weight * (1 + extra)
            for each, extra in zip(self.data, self.extra, strict=True)
            if each.at_urls
        )

    @property
    def mixing(self) -> float:
        """See `Plan.mixing`."""
        number = int(np.argmax([each.samples for each in self.data]))
        share = self.data[number].samples * self.data[number].weight / self._epoch
        rounds = self.job.batch_size * share / self.window_chunks[number]
        return 1 + rounds**2 / 3 if rounds < 1 else rounds + 1 / (3 * rounds)

    def advice(self) -> list[str]:
        """See `Plan.advice`."""
        found = super().advice()
        if any(each.at_urls and not each.is_indexed for each in self.data):
            size = sum(each.bytes for each in self.data if each.at_urls and not each.is_indexed)
            then = (
                "fetches all of them to make it"
                if size <= self.job.cache_gib * 2**30
                else "ends: they exceed the cache"
            )
            found.append(
                f"the data at URLs have no index; without one training {then}. Make it: vqclip data index SOURCE"
            )
        if self.cache_bytes > self.cache_limit:
            window = int(self.kind.window * self.cache_limit / self.cache_bytes)
            needed = self.job.cache_gib * self.cache_bytes / self.cache_limit
            lower = f"lower data.order.window to {window:,}, or " if window else ""
            found.append(
                f"two windows do not fit in the cache: raise remote.cache_gib to {needed:,.3g}, or "
                f"{lower}use more nodes"
            )
        if self.mixing > 2 and max(each.windows for each in self.windows) > 1:
            found.append(
                f"a batch has {self.mixing:,.1f} samples of a chunk: if neighbouring samples are of one topic, raise "
                f"data.order.window to {self.job.batch_size:,}"
            )
        if any(each.at_urls for each in self.data) and max(self.extra) > 0.02:
            nodes, lanes = self.job.nodes, min(each.lanes for each in self.windows)
            near = [n for n in range(1, 2 * nodes) if lanes % n == 0 and self.job.batch_size % (n * self.job.gpus) == 0]
            best = min(near, key=lambda n: (abs(n - nodes), n), default=1)
            found.append(
                f"{max(self.extra):.0%} of the chunks are fetched by several of the {nodes} nodes; {best} nodes, which "
                f"divide the {lanes} lanes of a window and, with their GPUs, the batch, fetch none twice"
            )
        return found

    def _chunk_bytes(self, each: DataCounts) -> float:
        return each.bytes / each.samples * min(self.kind.chunk, each.samples)

    def _cached_bytes(self, each: DataCounts) -> float:
        """Return the bytes of a chunk in the cache: tables, and the data if they are at URLs."""
        data = each.bytes / each.samples if each.at_urls else 0
        return self.kind.chunk * (data + ROW + NAME_BYTES)

    def _extra(self, number: int) -> float:
        """Return the lanes that a further node needs, of some dealt batches, over all lanes."""
        windows, layout, gpus = self.windows[number], NodeLayout(self.nodes), self.job.gpus
        lanes = windows.lanes
        needed = np.stack([layout.lanes_of(node * gpus, lanes) for node in range(len(layout))])
        size = round(self.job.batch_size * self.data[number].weight * windows.size / self._epoch)
        if lanes % len(layout) or size % self.ranks:
            for step in range(_SIMULATED_STEPS):
                lane = windows.lane_of(np.arange(step * size, (step + 1) * size) % windows.size)
                needed[layout.deal(np.zeros_like(lane), lane, [lanes]), lane] = True
        return float(needed.sum() / lanes - 1)
