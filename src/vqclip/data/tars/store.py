"""Bytes of shards, on this machine and at URLs.

survey                sizes and tags of all shards
read_shard            a shard once from beginning to end, to index it
OpenFiles             bytes at any place of shards on this machine
find_copies           shards that cannot be read at random places: compressed ones, and those of servers that send whole
                      files only. Each is copied once into the cache, unpacked, and is then read in place like any tar

The samples of a copy, and so the fingerprint of the data, are those of the tar inside.

    cache/packed/tars-<identity of the shards>/00000.tar  00001.tar ...
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from vqclip.data.lookup import Recent
from vqclip.data.remote.files import RemoteShard, Shard, fetch, is_gzip
from vqclip.data.remote.retry import FetchError
from vqclip.data.remote.transfer import Body, FileFacts, find_facts, list_files
from vqclip.data.remote.urls import digest, path_in_url, protocol_of
from vqclip.data.sources.paths import strip_common_folders
from vqclip.data.work_folder import require_room
from vqclip.errors import DataError, StorageError, count_noun, encodable
from vqclip.io.atomic import FileDigest, write_file
from vqclip.io.files import Stamp, cache_folder, format_bytes, open_regular
from vqclip.process import progress

T = TypeVar("T")

_MISSING = (0, "missing")
"""Size and tag of a shard that is not there."""
_READ = 4 << 20
_THREADS = 16
"""Requests for sizes at a time."""


@dataclass(frozen=True)
class ShardFacts:
    """Name, size and tag of a shard; see `TarIndex`."""

    name: str
    length: int
    tag: str
    problem: str = ""
    """Reason for which it is left out; "" without one."""


def shard_names(shards: Sequence[Shard]) -> list[str]:
    """Return the paths of shards without credentials and without the folders that all have in common."""
    return strip_common_folders(
        [path_in_url(each.url) if isinstance(each, RemoteShard) else str(each) for each in shards]
    )


def local_state(shard: Path) -> tuple[int, str]:
    """Return size and tag of a shard on this machine, as they are in an index."""
    try:
        stamp = Stamp.of(shard)
    except OSError:
        return _MISSING
    return stamp.size, str(stamp.modified_ns)


def survey(shards: Sequence[Shard], leave_out: bool = False) -> list[ShardFacts]:
    """Return name, size and tag of each shard.

    Args:
        shards: the tars.
        leave_out: return a problem instead of raising for those that are missing or damaged.

    Raises:
        DataError: a shard is missing.
        StorageError: a server cannot be reached.
    """
    listed = _list_folders(shards)

    def ask(shard: Shard) -> tuple[int, str, str]:
        try:
            if isinstance(shard, RemoteShard):
                # A shard that is not listed is asked for, which names the reason.
                facts = listed.get(path_in_url(shard.url).partition("://")[2]) or find_facts(shard.url, shard.options)
                return facts.size, facts.tag, ""
            open_regular(shard).close()
            return (*local_state(shard), "")
        except OSError as error:
            problem = DataError(f"{shard}: shard cannot be opened: {error.strerror}")
        except DataError as error:
            problem = error
        if not leave_out or (isinstance(problem, StorageError) and problem.kind != "gone"):
            raise problem
        return (*_MISSING, str(problem))

    with ThreadPoolExecutor(_THREADS, "survey") as pool:
        found = list(pool.map(ask, shards))
    return [ShardFacts(name, *each) for name, each in zip(shard_names(shards), found, strict=True)]


def _list_folders(shards: Sequence[Shard]) -> dict[str, FileFacts]:
    """List the folders of shards in object stores, if they are few; that takes a request for a thousand files."""
    stored = [
        each for each in shards if isinstance(each, RemoteShard) and protocol_of(each.url) not in ("http", "https")
    ]
    folders = {each.url.rpartition("/")[0] for each in stored}
    there = dict[str, FileFacts]()
    if len(folders) <= max(1, len(stored) // _THREADS):
        for folder in sorted(folders):
            there |= list_files(f"{folder}/*", stored[0].options)
    return there


def read_shard(shard: Shard, facts: ShardFacts, scan: Callable[[Iterable[bytes]], T]) -> T:
    """Read a shard once from beginning to end; nothing is stored.

    Args:
        shard: the tar.
        facts: its size and tag from `survey`.
        scan: gets blocks of its bytes; called again if a download breaks.

    Raises:
        DataError: it cannot be read, or has changed; or from ``scan``.
        StorageError: it cannot be fetched.
    """
    if isinstance(shard, RemoteShard):

        def read_body(body: Body) -> T:
            if body.length != facts.length:
                raise FetchError(f"{body.length} bytes are announced, {facts.length} were before", again=True)
            return scan(body.blocks)

        return fetch(shard.url, shard.options, read_body)
    try:
        with open_regular(shard) as file:
            result = (
                scan(iter(lambda: file.read(_READ), b"")) if local_state(shard) == (facts.length, facts.tag) else None
            )
    except OSError as error:
        raise DataError(f"{shard}: shard cannot be read: {error.strerror}") from None
    if result is None or local_state(shard) != (facts.length, facts.tag):
        raise StorageError(f"{shard}: was written to while it was indexed; start again when it is complete")
    return result


class OpenFiles:
    """Reads shards by `pread`, and keeps the recently used ones open.

    At most a quarter of the files that this process may open, and 1,024, whatever the number of sources: all share
    `open_files`. Works in several threads, after a fork and in spawned workers: reading does not move a file position,
    and files are opened on demand.
    """

    def __init__(self) -> None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 1024 if allowed == resource.RLIM_INFINITY else max(1, min(1024, allowed // 4))
        self._files, self._lock = Recent[tuple[Path, tuple[int, int]], int](most, close=os.close), threading.Lock()

    def close(self) -> None:
        """Close all files; the next read opens its file again."""
        self._files.clear()

    def after_fork(self) -> None:
        """Close this process's copies of what its parent had open, in the child, with a lock that no thread holds."""
        self._lock = threading.Lock()
        self.close()

    def read(self, path: Path, stamp: tuple[int, int], first: int, size: int) -> bytes:
        """Read bytes of a shard.

        Args:
            path: the shard.
            stamp: its size and modification time in nanoseconds when it was indexed.
            first: the first byte.
            size: number of bytes.

        Raises:
            StorageError: it cannot be read, or has changed (`kind` is then "changed shard").
        """
        try:
            with self._lock:
                # Non-blocking: a pipe in place of the shard must not make the run wait. A shard that was replaced and
                # indexed again has another stamp, and is opened again.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                file = os.dup(self._files.get((path, stamp), lambda key: os.open(key[0], flags)))
            try:
                if Stamp.of(file) != stamp:  # before every read, as the file may change while it is open
                    raise StorageError(
                        f"{path}: the shard has changed since it was indexed; start the run again", "changed shard"
                    )
                data = os.pread(file, size, first)
                while 0 < len(data) < size and (more := os.pread(file, size - len(data), first + len(data))):
                    data += more  # a call returns at most 2 GiB
            finally:
                os.close(file)
        except OSError as error:
            with self._lock:
                self.close()  # such as a stale handle of a network disk
            raise StorageError(f"{path}: cannot be read: {error.strerror}", "unreadable shard") from None
        if len(data) != size:
            raise StorageError(f"{path}: the shard became shorter while it was in use", "changed shard")
        return data


open_files = OpenFiles()
"""Shards that this process has open."""
os.register_at_fork(after_in_child=open_files.after_fork)


# ---- copies of shards that cannot be read at random places

logger = logging.getLogger("vqclip.data")

_BLOCK = 1 << 20
_MAX_RATIO = 100
"""Largest ratio of decompressed to compressed bytes. Tars of small images reach 10; zeros, 1,000."""


def find_copies(shards: Sequence[Shard], ask: bool) -> dict[int, Path]:
    """Return the places of the copies of those shards that are to be copied, by the numbers of the shards.

    Args:
        shards: the tars.
        ask: ask servers whether they send parts of files; each is asked once, for the first of its shards.

    Raises:
        DataError: the disk has no room for the missing ones.
        StorageError: a server cannot be reached.
    """
    if not any(is_gzip(each.name) or _is_web(each) for each in shards):
        return {}
    identity = json.dumps([_identity(each) for each in shards])
    folder = cache_folder() / "packed" / f"tars-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
    copies, missing, asked = dict[int, Path](), dict[int, int](), dict[str, int | None]()
    for number, shard in enumerate(shards):
        path, size = folder / f"{number:05d}.tar", None
        if path.exists():
            copies[number] = path
            continue
        if is_gzip(shard.name):
            size = local_state(shard)[0] if isinstance(shard, Path) else 0
        elif ask and isinstance(shard, RemoteShard) and _is_web(shard):
            host = "/".join(shard.url.split("/", 3)[:3])
            if host not in asked:
                asked[host] = _size_if_whole(shard)
            size = asked[host]
        if size is not None:
            copies[number], missing[number] = path, size
    if missing:
        size = sum(missing.values())
        require_room(folder, size, "set VQCLIP_CACHE to a folder on a larger disk")
        logger.info(
            "copying %s that cannot be read at random places, such as %s, into %s: %s or more",
            count_noun(len(missing), "shard"),
            shards[min(missing)],
            folder,
            format_bytes(size),
        )
    return copies


def copy_shard(shard: Shard, path: Path, leave_out: bool) -> None:
    """Write the tar in a shard to a file.

    Args:
        shard: the shard.
        path: the file.
        leave_out: write an empty file for a shard that is missing or damaged.

    Raises:
        DataError: its gzip data are damaged, truncated, or grow by more than a factor of 100.
        StorageError: it cannot be read or fetched, or the disk has no room.
    """

    def write(blocks: Iterable[bytes]) -> FileDigest:
        def write_blocks(file: BinaryIO) -> None:
            for block in gunzip(blocks) if is_gzip(shard.name) else blocks:
                file.write(block)
                progress.heartbeat()

        return write_file(path, write_blocks)

    try:
        if isinstance(shard, RemoteShard):
            copy = fetch(shard.url, shard.options, lambda body: write(body.blocks))
        else:
            with open_regular(shard) as file:
                copy = write(iter(lambda: file.read(_BLOCK), b""))
        logger.info("copied %s to %s: %s", shard, path, format_bytes(copy.size))
        return
    except GzipError as error:
        problem = DataError(f"{shard}: {error}", "damaged shard")
    except OSError as error:
        problem = StorageError(
            f"{shard}: cannot be copied to {path} ({error.strerror}); set VQCLIP_CACHE to another folder",
            "gone" if isinstance(error, FileNotFoundError) else "storage",
        )
    except StorageError as error:
        problem = error
    if not leave_out or (isinstance(problem, StorageError) and problem.kind != "gone"):
        raise problem
    logger.warning("%s; left out", problem)
    write_file(path, b"")


def _is_web(shard: Shard) -> bool:
    return isinstance(shard, RemoteShard) and protocol_of(shard.url) in ("http", "https")


def _identity(shard: Shard) -> list[object]:
    """Return JSON values that differ if the content may differ; a shard at a URL counts by its URL."""
    if isinstance(shard, RemoteShard):
        return [digest(shard.url)]
    return [encodable(str(shard)), *(local_state(shard) if is_gzip(shard.name) else ())]


def _size_if_whole(shard: RemoteShard) -> int | None:
    """Return the size of a shard whose server sends whole files only; None for others."""
    try:
        facts = find_facts(shard.url, shard.options)
    except StorageError as error:
        if error.kind != "gone":
            raise
        return None  # it is missing, which is noticed when it is indexed
    return None if facts.has_ranges else facts.size


class GzipError(FetchError):
    """Damaged, truncated or far too large gzip data; of a file at a URL, another try may bring others."""

    def __init__(self, message: str):
        super().__init__(message, again=True)


def gunzip(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress gzip data of any number of members; zeros after the last one are skipped.

    Raises:
        GzipError: it is damaged or truncated, or grows by more than a factor of 100.
    """
    decoder, is_new, received, returned = zlib.decompressobj(wbits=31), True, 0, 0
    for block in blocks:
        received += len(block)
        rest = block.lstrip(b"\0") if is_new and received > len(block) else block
        while rest:
            try:
                data = decoder.decompress(rest, _BLOCK)
            except zlib.error as error:
                remedy = "copy it again; a plain tar is named .tar"
                raise GzipError(f"damaged gzip data near byte {received}: {error}; {remedy}") from None
            returned += len(data)
            if returned > _MAX_RATIO * received + _BLOCK:
                raise GzipError(f"more than {_MAX_RATIO} times its size when decompressed")
            yield data
            is_new, rest = False, decoder.unconsumed_tail
            if decoder.eof:
                rest, is_new, decoder = decoder.unused_data.lstrip(b"\0"), True, zlib.decompressobj(wbits=31)
    if not is_new or not received:
        raise GzipError(f"truncated: ends in the middle of its gzip data, after {received} bytes; copy it again")
