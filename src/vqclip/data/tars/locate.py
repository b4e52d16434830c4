"""Locate the index of a list of shards: beside them, or in the cache.

Its name is a function of the names of the shards and of the rules by which their members are grouped, so training finds
what `vqclip data index` wrote, and a folder can have an index for each list of shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vqclip.data.remote import RemoteShard, display_url, protocol_of
from vqclip.data.remote.retry import Deadline, FetchError, retry
from vqclip.data.remote.transfer import open_url
from vqclip.data.remote.urls import beneath, path_in_url, split_query
from vqclip.data.shard import Shard
from vqclip.data.sources.paths import common_folder, strip_common_folders
from vqclip.data.tars.index import TarIndex, open_index
from vqclip.data.tars.members import USUAL, MemberRules
from vqclip.errors import DataError, StorageError
from vqclip.io.atomic import write_file
from vqclip.io.file_locks import hold_lock
from vqclip.io.files import Stamp, cache_folder

__all__ = ["cached_index", "data_folder", "find_index", "index_name", "local_state", "lock_index", "shard_names"]

logger = logging.getLogger("vqclip.data")

_DIGITS = 12
_LARGEST_OF_SHARD = 64 << 20
"""Bytes of a fetched index for each shard at most: a shard of 350 million samples in chunks of 128."""
MISSING = (0, "missing")
"""Size and tag of a shard that is not there."""


def shard_names(shards: Sequence[Shard]) -> list[str]:
    """Return the paths of shards without credentials and without the folders that all have in common."""
    return strip_common_folders(_paths(shards))


def index_name(shards: Sequence[Shard], rules: MemberRules = USUAL) -> str:
    """Return the name of the index of some shards, beside them."""
    return f"vqclip-{_digest(shard_names(shards), rules)[:_DIGITS]}.index"


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


def cached_index(shards: Sequence[Shard], rules: MemberRules = USUAL, cache: Path | None = None) -> Path:
    """Return the place of the index of some shards in the cache."""
    return (cache or cache_folder()) / "index" / f"{_digest(_paths(shards), rules)[:24]}.tars"


def find_index(shards: Sequence[Shard], rules: MemberRules = USUAL, cache: Path | None = None) -> TarIndex | None:
    """Return the index of some shards, opened; None if there is none, or it is outdated.

    That of shards at URLs is fetched from beside them into the cache, once; afterwards the server is not asked.

    Args:
        shards: the tars.
        rules: how their members are grouped.
        cache: the cache folder; default `vqclip.io.files.cache_folder()`.

    Raises:
        StorageError: the server cannot be reached.
    """
    folder, cached = data_folder(shards), cached_index(shards, rules, cache)
    beside = [folder / index_name(shards, rules)] if isinstance(folder, Path) else []
    for place in (*beside, cached):
        if (index := _open_current(place, shards, rules)) is not None:
            return index
    if isinstance(folder, str):
        with lock_index(cached, "lock"):
            index = _open_current(cached, shards, rules)
            if index is None and _fetch(beneath(folder, index_name(shards, rules)), shards, cached):
                index = _open_current(cached, shards, rules)
            return index
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


def local_state(shard: Path) -> tuple[int, str]:
    """Return size and tag of a shard on this machine, as they are in an index."""
    try:
        stamp = Stamp.of(shard)
    except OSError:
        return MISSING
    return stamp.size, str(stamp.modified_ns)


def _open_current(path: Path, shards: Sequence[Shard], rules: MemberRules) -> TarIndex | None:
    """Open an index; None if it is missing or damaged, or of other shards; local ones must be as they were."""
    if not path.exists():
        return None
    try:
        index = open_index(path, verify=False)
    except DataError as error:
        logger.warning("%s", error)
        return None
    if index.has_shards(shard_names(shards), rules) and all(
        local_state(shard) == (int(index.lengths[number]), index.tag(number))
        for number, shard in enumerate(shards)
        if isinstance(shard, Path)
    ):
        return index
    # One in the cache is made again.
    level = logging.INFO if path.parent.name == "index" else logging.WARNING
    logger.log(level, "%s: is of other shards, or of these before they changed; it is not used", path)
    return None


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


def _digest(names: Sequence[str], rules: MemberRules) -> str:
    more = [] if rules == USUAL else [json.dumps(rules.to_json(), sort_keys=True)]
    return hashlib.sha256("\n".join([*names, *more]).encode("utf-8", "surrogateescape")).hexdigest()
