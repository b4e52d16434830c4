"""Locate the index of a data set: beside its shards, or in the cache.

Its name is a function of the names of the shards, so training finds what `vqclip data index` wrote, and a folder can
have an index for each list of shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vqclip.data.chunks.index_file import ChunkIndex, open_index
from vqclip.data.remote import RemoteShard, display_url, protocol_of
from vqclip.data.remote.retry import Deadline, FetchError, retry
from vqclip.data.remote.transfer import open_url
from vqclip.data.remote.urls import beneath, path_in_url, split_query
from vqclip.data.shard import Shard
from vqclip.data.sources.paths import common_folder, strip_common_folders
from vqclip.errors import DataError, StorageError
from vqclip.io.atomic import write_file
from vqclip.io.file_locks import hold_lock
from vqclip.io.files import cache_folder

__all__ = ["cached_index", "data_folder", "find_index", "fits", "index_name", "local_tag", "lock_index", "shard_names"]

logger = logging.getLogger("vqclip.data")

_DIGITS = 12
_LARGEST_OF_SHARD = 64 << 20
"""Bytes of a fetched index for each shard at most: a shard of 350 million samples in chunks of 128."""


def shard_names(shards: Sequence[Shard]) -> list[str]:
    """Return the paths of shards without credentials and without the folders that all have in common."""
    return strip_common_folders(_paths(shards))


def index_name(shards: Sequence[Shard]) -> str:
    """Return the name of the index of some shards, beside them."""
    return f"vqclip-{_digest(shard_names(shards))[:_DIGITS]}.index"


def data_folder(shards: Sequence[Shard]) -> Path | str | None:
    """Return the folder, or its URL, that contains all shards; None if there is none, or only a disk or server does."""
    if not shards:
        return None
    if all(isinstance(each, Path) for each in shards):
        folder = Path(os.path.commonpath([str(Path(str(each)).parent) for each in shards]))
        return None if folder == folder.parent else folder
    if not all(isinstance(each, RemoteShard) for each in shards):
        return None
    parts = [split_query(each.url) for each in shards if isinstance(each, RemoteShard)]
    queries = {query for _, query in parts}
    common = common_folder(path for path, _ in parts).removesuffix("/")
    # With a query for each shard, as in signed URLs, nothing is known about other files.
    return common + queries.pop() if common.count("/") > 1 and len(queries) == 1 else None


def cached_index(shards: Sequence[Shard], cache: Path | None = None) -> Path:
    """Return the place of the index of some shards in the cache."""
    return (cache or cache_folder()) / "index" / f"{_digest(_paths(shards))[:24]}.chunks"


def find_index(shards: Sequence[Shard], cache: Path | None = None) -> Path | None:
    """Return the index of some shards on this machine; None if there is none, or it is outdated.

    That of shards at URLs is fetched from beside them into the cache, once; afterwards the server is not asked.

    Args:
        shards: plain tars.
        cache: the cache folder; default `vqclip.io.files.cache_folder()`.

    Raises:
        StorageError: the server cannot be reached.
    """
    folder, cached = data_folder(shards), cached_index(shards, cache)
    places = [folder / index_name(shards)] if isinstance(folder, Path) else []
    for place in (*places, cached):
        if _is_usable(place, shards):
            return place
    if isinstance(folder, str):
        with lock_index(cached, "lock"):
            if _is_usable(cached, shards):
                return cached
            if _fetch(beneath(folder, index_name(shards)), shards, cached) and _is_usable(cached, shards):
                return cached
    return None


@contextlib.contextmanager
def lock_index(path: Path, name: str) -> Iterator[None]:
    """Hold a lock of this name beside an index in the cache.

    Raises:
        StorageError: the cache cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path.with_name(f"{path.name}.{name}")):
            yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}); set VQCLIP_CACHE to a folder with room"
        ) from None


def fits(index: ChunkIndex, shards: Sequence[Shard]) -> bool:
    """Return whether an index has these shards, and local ones have the size and time that they had."""
    return index.has_names(shard_names(shards)) and all(
        _is_unchanged(shard, int(index.lengths[number]), index.tag(number))
        for number, shard in enumerate(shards)
        if isinstance(shard, Path)
    )


def local_tag(status: os.stat_result) -> str:
    """Return the tag of a shard on this machine."""
    return str(status.st_mtime_ns)


def _is_unchanged(shard: Path, length: int, tag: str) -> bool:
    with contextlib.suppress(OSError):
        status = shard.stat()
        return (status.st_size, local_tag(status)) == (length, tag)
    return False


def _is_usable(path: Path, shards: Sequence[Shard]) -> bool:
    if not path.exists():
        return False
    try:
        usable = fits(open_index(path, verify=False), shards)
    except DataError as error:
        logger.warning("%s", error)
        return False
    if not usable:
        logger.warning("%s: is of other shards, or of these before they changed; it is not used", path)
    return usable


def _fetch(url: str, shards: Sequence[Shard], path: Path) -> bool:
    """Fetch and verify an index; return False if there is none."""
    (first, *_) = (each for each in shards if isinstance(each, RemoteShard))
    deadline = Deadline(first.options.total_s)
    limit = min(first.options.cache_bytes, _LARGEST_OF_SHARD * len(shards))

    def fetch() -> None:
        with open_url(url, first.options.timeout_s, deadline) as body:
            digest = write_file(path, lambda file: file.writelines(_bound(body.blocks, limit, display_url(url))))
        try:
            if body.length not in (None, digest.size):
                raise FetchError(f"{digest.size} bytes came, {body.length} were announced", again=True)
            open_index(path)
        except FetchError:
            path.unlink()
            raise
        except DataError as error:
            path.unlink()
            raise DataError(str(error).replace(str(path), display_url(url))) from None

    try:
        retry(fetch, url, first.options, deadline)
    except StorageError as error:
        # A web server may answer anything for a file that is not there; a bucket says it, or access is wrong.
        if error.kind == "gone" and (protocol_of(url) in ("http", "https") or "not found" in str(error)):
            return False
        raise
    logger.info("fetched the index %s", path_in_url(url))
    return True


def _bound(blocks: Iterable[bytes], limit: int, url: str) -> Iterator[bytes]:
    left = limit
    for block in blocks:
        left -= len(block)
        if left < 0:
            raise DataError(f"{url}: the index has more than {limit} bytes, too many for its shards; it is not read")
        yield block


def _paths(shards: Sequence[Shard]) -> list[str]:
    return [path_in_url(each.url) if isinstance(each, RemoteShard) else str(each) for each in shards]


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()
