"""Sizes and tags of shards, and their bytes in one stream each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from vqclip.data.chunks.location import local_tag
from vqclip.data.remote import RemoteShard, is_gzip
from vqclip.data.remote.retry import Deadline, FetchError, retry
from vqclip.data.remote.transfer import list_facts, open_url, url_facts
from vqclip.data.remote.urls import path_in_url, protocol_of
from vqclip.data.shard import Shard
from vqclip.errors import DataError
from vqclip.io.files import open_regular

__all__ = ["read_shard", "survey"]

T = TypeVar("T")

_BLOCK = 4 << 20
_WEB = ("http", "https")
_THREADS = 16
"""Requests for sizes at a time."""


def survey(shards: Sequence[Shard]) -> list[tuple[int, str]]:
    """Return size in bytes and tag of each shard.

    Raises:
        DataError: a shard is missing or compressed.
        StorageError: a server cannot be reached.
    """
    for shard in shards:
        if is_gzip(shard.name):
            raise DataError(
                f"{shard}: is compressed, so that chunks of it cannot be read; unpack it to a plain tar, or use "
                "data.order: full"
            )
    stored = [each for each in shards if isinstance(each, RemoteShard) and protocol_of(each.url) not in _WEB]
    folders = {each.url.rpartition("/")[0] for each in stored}
    if shards and len(stored) == len(shards) and len(folders) <= max(1, len(shards) // _THREADS):
        return _list_folders(sorted(folders), stored)
    with ThreadPoolExecutor(_THREADS, "survey") as pool:
        return list(pool.map(_ask, shards))


def read_shard(shard: Shard, length: int, tag: str, scan: Callable[[Iterable[bytes]], T]) -> T:
    """Read a shard once from beginning to end, without storing it.

    Args:
        shard: plain tar.
        length: its size in bytes from `survey`.
        tag: its tag from `survey`.
        scan: gets blocks of its bytes; called again if a download breaks.

    Raises:
        DataError: it cannot be read, or has changed; or from ``scan``.
        StorageError: it cannot be fetched.
    """
    if isinstance(shard, RemoteShard):
        deadline = Deadline(shard.options.total_s)

        def fetch() -> T:
            with open_url(shard.url, shard.options.timeout_s, deadline) as body:
                return scan(_require_length(body.blocks, length))

        return retry(fetch, shard.url, shard.options, deadline)
    assert isinstance(shard, Path)
    try:
        with open_regular(shard) as file:
            _require_unchanged(shard, file.fileno(), length, tag)
            result = scan(iter(lambda: file.read(_BLOCK), b""))
            _require_unchanged(shard, file.fileno(), length, tag)
    except OSError as error:
        raise DataError(f"{shard}: shard cannot be read: {error.strerror}") from None
    return result


def _require_unchanged(shard: Path, file: int, length: int, tag: str) -> None:
    status = os.fstat(file)
    if (status.st_size, local_tag(status)) != (length, tag):
        raise DataError(f"{shard}: was written to while it was indexed; start again when it is complete")


def _require_length(blocks: Iterable[bytes], length: int) -> Iterator[bytes]:
    received = 0
    for block in blocks:
        received += len(block)
        if received > length:
            break
        yield block
    if received != length:
        more = "or more " if received > length else ""
        raise FetchError(f"{received} bytes {more}came, {length} were announced: did it change?", again=True)


def _ask(shard: Shard) -> tuple[int, str]:
    if isinstance(shard, Path):
        try:
            with open_regular(shard) as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            raise DataError(f"{shard}: shard cannot be opened: {error.strerror}") from None
        return status.st_size, local_tag(status)
    assert isinstance(shard, RemoteShard)
    deadline = Deadline(shard.options.total_s)
    return retry(lambda: url_facts(shard.url, shard.options.timeout_s, deadline), shard.url, shard.options, deadline)


def _list_folders(folders: Sequence[str], shards: Sequence[RemoteShard]) -> list[tuple[int, str]]:
    options = shards[0].options
    there: dict[str, tuple[int, str]] = {}
    for folder in folders:
        deadline = Deadline(options.total_s)
        there |= retry(partial(list_facts, folder, options.timeout_s, deadline), folder, options, deadline)
    # A shard that is not listed is asked for, which names the reason.
    return [there.get(path_in_url(shard.url).partition("://")[2]) or _ask(shard) for shard in shards]
