"""Say what the data of a run need before it starts; by formulas, no sample is read.

Whether they fit the cache, whether an index is needed, and bytes and requests of an epoch, under either order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vqclip.data import SourceConfigBase
from vqclip.data.order import WindowedOrder
from vqclip.data.remote.cache import FILLED
from vqclip.data.remote.files import RemoteShard, is_gzip
from vqclip.data.tars.make import MOST_WITH_MEMBERS
from vqclip.data.tars.open import find_index
from vqclip.data.windows import Windows
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import format_bytes

_CHUNK_BYTES, _SHARD_BYTES, _MEMBER_BYTES, _TABLE_BYTES = 24, 96, 50, 80
"""Bytes in the index of a chunk, of a shard, and of a sample if it has their members; of a sample in the cache beside
its data."""


class DataCounts(NamedTuple):
    """Size of a source."""

    samples: int
    shards: int
    bytes: int
    chunk: int = 128
    """Samples of a chunk of its index."""
    weight: float = 1.0
    at_urls: bool = True


def count_source(source: SourceConfigBase) -> DataCounts:
    """Return the size of a source of plain tars, from its index.

    Raises:
        DataError: it consists of other files, or has no index.
        StorageError: its server cannot be reached.
    """
    tars = source.tar_set() if hasattr(source, "tar_set") else None
    shards = [] if tars is None else tars.shards
    plain = [each for each in shards if not is_gzip(each.name)]
    numbers = "--samples, --shards and --bytes"
    if tars is None or not plain or len(plain) < len(shards):
        raise DataError(f"kind {source.kind}: only the sizes of plain tars are known; expected {numbers} instead")
    if (index := find_index(plain, tars.rules)) is None:
        others = f" and {len(plain) - 1} more" if plain[1:] else ""
        raise DataError(f"{plain[0]}{others}: no index; make it (vqclip data index SOURCE), or give {numbers}")
    at_urls, size = any(isinstance(each, RemoteShard) for each in plain), int(index.lengths.sum())
    return DataCounts(index.samples, len(plain), size, index.chunk, source.weight or 1.0, at_urls)


def make_plan(
    data: Sequence[DataCounts], order: WindowedOrder | None = None, machines: int = 1, cache_gib: float = 100.0
) -> dict[str, Any]:
    """Return the needs of a run under both orders.

    full       the cache should hold all data at URLs; what it does not hold costs a chunk for every sample
    windowed   the cache should hold two windows, the one in use and the one fetched ahead; a chunk is fetched once, by
               each machine that needs it
    requests   one a chunk, and one more where it crosses the end of a shard; none for local data

    Args:
        data: sources, at least one.
        order: the windowed order; None: that of the defaults, with the chunks of the index.
        machines: number of machines.
        cache_gib: `remote.cache_gib`.

    Returns:
        The figures, those of each order under its name; bytes and requests of an epoch are those of all machines, bytes
        of the cache those of one. ``advice``: things to change, one sentence each.

    Raises:
        ConfigError: a chunk of the order is no multiple of the index's.
    """
    limit, index, window = cache_gib * 2**30 * FILLED, 0, (order or WindowedOrder()).window
    cached = list[Windows]()
    remote = [each for each in data if each.at_urls]
    remote_bytes = sum(each.bytes for each in remote)
    full, windowed = ({"cache_bytes": 0.0, "epoch_bytes": 0.0, "epoch_requests": 0.0} for _ in range(2))
    for each in data:
        chunk = order.chunk if order else each.chunk
        if chunk % each.chunk:
            raise ConfigError(
                f"data.order.chunk: got {chunk}; expected a multiple of {each.chunk}, the samples of the index"
            )
        chunks = -(-each.samples // each.chunk)
        requests = each.at_urls * (chunks + each.shards - 1)
        has_members = not each.at_urls and each.bytes <= MOST_WITH_MEMBERS  # of every sample; nothing is then cached
        index += chunks * _CHUNK_BYTES + each.shards * _SHARD_BYTES + has_members * each.samples * _MEMBER_BYTES

        misses = each.samples * each.weight * max(0.0, 1 - limit / max(1, remote_bytes))  # samples come at random
        times = max(machines, misses / chunks) if each.at_urls else each.weight
        full["cache_bytes"] += each.at_urls * each.bytes
        full["epoch_bytes"] += times * each.bytes
        full["epoch_requests"] += times * requests

        windows = Windows(each.samples, chunk, window, 0)
        cached += [] if has_members else [windows]
        # Lanes are dealt to machines in equal parts; a lane that two of them share is fetched by both.
        lanes = min(windows.lanes, math.ceil(windows.lanes / machines) + (windows.lanes % machines > 0))
        shared = (machines - math.gcd(machines, windows.lanes)) / windows.lanes
        times = each.weight * (1 + each.at_urls * shared)
        sample_bytes = _TABLE_BYTES + each.at_urls * each.bytes / each.samples
        windowed["cache_bytes"] += (not has_members) * 2 * windows.most_rows * lanes * chunk * sample_bytes
        windowed["epoch_bytes"] += times * each.bytes
        windowed["epoch_requests"] += times * requests
    advice = []
    times = windowed["cache_bytes"] / limit
    if full["cache_bytes"] > limit and times <= 1:
        fetched = full["epoch_bytes"] / remote_bytes
        advice.append(
            "choose data.order=windowed, which fits: in the full order the data are fetched "
            f"{fetched:,.1f} times an epoch"
        )
    elif full["cache_bytes"] > limit:
        largest = max(cached, key=lambda each: each.chunks / each.windows)
        fitting = largest.chunks // math.ceil(largest.windows * times)
        lower = f"lower data.order.window to {fitting:,}, or " if fitting else ""
        advice.append(
            f"neither order fits the cache: raise remote.cache_gib to {cache_gib * times:,.3g} for two windows, or "
            f"{lower}use more machines"
        )
    sums = {name: sum(getattr(each, name) for each in data) for name in ("samples", "shards", "bytes")}
    limits = {"index_bytes": index, "cache_gib": cache_gib, "cache_limit": limit}
    return {**sums, **limits, "full": full, "windowed": windowed, "advice": advice}


def format_plan(plan: dict[str, Any]) -> str:
    """Return a plan as a table, with the advice below."""
    size, both = format_bytes, (plan["full"], plan["windowed"])
    limit = f"of {size(plan['cache_limit'])} (remote.cache_gib={plan['cache_gib']:g})"
    rows = {
        "samples": [f"{plan['samples']:,} in {plan['shards']:,} shards"],
        "bytes": [f"{size(plan['bytes'])}, {size(plan['bytes'] / plan['samples'])} a sample"],
        "index": [f"{size(plan['index_bytes'])}, shared by the processes of a machine"],
        "data.order": ["full", "windowed"],
        "cache of a machine": [*(size(each["cache_bytes"]) for each in both), limit],
        "bytes an epoch": [size(each["epoch_bytes"]) for each in both],
        "requests an epoch": [f"{each['epoch_requests']:,.0f}" for each in both],
    }
    lines = [f"{name:18} " + "".join(f"{cell:14}" for cell in cells).rstrip() for name, cells in rows.items()]
    return "\n".join([*lines, "", *(plan["advice"] or ["it fits, in either order"])])
