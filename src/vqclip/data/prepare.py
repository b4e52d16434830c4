"""Draw, pack and index the data before anything is read, and open them.

rank 0 resolves what may move, such as the branch of a data set
the ranks with one cache folder divide the work among themselves: pieces to be packed into tars, shards to be indexed
repeat: pack or index for ten seconds; meet, so that an error or a request to stop on one rank ends all
until no rank has work left
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from vqclip import dist
from vqclip.data.remote.urls import display_url
from vqclip.data.sources.base import Preparation, ShardedSource, Source, SourceConfigBase
from vqclip.data.sources.files import FileSource, FileSourceConfig
from vqclip.data.sources.folder import FolderConfig
from vqclip.data.sources.kinds import parse_source
from vqclip.data.sources.packed import PackedConfig, Packing
from vqclip.errors import ConfigError, DataError, name_section, printable
from vqclip.io.atomic import remove_leftovers
from vqclip.io.files import cache_folder
from vqclip.process import progress

logger = logging.getLogger("vqclip.data")

T = TypeVar("T")

_ROUND_S = 10.0
"""Seconds of work after which a rank finishes its current shard and meets the others."""
_WAIT_S = 0.2
"""Seconds between two looks at what another job is making."""


def open_sources(sources: Sequence[SourceConfigBase], keys: Sequence[str] = ()) -> list[Source]:
    """Open sources, after drawing, packing and indexing what is missing. A collective: every rank must call it.

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
    keys = keys or [""] * len(sources)
    with contextlib.suppress(OSError):  # a read-only cache has no indexes to add, so each rank counts as alone
        cache_folder().mkdir(parents=True, exist_ok=True)
    group = dist.ranks_that_see(cache_folder())
    if dist.rank() == group[0]:
        with contextlib.suppress(OSError):
            for folder in (cache_folder(), cache_folder() / "index", *(cache_folder() / "index").glob("*.parts")):
                remove_leftovers(folder)

    def pin_all() -> list[dict[str, Any]]:
        pins = []
        for key, source in zip(keys, sources, strict=True):
            with name_section(key):
                pins.append(source.pins())
        return pins

    pins = _ask_first([0], pin_all)
    opening: list[SourceConfigBase | Packing] = []
    work: list[tuple[str, Preparation]] = []

    def open_all(paths: Sequence[str | None]) -> list[str | None]:
        """Open what is packed, and list the work; return the folders of packed tars."""
        for key, source, pin, path in zip(keys, sources, pins, paths, strict=True):
            with name_section(key):
                data: SourceConfigBase | Packing = source.model_copy(update=pin)
                if isinstance(data, PackedConfig):
                    files = data.image_files() if path is None else None
                    data = files or Packing(data, path=None if path is None else Path(path))
                opening.append(data)
                work.extend((key, each) for each in data.preparations())
        return [str(each.folder.path) if isinstance(each, Packing) else None for each in opening]

    # The first rank opens the data before the others, so that they are drawn or fetched once.
    paths = _ask_first(group, lambda: open_all([None] * len(sources)))
    with dist.raise_on_all_ranks():
        if dist.rank() != group[0]:
            open_all(paths)
    left = work[group.index(dist.rank()) :: len(group)][::-1]
    for _ in progress.in_rounds(_prepare(left), _ROUND_S):
        pass
    with dist.raise_on_all_ranks():
        return [open_source(data, key, is_checked=True) for data, key in zip(opening, keys, strict=True)]


def _ask_first(group: Sequence[int], work: Callable[[], T]) -> T:
    """Return the JSON value of a function that is called on the first rank of each group. A collective."""
    found: list[T] = []
    with dist.raise_on_all_ranks():
        if dist.rank() == group[0]:
            found.append(work())
    (value,) = dist.gather_json(found)[group[0]]
    return cast(T, value)


def _prepare(left: list[tuple[str, Preparation]]) -> Iterator[int]:
    """Do work from the end of the list, each with the key path of its source; yield after each."""
    while left:
        key, work = left.pop()
        with name_section(key):
            if prepare_shard(work) is False:  # another job does it
                left.insert(0, (key, work))
                time.sleep(_WAIT_S)
        yield 1


def prepare_shard(prepare: Preparation) -> object:
    """Do a piece of work, such as to index a shard; return False if another job is about to have done it.

    Raises:
        DataError: it is damaged, or cannot be read.
    """
    try:
        return prepare()
    except OSError as error:
        raise DataError(f"the data cannot be indexed: {error}") from error


def open_source(config: SourceConfigBase | Packing, key: str = "", is_checked: bool = False) -> Source:
    """Open a source, and log its notes on rank 0: what is left out, grouped or ambiguous. Each is logged once.

    Args:
        config: its configuration.
        key: key path of the configuration, for messages.
        is_checked: whether indexes of image files have just been compared with the files.

    Raises:
        DataError: the data are missing or damaged.
    """
    with name_section(key):
        if is_checked and isinstance(config, FileSourceConfig):
            source: Source = FileSource(config, is_checked=True)
        else:
            source = config.build()
    if dist.is_main():
        path = getattr(config.config if isinstance(config, Packing) else config, "path", "data")
        shown = " ".join(map(display_url, path[:3] if isinstance(path, tuple) else [str(path)]))
        for note in getattr(source, "notes", ()):  # sources of other packages may have none
            _log_once(f"{shown}: {note}")
    return source


@functools.cache
def _log_once(text: str) -> None:
    logger.info("%s", printable(text, one_line=True))


def open_images(paths: str | Sequence[str], overrides: Sequence[str] = (), **defaults: Any) -> ShardedSource:
    """Open images that need neither captions nor classes; see `vqclip.data.parse_source` for the arguments.

    Images of a folder that have no captions beside them have the names of their files as captions; images in its
    subfolders too.

    Raises:
        ConfigError: keys do not fit the kind; or a weight is set.
        DataError: there is nothing at the path, its kind is not plain, or it cannot be read.
    """
    config = parse_source(paths, overrides, **defaults)
    config.require_no_weight("images that are read once")
    source = open_source(config.with_all_images() if isinstance(config, FolderConfig) else config)
    if not hasattr(source, "place"):
        raise ConfigError(f"{paths}: its images have no names; write them as shards first (vqclip data pack)")
    return cast(ShardedSource, source)
