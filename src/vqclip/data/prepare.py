"""Draw and index the data before anything is read.

the ranks with one cache folder divide the shards among themselves
first the pieces of sources that are packed into tars, then the tars and all other shards:
    repeat: pack or index for ten seconds; meet, so that an error or a request to stop on one rank ends all
    until no rank has pieces or shards left
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from vqclip import dist
from vqclip.data.remote import display_url
from vqclip.data.shard import Part
from vqclip.data.sources.base import OpensSource, Source
from vqclip.data.sources.files import skip_next_check
from vqclip.errors import DataError, name_section, printable
from vqclip.io.atomic import remove_leftovers
from vqclip.io.files import cache_folder
from vqclip.process import progress

__all__ = ["HasShards", "PackedFirst", "open_source", "prepare_shard", "prepare_sources"]

logger = logging.getLogger("vqclip.data")

_ROUND_S = 10.0
"""Seconds of work after which a rank finishes its current shard and meets the others."""
_WAIT_S = 0.2
"""Seconds between two looks at what another job is making."""
_Named: TypeAlias = list[tuple[str, Part]]
"""Parts, each with the key path of its source."""


class HasShards(Protocol):
    """The config of a source that can be prepared."""

    def shards(self) -> Sequence[Part]:
        """Return the tars or other parts, after drawing missing ones; none for a source without an index."""
        ...


@runtime_checkable
class PackedFirst(Protocol):
    """The config of a source that is packed first, which other processes open without asking a server again."""

    @property
    def opened(self) -> Any:
        """JSON value that `pieces` has made; None if there is none."""

    def set_opened(self, opened: Any) -> None:
        """Have `pieces`, `shards` and `build` use the value of another process, if they can."""

    def pieces(self) -> Sequence[Part]:
        """Return what is packed before `shards` can be listed."""
        ...


def prepare_sources(sources: Sequence[HasShards], keys: Sequence[str] = ()) -> None:
    """Draw and index missing data. A collective: every rank of the job must call it.

    Indexing reads every byte of the shards, and downloads those at URLs. Ranks with the same cache folder divide the
    shards among themselves, so every shard is read once for each cache, whether all nodes share one or each has its
    own. All ranks meet every few seconds, so that only a shard that stalls can exceed the timeout of the job, even for
    huge data. Drawing is a single wait: draw hundreds of thousands of scenes in advance (``vqclip data draw``).

    Args:
        sources: configurations of the sources.
        keys: key path of each, for messages.

    Raises:
        DataError: on every rank, with the message of the first rank that failed.
        StopRequested: on every rank, when one has been asked to stop (`vqclip.process.progress`).
    """
    group = _ranks_with_this_cache()
    place = group.index(dist.rank())
    if place == 0:
        with contextlib.suppress(OSError):
            remove_leftovers(cache_folder() / "index")
    is_packed = any(isinstance(each, PackedFirst) for each in sources)
    for list_parts in (_list_pieces, _list_shards) if is_packed else (_list_shards,):
        parts = _list_on_all_ranks(functools.partial(list_parts, sources, keys), sources, group)
        left = parts[place :: len(group)][::-1]
        more = True
        while more:
            with dist.raise_on_all_ranks():
                _prepare_for_a_while(left)
            more = dist.any_rank(bool(left))
    skip_next_check(part for _, part in parts)


def _list_on_all_ranks(list_parts: Callable[[], _Named], sources: Sequence[HasShards], group: list[int]) -> _Named:
    """Return the same parts on all ranks of one cache; the first lists them, so that data are drawn or fetched once."""
    is_first = dist.rank() == group[0]
    parts: _Named = []
    with dist.raise_on_all_ranks():
        if is_first:
            parts = list_parts()
    packed = [each for each in sources if isinstance(each, PackedFirst)]
    opened = dist.gather_json([each.opened for each in packed])[group[0]]
    with dist.raise_on_all_ranks():
        if not is_first:
            for source, value in zip(packed, opened, strict=True):
                source.set_opened(value)
            parts = list_parts()
    return parts


def _list_pieces(sources: Sequence[HasShards], keys: Sequence[str]) -> _Named:
    """Return what is to be packed, each with the key path of its source."""
    found: _Named = []
    for key, source in zip(keys or [""] * len(sources), sources, strict=True):
        with name_section(key):
            found += [(key, piece) for piece in source.pieces()] if isinstance(source, PackedFirst) else []
    return found


def _list_shards(sources: Sequence[HasShards], keys: Sequence[str]) -> _Named:
    """Return all shards, each with the key path of its source."""
    found: _Named = []
    for key, source in zip(keys or [""] * len(sources), sources, strict=True):
        with name_section(key):
            found += [(key, shard) for shard in source.shards()]
    return found


def _prepare_for_a_while(left: _Named) -> None:
    """Remove parts from the end of the list and prepare them: at least one, and for some seconds."""
    end = time.monotonic() + _ROUND_S
    while left:
        progress.heartbeat()
        key, part = left.pop()
        with name_section(key):
            if prepare_shard(part) is False:  # another job is making it
                left.insert(0, (key, part))
                time.sleep(_WAIT_S)
        if time.monotonic() >= end:
            break


def open_source(config: OpensSource) -> Source:
    """Open a source, and log its notes on rank 0: what is left out, grouped or ambiguous. Each is logged once.

    Raises:
        DataError: the data are missing or damaged.
    """
    source = config.build()
    if dist.is_main():
        path = getattr(config, "path", "data")
        shown = " ".join(map(display_url, path[:3] if isinstance(path, tuple) else [str(path)]))
        for note in getattr(source, "notes", ()):  # sources of other packages may have none
            _log_once(f"{shown}: {note}")
    return source


@functools.cache
def _log_once(text: str) -> None:
    logger.info("%s", printable(text, one_line=True))


def prepare_shard(shard: Part) -> Any:
    """Index one shard if its index is missing or outdated; return False if another job is about to have made it.

    Raises:
        DataError: it is damaged, or cannot be read.
    """
    try:
        return shard.prepare()
    except OSError as error:
        raise DataError(f"{shard}: cannot be indexed: {error}") from error


def _ranks_with_this_cache() -> list[int]:
    """Return the ranks with this rank's cache folder, itself included: each creates a file and looks for all files."""
    rank = dist.rank()
    if not dist.is_distributed():
        return [rank]
    folder = cache_folder() / f"ranks-{dist.shared_seed():016x}"
    with contextlib.suppress(OSError):  # a read-only cache has no indexes to add, so each rank counts as alone
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(rank)).touch()
    dist.barrier()
    seen = [other for other in range(dist.world_size()) if other == rank or (folder / str(other)).exists()]
    dist.barrier()  # before this, another rank may still look for the file
    with contextlib.suppress(OSError):
        (folder / str(rank)).unlink()
        folder.rmdir()  # succeeds for the last one
    return seen
