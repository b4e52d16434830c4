"""Make the index of a source of tars, where training finds it.

place: beside the shards if they can be written to there, else the cache of this machine
parts of all shards  ->  index  ->  (a bucket:) upload
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vqclip.data.remote import RemoteConfig, RemoteShard, TransferConfig, beneath, display_url, protocol_of
from vqclip.data.remote.folder import STORES, RemoteFolder, require_writable
from vqclip.data.remote.urls import path_in_url
from vqclip.data.shard import Shard
from vqclip.data.tars.index import TarIndex
from vqclip.data.tars.make import IndexMaker, Parts
from vqclip.data.tars.open import TarSet, cached_index, data_folder, index_name, known_counts
from vqclip.errors import ConfigError, StorageError
from vqclip.io.files import expand_home, format_bytes
from vqclip.runlog.bar import ProgressBar

__all__ = ["index_shards"]

logger = logging.getLogger(__name__)

PARTS = ".vqclip-index-parts"
"""Folder of the parts, beside the index."""
_SHOWN = 5


@dataclass(frozen=True)
class _Place:
    """The place of an index and its parts."""

    path: Path
    """The index on this machine."""
    parts: Parts
    upload: RemoteFolder | None = None
    """The folder at a URL that it is copied to."""
    name: str = ""
    """Its name there."""


def index_shards(tars: TarSet, chunk: int, workers: int = 1, out: str | None = None) -> str:
    """Make the index of some shards, unless it is up to date; return in words where it is and what was read.

    Args:
        tars: the shards, and how their members are grouped.
        chunk: samples of a chunk.
        workers: threads that read.
        out: folder or its URL; default beside the shards, or the cache.

    Raises:
        ConfigError: ``out`` cannot be written to.
        DataError: shards are damaged, or the index cannot be written.
        StorageError: a server cannot be reached.
    """
    tars = tars.readable()
    place, advice = _choose_place(tars, out)
    maker, made, size = IndexMaker(tars.shards, place.parts, tars.rules, tars.leave_out), 0, 0
    found = index = maker.find_current(place.path, chunk)
    if index is None:
        made, total = len(maker.missing()), len(maker.facts)
        with ProgressBar(total, total - made, True, "index", "shard") as bar:

            def report(read: int) -> None:
                nonlocal size
                size += read
                bar.advance()
                bar.show({"bytes": size})

            maker.read_all(workers, report)
        index = maker.write(place.path, chunk)
        _compare_counts(tars.shards, index)
    folder = place.upload
    if folder and (found is None or folder.list(place.name).get(place.name) != place.path.stat().st_size):
        folder.upload(place.name, place.path)
    where = display_url(f"{folder.url}/{place.name}") if folder else str(place.path)
    size = int(index.lengths.sum())
    read = f"{made:,} shards read, {index.shards - made:,} known" if made else "no shard had to be read"
    text = f"{where}: {index.samples:,} samples in {index.shards:,} shards, chunks of {index.chunk}"
    return f"{text}, {format_bytes(size)}; {read}\n{advice}"


def _choose_place(tars: TarSet, out: str | None) -> tuple[_Place, str]:
    """Return the place of an index, and advice on it for the user."""
    shards = tars.shards
    folder, name, cached = data_folder(shards), index_name(shards, tars.rules), cached_index(shards, tars.rules)
    options = next((each.options for each in shards if isinstance(each, RemoteShard)), RemoteConfig())
    beside = path_in_url(beneath(folder, name)) if isinstance(folder, str) else f"{folder}/{name}"
    advice, target = "training finds it beside the shards", folder
    if out is not None:
        target = _require_out(out)
        if str(target) != str(folder):
            hint = f"training looks for it beside the shards: copy it to {beside}"
            advice = f"{hint if folder else 'the shards have no common folder'}, or make it without --out"
    elif not (
        os.access(folder, os.W_OK)
        if isinstance(folder, Path)
        else folder is not None and protocol_of(folder) in STORES and _is_writable(folder, options)
    ):
        others = f"; for other machines copy it to {beside}" if folder else ""
        place = _Place(cached, Parts(cached.with_suffix(".parts")))
        return place, f"it is in the cache, where training on this machine finds it{others}"
    if isinstance(target, Path):
        return _Place(target / name, Parts(target / PARTS)), advice
    parts = Parts(cached.with_suffix(".parts"), RemoteFolder(f"{target}/{PARTS}", options))
    return _Place(cached, parts, RemoteFolder(str(target), options), name), advice


def _require_out(out: str) -> Path | str:
    try:
        target = require_writable(out)
    except ValueError as error:  # DataError is one
        raise ConfigError(f"--out: {error}") from None
    if protocol_of(target) is not None:
        return target
    folder = expand_home(target).absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out: {folder} is a file; expected a folder")
    return folder


def _is_writable(folder: str, options: TransferConfig) -> bool:
    """Return whether objects can be written to a folder of an object store."""
    try:
        parts = RemoteFolder(f"{folder}/{PARTS}", options)
        parts.write("writable", b"")
        with contextlib.suppress(StorageError):  # one that may write, but not remove
            parts.remove("writable")
    except StorageError as error:
        if error.kind != "gone":
            raise
        logger.warning("%s; the index goes to the cache of this machine", error)
        return False
    return True


def _compare_counts(shards: Sequence[Shard], index: TarIndex) -> None:
    """Warn if files beside the shards give other counts of samples."""
    try:
        counts = known_counts(shards)
    except StorageError as error:
        logger.warning("%s", error)
        return
    actual = (index.firsts[1:] - index.firsts[:-1]).tolist()
    wrong = [each for each in zip(shards, counts or [], actual, strict=False) if each[1] != each[2]]
    if wrong:
        shown = "; ".join(f"{shard}: {count:,}, it has {truth:,}" for shard, count, truth in wrong[:_SHOWN])
        logger.warning("files beside the shards give other counts of samples for %d shards: %s", len(wrong), shown)
