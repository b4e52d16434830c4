"""Shards that cannot be read at random places: compressed ones, and those of servers that send whole files only.

Each is copied once into the cache, unpacked, and is then read in place like any tar on this machine. The samples, and
so the fingerprint of the data, are those of the tar inside.

    cache/packed/tars-<identity of the shards>/00000.tar  00001.tar ...    (see `vqclip.data.work_folder`)
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from vqclip.data.remote.files import RemoteShard, Shard, fetch, find_facts, is_gzip
from vqclip.data.remote.retry import FetchError
from vqclip.data.remote.transfer import Body
from vqclip.data.remote.urls import digest, protocol_of
from vqclip.data.tars.store import local_state
from vqclip.data.work_folder import FolderLayout, WorkFolder, require_room
from vqclip.errors import DataError, StorageError, encodable
from vqclip.io.atomic import FileDigest, write_file
from vqclip.io.files import Stamp, cache_folder, format_bytes, open_regular
from vqclip.process import progress

logger = logging.getLogger("vqclip.data")

_LAYOUT = FolderLayout({"format": "vqclip unpacked tars", "format_version": 1}, ".tar", "vqclip", "VQCLIP_CACHE")
_BLOCK = 1 << 20
_MAX_RATIO = 100
"""Largest ratio of decompressed to compressed bytes. Tars of small images reach 10; zeros, 1,000."""


class UnpackedTars(WorkFolder):
    """Folder of tars, each a copy of a shard; an item of the work is a shard."""

    def replace(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards of a list, with the copies in place of those that are copied."""
        copies = {number: self.file(item) for item, number in enumerate(self.settings["numbers"])}
        return [copies.get(number, shard) for number, shard in enumerate(shards)]

    def copy(self, item: int, shards: Sequence[Shard], leave_out: bool) -> FileDigest:
        """Write the tar of an item that this process has claimed.

        Args:
            item: its number.
            shards: the list of shards.
            leave_out: write an empty file for one that is missing or damaged.

        Raises:
            DataError: its gzip data are damaged, truncated, or grow by more than a factor of 100.
            StorageError: it cannot be read or fetched, or the disk has no room.
        """
        shard = shards[self.settings["numbers"][item]]
        try:
            if not isinstance(shard, RemoteShard):
                with open_regular(shard) as file:
                    return self._write(item, shard, iter(lambda: file.read(_BLOCK), b""))

            def read_body(body: Body) -> FileDigest:
                try:
                    return self._write(item, shard, body.blocks)
                except GzipError as error:
                    raise FetchError(str(error), again=True) from None

            return fetch(shard.url, shard.options, read_body)
        except GzipError as error:
            problem = DataError(f"{shard}: {error}", "damaged shard")
        except OSError as error:
            problem = StorageError(
                f"{shard}: cannot be copied to {self.file(item)} ({error.strerror}); set VQCLIP_CACHE to a folder "
                "with room",
                "gone" if isinstance(error, FileNotFoundError) else "storage",
            )
        except StorageError as error:
            problem = error
        if not leave_out or (isinstance(problem, StorageError) and problem.kind != "gone"):
            raise problem
        logger.warning("%s; left out", problem)
        return write_file(self.file(item), b"")

    def _write(self, item: int, shard: Shard, blocks: Iterable[bytes]) -> FileDigest:
        def write(file: BinaryIO) -> None:
            for block in gunzip(blocks) if is_gzip(shard.name) else blocks:
                file.write(block)
                progress.heartbeat()
                self.renew()

        return write_file(self.file(item), write)


def find_unpacked(shards: Sequence[Shard], ask: bool, cache: Path | None = None) -> UnpackedTars | None:
    """Return the folder of the shards that are to be copied, which is made if it is missing; None if there are none.

    Args:
        shards: the tars.
        ask: ask servers whether they send parts of files; each is asked once, for the first of its shards.
        cache: the cache folder; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: the disk has no room.
        StorageError: a server cannot be reached.
    """
    if not any(is_gzip(each.name) or _is_web(each) for each in shards):
        return None
    identity = json.dumps([_identity(each) for each in shards])
    path = (cache or cache_folder()) / "packed" / f"tars-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
    if (found := UnpackedTars.existing(path, _LAYOUT)) is not None:
        return found
    sizes, asked = dict[int, int](), dict[str, int | None]()
    for number, shard in enumerate(shards):
        if is_gzip(shard.name):
            sizes[number] = local_state(shard)[0] if isinstance(shard, Path) else 0
        elif ask and isinstance(shard, RemoteShard) and _is_web(shard):
            host = "/".join(shard.url.split("/", 3)[:3])
            if host not in asked:
                asked[host] = _size_if_whole(shard)
            if (size := asked[host]) is not None:
                sizes[number] = size
    if not sizes:
        return None
    size = sum(sizes.values())
    require_room(path, size, "set VQCLIP_CACHE to a folder on a larger disk")
    found = UnpackedTars(path, {"numbers": [*sizes]}, len(sizes), _LAYOUT)
    logger.info(
        "copying %d shards that cannot be read at random places, such as %s, into %s: %s or more",
        len(sizes),
        shards[min(sizes)],
        path,
        format_bytes(size),
    )
    return found


def _is_web(shard: Shard) -> bool:
    return isinstance(shard, RemoteShard) and protocol_of(shard.url) in ("http", "https")


def _identity(shard: Shard) -> list[object]:
    """Return JSON values that differ if the content may differ; a shard at a URL counts by its URL."""
    if isinstance(shard, RemoteShard):
        return [digest(shard.url)]
    try:
        return [encodable(str(shard)), *(Stamp.of(shard) if is_gzip(shard.name) else ())]
    except OSError:
        return [encodable(str(shard)), "missing"]


def _size_if_whole(shard: RemoteShard) -> int | None:
    """Return the size of a shard whose server sends whole files only; None for others."""
    try:
        facts = find_facts(shard.url, shard.options)
    except StorageError as error:
        if error.kind != "gone":
            raise
        return None  # it is missing, which is noticed when it is indexed
    return None if facts.has_ranges else facts.size


class GzipError(Exception):
    """Damaged, truncated or far too large gzip data."""


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
                if not returned and block[:2] != b"\x1f\x8b":
                    raise GzipError(
                        f"is not compressed by gzip: begins with {block[:16]!r}; call a plain tar .tar, and download "
                        "again what is a page of HTML"
                    ) from None
                raise GzipError(f"damaged gzip data near byte {received}: {error}") from None
            returned += len(data)
            if returned > _MAX_RATIO * received + _BLOCK:
                raise GzipError(f"more than {_MAX_RATIO} times its size when decompressed")
            yield data
            is_new, rest = False, decoder.unconsumed_tail
            if decoder.eof:
                rest, is_new, decoder = decoder.unused_data.lstrip(b"\0"), True, zlib.decompressobj(wbits=31)
    if not is_new or not received:
        raise GzipError(f"truncated: ends in the middle of its gzip data, after {received} bytes; copy it again")
