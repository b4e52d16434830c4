"""Shards at URLs: which a URL names, and reading one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vqclip.data.remote.cache import PartialFile, ShardInCache
from vqclip.data.remote.gunzip import TAR_ENDINGS, GzipError, gunzip, is_gzip
from vqclip.data.remote.retry import Deadline, FetchError, RemoteConfig, retry
from vqclip.data.remote.transfer import Body, ChangedError, Span, list_urls, open_url
from vqclip.data.remote.urls import digest, display_url, file_name, protocol_of
from vqclip.errors import DataError, StorageError

__all__ = ["RemoteShard", "fetch_bytes", "fetch_text", "remote_shards"]


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


def _count(blocks: Iterator[bytes], received: list[int]) -> Iterator[bytes]:
    for block in blocks:
        received[0] += len(block)
        yield block


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
