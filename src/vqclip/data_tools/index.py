"""Make the index of a source of tars, where training finds it.

place: beside the shards if they can be written to there, else the cache of this machine
parts of all shards  ->  index  ->  (a bucket:) upload
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from vqclip.data.remote.files import STORES, RemoteFolder, RemoteShard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import beneath, display_url, path_in_url, protocol_of
from vqclip.data.tars.make import IndexMaker, Parts
from vqclip.data.tars.open import TarSet, cached_index, data_folder, index_name
from vqclip.errors import StorageError
from vqclip.io.files import format_bytes
from vqclip.runlog.bar import ProgressBar

logger = logging.getLogger(__name__)

PARTS = ".vqclip-index-parts"
"""Folder of the parts, beside the index."""


def index_shards(tars: TarSet, chunk: int, workers: int = 1) -> str:
    """Make the index of some shards, unless it is up to date; return in words where it is and what was read.

    Args:
        tars: the shards, and how their members are grouped.
        chunk: samples of a chunk.
        workers: threads that read.

    Raises:
        DataError: shards are damaged, or the index cannot be written.
        StorageError: a server cannot be reached.
    """
    tars = tars.readable()
    name, (path, parts, folder, advice) = index_name(tars.shards, tars.rules), _choose_place(tars)
    maker, made, size = IndexMaker(tars.shards, parts, tars.rules, tars.leave_out), 0, 0
    found = index = maker.find_current(path, chunk)
    if index is None:
        made, total = len(maker.missing()), len(maker.facts)
        with ProgressBar(total, total - made, True, "index", "shard") as bar:

            def report(read: int) -> None:
                nonlocal size
                size += read
                bar.advance()
                bar.show({"bytes": size})

            maker.read_all(workers, report)
        index = maker.write(path, chunk)
    if folder and (found is None or folder.list(name).get(name) != path.stat().st_size):
        folder.upload(name, path)
    where = display_url(f"{folder.url}/{name}") if folder else str(path)
    read = f"{made:,} shards read, {index.shards - made:,} known" if made else "no shard had to be read"
    text = f"{where}: {index.samples:,} samples in {index.shards:,} shards, chunks of {index.chunk}"
    return f"{text}, {format_bytes(int(index.lengths.sum()))}; {read}\n{advice}"


def _choose_place(tars: TarSet) -> tuple[Path, Parts, RemoteFolder | None, str]:
    """Return the place of an index: beside the shards if that can be written, else the cache of this machine.

    Returns:
        The index on this machine, its parts, the folder at a URL that it is copied to, and a hint for the user.
    """
    shards, advice = tars.shards, "training finds it beside the shards"
    folder, name, cached = data_folder(shards), index_name(shards, tars.rules), cached_index(shards, tars.rules)
    kept = cached.with_suffix(".parts")
    if isinstance(folder, Path) and os.access(folder, os.W_OK):
        is_mine = os.access(folder / PARTS, os.W_OK) or not (folder / PARTS).exists()  # or another user's
        return folder / name, Parts(folder / PARTS if is_mine else kept), None, advice
    if isinstance(folder, str) and protocol_of(folder) in STORES:
        options = next((each.options for each in shards if isinstance(each, RemoteShard)), RemoteConfig())
        parts = RemoteFolder(f"{folder}/{PARTS}", options)
        if _is_writable(parts):
            return cached, Parts(kept, parts), RemoteFolder(folder, options), advice
    beside = path_in_url(beneath(folder, name)) if isinstance(folder, str) else f"{folder}/{name}"
    others = f"; for other machines copy it to {beside}" if folder else ""
    return cached, Parts(kept), None, f"it is in the cache, where training on this machine finds it{others}"


def _is_writable(folder: RemoteFolder) -> bool:
    """Return whether objects can be written to a folder of an object store."""
    try:
        folder.write("writable", b"")
        with contextlib.suppress(StorageError):  # one that may write, but not remove
            folder.remove("writable")
    except StorageError as error:
        if error.kind != "gone":
            raise
        logger.warning("%s; the index goes to the cache of this machine", error)
        return False
    return True
