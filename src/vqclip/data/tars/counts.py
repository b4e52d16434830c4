"""Numbers of samples that others have written beside shards, known before anything is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vqclip.data.remote import RemoteShard
from vqclip.data.remote.files import fetch_bytes
from vqclip.data.remote.urls import beneath, split_query
from vqclip.data.shard import Shard
from vqclip.data.tars.open import data_folder
from vqclip.errors import StorageError
from vqclip.io.files import read_bounded

__all__ = ["known_counts"]

_INDEXES = ("sizes.json", "index.json", "shardindex.json")
"""Files with the counts of all shards of a folder: {name: samples}, or WebDataset's "shardlist"."""
_LARGEST_INDEX, _LARGEST_STATS = 64 << 20, 1 << 20
_THREADS = 16
_MOST = 2**40


def known_counts(shards: Sequence[Shard]) -> list[int] | None:
    """Return the number of samples of each shard, as files beside them say; None if one of them has none.

    A file for all shards (`sizes.json` of open_clip, `index.json` or `shardindex.json` of WebDataset) is read if it is
    there, otherwise img2dataset's `NNNNN_stats.json` of each shard. They are not compared with the shards.

    Raises:
        StorageError: a server cannot be reached.
    """
    folder = data_folder(shards)
    for name in _INDEXES if folder is not None else ():
        listed = _parse_index(_read_json(folder, name, shards[0], _LARGEST_INDEX))
        if all(shard.name in listed for shard in shards):
            return [listed[shard.name] for shard in shards]
    if not shards or _successes(shards[0]) is None:  # most data sets without statistics end here
        return None
    with ThreadPoolExecutor(_THREADS, "counts") as pool:
        found = list(pool.map(_successes, shards))
    return None if None in found else [count for count in found if count is not None]


def _successes(shard: Shard) -> int | None:
    """Return the samples of a shard from img2dataset's statistics; None if there are none."""
    stats = _read_json(data_folder([shard]), f"{shard.name.partition('.')[0]}_stats.json", shard, _LARGEST_STATS)
    return _count(stats.get("successes")) if isinstance(stats, dict) else None


def _read_json(folder: Path | str | None, name: str, shard: Shard, limit: int) -> Any:
    """Return the content of a JSON file in the folder of a shard; None if it is missing or contains no JSON."""
    data = b""
    try:
        if isinstance(folder, Path):
            data = read_bounded(folder / name, limit)
        elif folder is not None and isinstance(shard, RemoteShard):
            data = fetch_bytes(beneath(folder, name), shard.options, limit)
        return json.loads(data) if len(data) <= limit else None
    except StorageError as error:
        if error.kind != "gone":
            raise
    except (OSError, ValueError, RecursionError):
        pass
    return None


def _parse_index(content: Any) -> dict[str, int]:
    """Return file name → samples of all shards that a file lists."""
    if not isinstance(content, dict):
        return {}
    rows: Any = content.items()
    if isinstance(content.get("shardlist"), list):
        rows = ((row.get("url"), row.get("nsamples")) for row in content["shardlist"] if isinstance(row, dict))
    counted = ((split_query(url)[0].rpartition("/")[2], _count(count)) for url, count in rows if isinstance(url, str))
    return {url: count for url, count in counted if count is not None}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None
