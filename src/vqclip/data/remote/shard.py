"""Shards that are not plain tars on this machine: at URLs, and compressed ones; and the shards that a URL names.

A shard that is not read by ranges is whole in a bounded cache while it is used. gzip has no random access: the tar
inside is what is cached, indexed and digested, so a run does not notice whether its shards are compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vqclip.data.remote.cache import BoundedCache, PartialFile
from vqclip.data.remote.retry import Deadline, FetchError, RemoteConfig, retry
from vqclip.data.remote.transfer import Body, ChangedError, Span, list_urls, open_url
from vqclip.data.remote.urls import digest, display_url, file_name, protocol_of
from vqclip.errors import DataError, StorageError
from vqclip.io.files import Stamp, cache_folder, open_regular

__all__ = [
    "TAR_ENDINGS",
    "GzipError",
    "GzipShard",
    "RemoteShard",
    "fetch_bytes",
    "fetch_text",
    "gunzip",
    "is_gzip",
    "is_tar",
    "remote_shards",
]

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


class ShardInCache:
    """Base of shards whose tars are in the cache while they are used."""

    options: RemoteConfig

    @property
    def key(self) -> str:
        """Name in the cache."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove the copy in the cache, so that a damaged one is made again."""
        self._cache.remove(f"{self.key}.tar")

    def _open(self, fill: Callable[[PartialFile], object]) -> int:
        return self._cache.open(f"{self.key}.tar", fill, Deadline(self.options.total_s))

    @property
    def _cache(self) -> BoundedCache:
        return BoundedCache(cache_folder() / "shards", self.options.cache_bytes, durable=True)


@dataclass(frozen=True)
class RemoteShard(ShardInCache):
    """A tar, plain or gzipped, at a URL. Two are equal if their full URLs are; `str` shows no credentials."""

    url: str = field(repr=False)
    options: RemoteConfig = field(default=RemoteConfig(), compare=False, repr=False)

    def __str__(self) -> str:
        return display_url(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return file_name(self.url)

    @property
    def key(self) -> str:
        """Hash of the full URL."""
        return digest(self.url)

    @property
    def host(self) -> str:
        """Its protocol, and its host or bucket."""
        return "/".join(self.url.split("/", 3)[:3])

    def open(self, length: int | None = None) -> int:
        """Return a descriptor of the shard in the cache, after downloading it if necessary; the caller closes it.

        A change may stay unnoticed as long as the cache contains the former file.

        Args:
            length: its size in bytes when it was indexed; None if it is not indexed yet.

        Raises:
            StorageError: it cannot be downloaded, is larger than the cache, or has another size than when it was
                indexed (`kind` is then "changed shard").
        """
        return self._open(lambda part: self._fill(part, length))

    def read(self, first: int, end: int, length: int, deadline: Deadline) -> bytes:
        """Download a range of the shard into memory; it is not cached.

        Args:
            first: its first byte.
            end: the byte after its last.
            length: size of the shard in bytes when it was indexed.
            deadline: ends all tries.

        Raises:
            StorageError: it cannot be downloaded, or the shard has another size (`kind` is then "changed shard").
            NoRangesError: the server sends whole files only.
        """

        def fetch() -> bytes:
            with open_url(self.url, self.options.timeout_s, deadline, Span(first, end, length)) as body:
                data = _receive(body, end - first)
            if len(data) > end - first:
                raise FetchError(f"more bytes came than the {end - first} that were announced", again=True)
            return data

        try:
            return retry(fetch, self.url, self.options, deadline)
        except ChangedError as error:
            raise self.change_error(f"{length} bytes", error) from None

    def _fill(self, part: PartialFile, length: int | None) -> None:
        def fetch() -> None:
            part.restart()
            with open_url(self.url, self.options.timeout_s, part.deadline) as body:
                if length is not None and body.length not in (None, length) and not is_gzip(self.name):
                    raise self.change_error(f"{length} bytes", body.length)
                self._copy(body, part)

        retry(fetch, self.url, self.options, part.deadline)

    def _copy(self, body: Body, part: PartialFile) -> None:
        received = [0]
        try:
            if body.length is not None:
                part.reserve(body.length)
            for block in gunzip(_count(body.blocks, received)) if is_gzip(self.name) else _count(body.blocks, received):
                part.write(block)
        except StorageError as error:
            raise StorageError(f"{self}: {error}") from None
        except GzipError as error:
            raise FetchError(str(error), again=True) from None
        if body.length is not None and received[0] != body.length:
            raise FetchError(f"{received[0]} bytes came, {body.length} were announced", again=True)

    def change_error(self, indexed: str, now: object) -> StorageError:
        """Return the error for a shard that is not the indexed one.

        Args:
            indexed: what was indexed, such as "17 bytes".
            now: what is there now.
        """
        return StorageError(
            f"{self}: has changed since it was indexed: {indexed} then, {now} now. Restore the former file, or start "
            "the run again, which indexes the new one (a run with checkpoints then reports the difference, and "
            "continues if run.resume_allow contains data)",
            "changed shard",
        )


def _count(blocks: Iterator[bytes], received: list[int]) -> Iterator[bytes]:
    for block in blocks:
        received[0] += len(block)
        yield block


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
    stamp: Stamp = field(compare=False, repr=False)

    @classmethod
    def at(cls, path: Path, options: RemoteConfig) -> GzipShard:
        """Return the shard at a path; raises OSError if it is missing."""
        return cls(path, options, Stamp.of(path))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def key(self) -> str:
        """Hash of path, size and modification time, so that a changed file has another index and another tar."""
        return digest(f"{self.path}\n{self.stamp.size}\n{self.stamp.modified_ns}")

    def open(self, length: int | None = None) -> int:
        """Return a descriptor of the tar in the cache, after decompressing it if necessary; see `RemoteShard.open`.

        Args:
            length: not used; a plain tar's size decides nothing here.

        Raises:
            DataError: the gzip data are damaged, truncated, or grow by more than a factor of 100.
            StorageError: the file is missing or has changed, or the cache has no room.
        """
        try:
            unchanged = Stamp.of(self.path) == self.stamp
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


def remote_shards(url: str, options: RemoteConfig, endings: Sequence[str] = TAR_ENDINGS) -> list[RemoteShard]:
    """Return the shard at a URL, or, except at http, the shards of a folder or a glob, sorted by name.

    Args:
        url: without braces. A path in an object store without one of the endings is a folder.
        options: how they are downloaded.
        endings: of the files of a folder.

    Raises:
        DataError: the protocol is not allowed or cannot list folders, or nothing is found.
        StorageError: the store cannot be reached.
    """
    protocol, is_folder = protocol_of(url), False
    if protocol in ("http", "https"):
        path = url.partition("?")[0].partition("://")[2].partition("/")[2]
        if not path or path.endswith("/") or "*" in path or "[" in path or "]" in path:
            raise DataError(
                f"{display_url(url)}: {protocol} cannot list folders; name the shards: {protocol}://host/{{00000..00041}}.tar"
            )
        return [RemoteShard(url, options)]
    if not any(mark in url for mark in "*?["):
        if url.endswith(tuple(endings)):
            return [RemoteShard(url, options)]
        url = f"{url.rstrip('/')}/*"
        is_folder = True
    deadline = Deadline(options.total_s)
    found = retry(lambda: list_urls(url, options.timeout_s, deadline), url, options, deadline)
    found = [name for name in found if name.endswith(tuple(endings)) or not is_folder]
    if not found:
        what = f"files that end in {', '.join(endings)}" if is_folder else "files of these names"
        raise DataError(
            f"{display_url(url)}: matches nothing; expected {what}. Are the names of bucket and folder right?"
        )
    return [RemoteShard(f"{protocol}://{name}", options) for name in sorted(found)]


def fetch_text(url: str, options: RemoteConfig, limit: int) -> str:
    """Download a small UTF-8 file; see `fetch_bytes`.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return fetch_bytes(url, options, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{display_url(url)}: not UTF-8: {error.reason} at byte {error.start}") from None


def fetch_bytes(url: str, options: RemoteConfig, limit: int) -> bytes:
    """Download a small file into memory; it is not cached.

    Args:
        url: its URL.
        options: how it is downloaded.
        limit: largest size in bytes.

    Raises:
        StorageError: it cannot be downloaded.
        DataError: it is larger.
    """
    deadline = Deadline(options.total_s)

    def fetch() -> bytes:
        with open_url(url, options.timeout_s, deadline) as body:
            if body.length is not None and body.length > limit:
                raise DataError(
                    f"{display_url(url)}: has {body.length} bytes; at most {limit} are read", "too many bytes"
                )
            data = _receive(body, limit)
        if len(data) > limit:
            raise DataError(
                f"{display_url(url)}: has more than {limit} bytes; at most these are read", "too many bytes"
            )
        return data

    return retry(fetch, url, options, deadline)


def _receive(body: Body, limit: int) -> bytes:
    """Return all bytes of a response; if there are more than `limit`, some of them, but more than `limit`."""
    blocks, received = [], 0
    for block in body.blocks:
        blocks.append(block)
        received += len(block)
        if received > limit:
            return b"".join(blocks)
    if body.length not in (None, received):
        raise FetchError(f"{received} bytes came, {body.length} were announced", again=True)
    return b"".join(blocks)
