"""Shards compressed with gzip: decompressed whole into the bounded cache, then read like plain tars.

gzip has no random access. The decompressed tar is what is indexed and digested, so a run does not notice whether its
shards are compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vqclip.data.remote.cache import PartialFile, ShardInCache
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import digest
from vqclip.errors import DataError, StorageError
from vqclip.io.files import open_regular

__all__ = ["TAR_ENDINGS", "GzipError", "GzipShard", "gunzip", "is_gzip", "is_tar"]

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")
"""Endings of the names of shards."""
_BLOCK = 1 << 20
_MAX_RATIO = 100
"""Largest ratio of decompressed to compressed bytes. Tars of small images reach 10; zeros, 1,000."""


def is_tar(name: str) -> bool:
    """Return whether a file's name is that of a shard: .tar, .tar.gz or .tgz."""
    return name.endswith(TAR_ENDINGS)


def is_gzip(name: str) -> bool:
    """Return whether a file's name is that of a compressed shard: .tar.gz or .tgz."""
    return name.endswith((".tar.gz", ".tgz"))


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


@dataclass(frozen=True)
class GzipShard(ShardInCache):
    """A .tar.gz on this machine, whose tar is in the cache while it is used.

    Args:
        path: the compressed file.
        options: size of the cache, and the longest wait for another process that decompresses the same file.
        stamp: its size and modification time when it was listed.
    """

    path: Path
    options: RemoteConfig = field(compare=False, repr=False)
    stamp: tuple[int, int] = field(compare=False, repr=False)

    @classmethod
    def at(cls, path: Path, options: RemoteConfig) -> GzipShard:
        """Return the shard at a path; raises OSError if it is missing."""
        return cls(path, options, _stamp(path))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def key(self) -> str:
        """Hash of path, size and modification time, so that a changed file has another index and another tar."""
        return digest(f"{self.path}\n{self.stamp[0]}\n{self.stamp[1]}")

    def open(self, length: int | None = None) -> int:
        """Return a descriptor of the tar in the cache, after decompressing it if necessary; see `RemoteShard.open`.

        Args:
            length: not used; a plain tar's size decides nothing here.

        Raises:
            DataError: the gzip data are damaged, truncated, or grow by more than a factor of 100.
            StorageError: the file is missing or has changed, or the cache has no room.
        """
        try:
            unchanged = _stamp(self.path) == self.stamp
        except OSError as error:
            raise StorageError(f"{self}: shard cannot be opened: {error.strerror}") from None
        if not unchanged:
            raise StorageError(
                f"{self}: the shard has changed since it was listed; start the run again", "changed shard"
            )
        return self._open(self._fill)

    def _fill(self, part: PartialFile) -> None:
        part.restart()
        try:
            with open_regular(self.path) as file:
                for block in gunzip(iter(lambda: file.read(_BLOCK), b"")):
                    part.write(block)
        except GzipError as error:
            raise DataError(f"{self}: {error}", "damaged shard") from None
        except StorageError as error:
            raise StorageError(f"{self}: {error}") from None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
