"""Needs of a run before it starts: cache, index, bytes and requests of an epoch; by formulas, no sample is read.

cache       full order: all data at URLs; windowed order: two windows, the one in use and the one fetched ahead
bytes       windowed, or a cache that holds all: each chunk once, by each machine that needs it
            full order, otherwise: a chunk for every sample that is not in the cache
requests    one a chunk, and one more where it crosses the end of a shard; none for local data
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vqclip.data.order import FullOrder, WindowedOrder
from vqclip.data.remote import RemoteShard
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.data.tars.counts import known_counts
from vqclip.data.tars.locate import find_index
from vqclip.data.tars.make import MOST_WITH_MEMBERS, survey
from vqclip.data.windows import Windows
from vqclip.errors import ConfigError, DataError

__all__ = ["DataCounts", "Job", "Plan", "count_source", "make_plan"]

_CHUNK_BYTES, _SHARD_BYTES, _MEMBER_BYTES, _TABLE_BYTES = 24, 96, 50, 80
"""Bytes in the index of a chunk, of a shard, and of a sample if it has their members; of a sample in the cache beside
its data."""
_FILLED = 0.95
"""Part of the cache that is filled."""
_NUMBERS = "--samples, --shards and --bytes"


@dataclass(frozen=True)
class DataCounts:
    """Size of a source."""

    samples: int
    shards: int
    bytes: int
    chunk: int = 128
    """Samples of a chunk of its index."""
    weight: float = 1.0
    at_urls: bool = True
    is_indexed: bool = True

    @property
    def has_members(self) -> bool:
        """Return whether the index has the place of every member, so that nothing is cached."""
        return not self.at_urls and self.bytes <= MOST_WITH_MEMBERS

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        members = self.samples * _MEMBER_BYTES * self.has_members
        return -(-self.samples // self.chunk) * _CHUNK_BYTES + self.shards * _SHARD_BYTES + members


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
    bandwidth: float | None = None
    """Bytes a second that a node can read; None: unknown."""
    seed: int = 0


class Plan(NamedTuple):
    """Needs of a run. Bytes and requests of an epoch are those of all nodes; those of the cache are of one node."""

    samples: int
    shards: int
    bytes: int
    order: str
    """Description of the order."""
    index_bytes: int
    cache_bytes: float
    cache_limit: float
    epoch_steps: float
    epoch_s: float
    """Seconds of an epoch, if the images come in time."""
    epoch_bytes: float
    epoch_requests: float
    node_bytes_s: float
    """Bytes a second and node."""
    advice: list[str]
    """Things to change, one sentence each."""


class _Needs(NamedTuple):
    """Needs of one source; see `Plan`."""

    cache: float
    bytes: float
    requests: float


def count_source(source: SourceConfigBase, chunk: int) -> DataCounts:
    """Return the size of a source of plain tars: from its index, else from counts that others have written.

    Args:
        source: configuration of the source.
        chunk: samples of a chunk of an index that is still to be made.

    Raises:
        DataError: it consists of other files, or has neither index nor counts.
        StorageError: its server cannot be reached.
    """
    tars = source.tar_set() if isinstance(source, CaptionShardsConfig | ClassShardsConfig) else None
    shards = [] if tars is None else tars.shards
    plain = [each for each in shards if isinstance(each, Path | RemoteShard)]
    if tars is None or not plain or len(plain) < len(shards):
        raise DataError(f"kind {source.kind}: only the sizes of plain tars are known; expected {_NUMBERS} instead")
    index = find_index(plain, tars.rules)
    at_urls, weight = any(isinstance(each, RemoteShard) for each in plain), source.weight or 1.0
    if index is not None:
        size = int(index.lengths.sum())
        return DataCounts(int(index.firsts[-1]), len(plain), size, index.chunk, weight, at_urls)
    counts = known_counts(plain)
    if counts is None or not sum(counts):
        others = f" and {len(plain) - 1} more" if plain[1:] else ""
        raise DataError(f"{plain[0]}{others}: no index; make it (vqclip data index SOURCE), or give {_NUMBERS}")
    size = sum(each.length for each in survey(plain))
    return DataCounts(sum(counts), len(plain), size, chunk, weight, at_urls, is_indexed=False)


def make_plan(data: Sequence[DataCounts], job: Job) -> Plan:
    """Return the needs of a run.

    Args:
        data: sources, at least one.
        job: processes and settings.

    Raises:
        ConfigError: the batch is larger than an epoch, or a chunk of the order is no multiple of the index's.
    """
    samples = sum(round(each.samples * each.weight) for each in data)
    if job.batch_size > samples:
        raise ConfigError(f"--batch: got {job.batch_size}, more than the {samples} samples of an epoch")
    limit = job.cache_gib * 2**30 * _FILLED
    if isinstance(job.order, WindowedOrder):
        needs = [_windowed_needs(each, job, job.order) for each in data]
    else:
        whole = sum(each.bytes for each in data if each.at_urls)
        needs = [_full_needs(each, job, max(0.0, 1 - limit / max(1, whole))) for each in data]
    cache, size, requests = (float(sum(column)) for column in zip(*needs, strict=True))
    seconds = samples / (job.rate * job.nodes * job.gpus)
    plan = Plan(
        samples=sum(each.samples for each in data),
        shards=sum(each.shards for each in data),
        bytes=sum(each.bytes for each in data),
        order=job.order.kind,
        index_bytes=sum(each.index_bytes for each in data),
        cache_bytes=cache,
        cache_limit=limit,
        epoch_steps=samples / job.batch_size,
        epoch_s=seconds,
        epoch_bytes=size,
        epoch_requests=requests,
        node_bytes_s=size / seconds / job.nodes,
        advice=[],
    )
    plan.advice.extend(_advice(plan, data, job))
    return plan


def _full_needs(each: DataCounts, job: Job, missing: float) -> _Needs:
    """Return the needs of the full order, where a fraction of the data does not fit in the cache."""
    if not each.at_urls:
        return _Needs(0, each.bytes * each.weight, 0)
    chunks = each.samples / each.chunk
    fetched = max(job.nodes * chunks, each.samples * each.weight * missing)  # samples come in random order
    return _Needs(each.bytes, fetched / chunks * each.bytes, fetched / chunks * _requests(each))


def _windowed_needs(each: DataCounts, job: Job, order: WindowedOrder) -> _Needs:
    if order.chunk % each.chunk:
        raise ConfigError(
            f"data.order.chunk: got {order.chunk}; expected a multiple of the {each.chunk} samples of a chunk of the "
            "index"
        )
    windows = Windows(each.samples, order.chunk, order.window, 0)
    # Lanes are dealt to nodes in equal parts; a lane that two of them share is fetched by both.
    lanes = math.ceil(windows.lanes / job.nodes) + (windows.lanes % job.nodes > 0)
    data = each.bytes / each.samples if each.at_urls else 0
    cache = (
        0
        if each.has_members
        else 2 * windows.most_rows * min(lanes, windows.lanes) * order.chunk * (data + _TABLE_BYTES)
    )
    fetched = each.weight * (1 + _shared_lanes(windows.lanes, job.nodes) * each.at_urls)
    return _Needs(cache, fetched * each.bytes, fetched * _requests(each) * each.at_urls)


def _shared_lanes(lanes: int, nodes: int) -> float:
    """Return the part of the lanes that a further node needs."""
    return (nodes - math.gcd(nodes, lanes)) / lanes


def _requests(each: DataCounts) -> int:
    """Return the requests that fetch all chunks once."""
    return -(-each.samples // each.chunk) + each.shards - 1


def _advice(plan: Plan, data: Sequence[DataCounts], job: Job) -> list[str]:
    found, remote = [], [each for each in data if each.at_urls]
    if job.bandwidth is not None and plan.node_bytes_s > job.bandwidth:
        rate = job.rate * job.bandwidth / plan.node_bytes_s
        found.append(
            f"the network is too slow: {plan.node_bytes_s / 1e6:,.0f} MB/s a node are needed; at "
            f"{job.bandwidth / 1e6:,.0f} MB/s a GPU gets {rate:,.0f} images a second"
        )
    if any(not each.is_indexed for each in remote):
        size = sum(each.bytes for each in remote if not each.is_indexed)
        then = "fetches all of them to make it" if size <= job.cache_gib * 2**30 else "ends: they exceed the cache"
        found.append(f"the data at URLs have no index; without one training {then}. Make it: vqclip data index SOURCE")
    if not isinstance(job.order, WindowedOrder):
        if plan.cache_bytes > plan.cache_limit:
            found.append(
                f"the data do not fit in remote.cache_gib={job.cache_gib:g}: they would be fetched "
                f"{plan.epoch_bytes / plan.cache_bytes:,.1f} times an epoch; choose data.order=windowed"
            )
        return found
    if plan.cache_bytes > plan.cache_limit:
        window = int(job.order.window * plan.cache_limit / plan.cache_bytes)
        lower = f"lower data.order.window to {window:,}, or " if window else ""
        needed = job.cache_gib * plan.cache_bytes / plan.cache_limit
        found.append(
            f"two windows do not fit in the cache: raise remote.cache_gib to {needed:,.3g}, or {lower}use more nodes"
        )
    windows = [Windows(each.samples, job.order.chunk, job.order.window, 0) for each in data]
    largest = windows[int(np.argmax([each.samples for each in data]))]
    alike = job.batch_size / (largest.chunks / largest.windows)
    if alike > 2 and largest.windows > 1:
        found.append(
            f"a batch has about {alike:,.1f} samples of a chunk: if neighbouring samples are of one topic, raise "
            f"data.order.window to {job.batch_size:,}"
        )
    lanes = min(each.lanes for each in windows)
    if remote and _shared_lanes(lanes, job.nodes) > 0.02:
        near = [n for n in range(1, 2 * job.nodes) if lanes % n == 0 and job.batch_size % (n * job.gpus) == 0]
        best = min(near, key=lambda n: (abs(n - job.nodes), n), default=1)
        found.append(
            f"{_shared_lanes(lanes, job.nodes):.0%} of the chunks are fetched by two of the {job.nodes} nodes; {best} "
            f"nodes, which divide the {lanes} lanes of a window, fetch none twice"
        )
    return found
