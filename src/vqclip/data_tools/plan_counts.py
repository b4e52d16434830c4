"""Size of a source without reading its samples: from its index."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vqclip.data.chunks.index_file import ChunkIndex, open_index
from vqclip.data.chunks.location import find_index
from vqclip.data.remote import RemoteShard
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data_tools.plan import DataCounts
from vqclip.errors import DataError

__all__ = ["count_index", "count_source"]

_NUMBERS = "--samples, --shards and --bytes"


def count_source(source: SourceConfigBase) -> DataCounts:
    """Return the size of a source of plain tars.

    Raises:
        DataError: it consists of other files, or has no index.
        StorageError: its server cannot be reached.
    """
    shards = source.shards()
    plain = [each for each in shards if isinstance(each, Path | RemoteShard)]
    if not plain or len(plain) < len(shards):
        raise DataError(f"kind {source.kind}: only the sizes of plain tars are known; expected {_NUMBERS} instead")
    path = find_index(plain)
    if path is None:
        raise DataError(
            f"{plain[0]} and {len(plain) - 1} more: have no index; make it (vqclip data index SOURCE), or give "
            f"{_NUMBERS}"
        )
    at_urls = any(isinstance(each, RemoteShard) for each in plain)
    return count_index(open_index(path, verify=False), at_urls, source.weight or 1.0)


def count_index(index: ChunkIndex, at_urls: bool, weight: float = 1.0) -> DataCounts:
    """Return the size of the data of an index."""
    ends = np.unique(index.firsts[1:-1])
    crossing = int(((ends % index.chunk != 0) & (ends > 0) & (ends < index.samples)).sum())
    size = int(index.lengths.sum())
    return DataCounts(index.samples, index.shards, size, index.chunk, crossing, weight, at_urls)
