"""Size of a source without reading its samples: from its index, or from counts of samples beside its shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from vqclip.data.chunks.counts import known_counts
from vqclip.data.chunks.index_file import ChunkIndex, open_index
from vqclip.data.chunks.location import find_index
from vqclip.data.chunks.survey import survey
from vqclip.data.remote import RemoteShard
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data_tools.plan import DataCounts
from vqclip.errors import DataError

__all__ = ["count_index", "count_source"]

_NUMBERS = "--samples, --shards and --bytes"


def count_source(source: SourceConfigBase, chunk: int) -> DataCounts:
    """Return the size of a source of plain tars: from its index, else from counts that others have written.

    Args:
        source: configuration of the source.
        chunk: samples of a chunk of an index that is still to be made.

    Raises:
        DataError: it consists of other files, or has neither index nor counts.
        StorageError: its server cannot be reached.
    """
    shards = source.shards()
    plain = [each for each in shards if isinstance(each, Path | RemoteShard)]
    if not plain or len(plain) < len(shards):
        raise DataError(f"kind {source.kind}: only the sizes of plain tars are known; expected {_NUMBERS} instead")
    path = find_index(plain)
    at_urls, weight = any(isinstance(each, RemoteShard) for each in plain), source.weight or 1.0
    if path is not None:
        return count_index(open_index(path, verify=False), at_urls, weight)
    counts = known_counts(plain)
    if counts is None or not sum(counts):
        others = f" and {len(plain) - 1} more" if plain[1:] else ""
        raise DataError(f"{plain[0]}{others}: no index; make it (vqclip data index SOURCE), or give {_NUMBERS}")
    size = sum(length for length, _ in survey(plain))
    found = _count(np.cumsum([0, *counts], dtype=np.int64), size, chunk, at_urls, weight)
    return replace(found, is_indexed=False)


def count_index(index: ChunkIndex, at_urls: bool, weight: float = 1.0) -> DataCounts:
    """Return the size of the data of an index."""
    return _count(index.firsts, int(index.lengths.sum()), index.chunk, at_urls, weight)


def _count(firsts: np.ndarray, size: int, chunk: int, at_urls: bool, weight: float) -> DataCounts:
    ends = np.unique(firsts[1:-1])
    crossing = int(((ends % chunk != 0) & (ends > 0) & (ends < firsts[-1])).sum())
    return DataCounts(int(firsts[-1]), len(firsts) - 1, size, chunk, crossing, weight, at_urls)
