"""Size of a source without reading it: from its index."""

from __future__ import annotations

from vqclip.data.sources.base import SourceConfigBase
from vqclip.data_tools.plan import DataCounts

__all__ = ["count_source"]


def count_source(source: SourceConfigBase) -> DataCounts:
    """Return the size of a source."""
    raise NotImplementedError
