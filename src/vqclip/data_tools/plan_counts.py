"""Size of a source without reading its samples: from indexes."""

from __future__ import annotations

from pathlib import Path

from vqclip.data.index import load_index
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data_tools.plan import DataCounts
from vqclip.errors import ConfigError

__all__ = ["count_source"]


def count_source(source: SourceConfigBase) -> DataCounts:
    """Return the size of a source of tars, after indexing those without an index.

    Raises:
        ConfigError: it consists of other files, or of shards at URLs.
        DataError: a shard is damaged.
    """
    shards = source.shards()
    local = [each for each in shards if isinstance(each, Path)]
    if not local or len(local) < len(shards):
        raise ConfigError(
            f"kind {source.kind}: only tars on this machine are counted; expected --samples, --shards and --bytes"
        )
    indexes = [load_index(each) for each in local]
    samples, size = sum(map(len, indexes)), sum(each.length for each in indexes)
    return DataCounts(samples, len(local), size, weight=source.weight or 1.0, at_urls=False)
