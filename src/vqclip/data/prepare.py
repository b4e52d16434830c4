"""Drawing and indexing before anything is read: shared by all ranks, and never longer in one wait than a shard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vqclip import dist
from vqclip.data.index import load_index
from vqclip.data.shard import Shard
from vqclip.errors import DataError, StopRequested, StorageError
from vqclip.io.cache import cache_folder
from vqclip.process import progress

__all__ = ["HasShards", "prepare_sources"]

_ROUND_S = 10.0
"""Ranks meet after so many seconds of work, or after the shard that each of them is at then."""


class HasShards(Protocol):
    """What can be prepared: the config of a source."""

    def shards(self) -> Sequence[Shard]:
        """The tars, drawn if they are not there; none for a source without an index."""
        ...


def prepare_sources(sources: Sequence[HasShards]) -> None:
    """Draws and indexes what is not there yet; a collective: every rank of the job must call it.

    Indexing reads every byte of the shards, and fetches those at URLs. Ranks that see the same cache folder deal the
    shards out among themselves, so every shard is read once for each cache, be it shared by all nodes or local to each.
    All ranks meet every few seconds, so that only a shard that stalls can exceed the timeout of the job, however large
    the data are. Drawing is one wait: draw hundreds of thousands of scenes beforehand
    (``vqclip data``).

    Raises:
        DataError: on every rank, with the message of the first rank that failed.
        StopRequested: on every rank, when one has been asked to stop (`vqclip.process.progress`).
    """
    group = _ranks_with_this_cache()
    place = group.index(dist.rank())
    if place == 0:
        _agree(lambda: [source.shards() for source in sources])  # so that a data set is drawn once
    else:
        _agree(lambda: None)
    paths: list[Shard] = []
    _agree(lambda: paths.extend(shard for source in sources for shard in source.shards()))
    left = paths[place :: len(group)][::-1]
    while _agree(lambda: _index_for_a_while(left)):
        pass


def _index_for_a_while(left: list[Shard]) -> bool:
    """Takes shards off the end for some seconds, at least one; whether there are more."""
    end = time.monotonic() + _ROUND_S
    while left:
        progress.heartbeat()
        load_index(left.pop())
        if time.monotonic() >= end:
            break
    return bool(left)


def _ranks_with_this_cache() -> list[int]:
    """The ranks whose cache folder is this rank's, in order, itself included: each leaves a file, and looks for all."""
    rank = dist.rank()
    if not dist.is_distributed():
        return [rank]
    folder = cache_folder() / f"ranks-{dist.shared_seed():016x}"
    with contextlib.suppress(OSError):  # in a folder that is only read, everybody is alone: there is nothing to write
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(rank)).touch()
    dist.barrier()
    seen = [other for other in range(dist.world_size()) if other == rank or (folder / str(other)).exists()]
    dist.barrier()  # nobody takes a file away that another has not looked for yet
    with contextlib.suppress(OSError):
        (folder / str(rank)).unlink()
        folder.rmdir()  # succeeds for the last one
    return seen


def _agree(work: Callable[[], object]) -> bool:
    """Does the work; whether it gave something true on any rank. What one raises, all of them raise."""
    more, stops = False, False
    message: tuple[str, bool] | None = None
    try:
        more = bool(work())
    except (DataError, OSError) as error:
        message = str(error), isinstance(error, StorageError)
    except StopRequested:
        stops = True
    states = dist.gather_json([more, message, stops])
    if any(stops for *_, stops in states):
        raise StopRequested
    failed = [text for _, text, _ in states if text is not None]
    if failed:
        text, of_storage = failed[0]
        raise (StorageError if of_storage else DataError)(text)
    return any(more for more, *_ in states)
