"""Files at URLs: fetched with retries, listed, read by ranges, and written; and the shards that a URL names.

fetch(url, options, read_body)   one try: open_url -> Body(length, blocks) -> read_body; again if it breaks
fetch_bytes                      of a small file, within a limit
RemoteFolder                     files below a URL in an object store, to write to
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from vqclip.data.remote.retry import Deadline, FetchError, RemoteConfig, TransferConfig, retry
from vqclip.data.remote.transfer import (
    Body,
    ChangedError,
    NoRangesError,
    Span,
    find_facts,
    list_files,
    object_store,
    open_url,
    translate_errors,
)
from vqclip.data.remote.urls import display_url, local_path, path_in_url, protocol_of
from vqclip.errors import ConfigError, DataError, StorageError
from vqclip.io.files import cache_folder

T = TypeVar("T")

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")
"""Endings of the names of shards."""


def fetch(
    url: str,
    options: TransferConfig,
    read_body: Callable[[Body], T],
    span: Span | None = None,
    deadline: Deadline | None = None,
) -> T:
    """Download a file, or a range of it, and return what `read_body` makes of its body; tried again if it breaks.

    Args:
        url: of an allowed protocol.
        options: how it is downloaded.
        read_body: reads the body once from beginning to end; called again in another try.
        span: the range; None is the whole file.
        deadline: ends all tries; default ``options.total_s`` from now.

    Raises:
        StorageError: it cannot be downloaded; see `retry`.
        NoRangesError: the server answers a request for a range with the whole file.
        ChangedError: the file does not have the size in `span`.
        Exception: any error of ``read_body`` that is not a `FetchError`.
    """

    def once(deadline: Deadline) -> T:
        with open_url(url, options.timeout_s, deadline, span) as body:
            return read_body(body)

    return retry(once, url, options, deadline)


def fetch_bytes(url: str, options: TransferConfig, limit: int) -> bytes:
    """Download a small file into memory; it is not cached.

    Args:
        url: its URL.
        options: how it is downloaded.
        limit: largest size in bytes.

    Raises:
        StorageError: it cannot be downloaded.
        DataError: it is larger.
    """

    def read_body(body: Body) -> bytes:
        blocks, received = [], 0
        for block in body.blocks:
            blocks.append(block)
            received += len(block)
            if max(received, body.length or 0) > limit:
                size = body.length or f"more than {limit}"
                raise DataError(f"{display_url(url)}: has {size} bytes; at most {limit} are read", "too many bytes")
        return b"".join(blocks)

    return fetch(url, options, read_body)


def is_tar(name: str) -> bool:
    """Return whether a file's name is that of a shard: .tar, .tar.gz or .tgz."""
    return name.endswith(TAR_ENDINGS)


def is_gzip(name: str) -> bool:
    """Return whether a file's name is that of a compressed shard: .tar.gz or .tgz."""
    return name.endswith((".tar.gz", ".tgz"))


@dataclass(frozen=True)
class RemoteShard:
    """A shard at a URL. Two are equal if their full URLs are; `str` shows no credentials."""

    url: str = field(repr=False)
    options: RemoteConfig = field(default=RemoteConfig(), compare=False, repr=False)

    def __str__(self) -> str:
        return display_url(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return path_in_url(self.url).rpartition("/")[2]

    def read(self, first: int, end: int, length: int, deadline: Deadline | None = None) -> bytes:
        """Download a range of the shard into memory; it is not cached.

        Args:
            first: its first byte.
            end: the byte after its last.
            length: size of the shard in bytes when it was indexed.
            deadline: ends all tries; default ``options.total_s`` from now.

        Raises:
            StorageError: it cannot be downloaded, or the shard has another size (`kind` is then "changed shard"), or
                the server sends whole files only.
        """
        try:
            return fetch(self.url, self.options, lambda body: b"".join(body.blocks), Span(first, end, length), deadline)
        except ChangedError as error:
            raise StorageError(
                f"{self}: has changed since it was indexed: {length} bytes then, {error} now. Restore the former "
                "file, or start the run again, which indexes the new one (a run with checkpoints then reports the "
                "difference, and continues if run.resume_allow contains data)",
                "changed shard",
            ) from None
        except NoRangesError:
            raise StorageError(
                f"{self}: the server answers a request for a part of the file with all of it; expected one that "
                "answers requests with Range, as it did before; or copy the file to this machine"
            ) from None

    def open(self) -> BinaryIO:
        """Return a file that is read at any place, such as the footer of a table and then some of its columns.

        One of a server that sends whole files only is fetched into a temporary file.

        Raises:
            StorageError: here or while it is read: it cannot be downloaded, or has changed.
        """
        facts = find_facts(self.url, self.options)
        if facts.has_ranges:
            return cast(BinaryIO, _RangeFile(self, facts.size))
        cache_folder().mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=cache_folder())  # noqa: SIM115, the caller closes it

        def read_body(body: Body) -> None:
            file.seek(0)
            file.truncate()
            file.writelines(body.blocks)
            file.seek(0)

        fetch(self.url, self.options, read_body)
        return cast(BinaryIO, file)


Shard: TypeAlias = Path | RemoteShard
"""A tar or table on this machine or at a URL. `str` gives its name for messages, `.name` the file's name."""


class _RangeFile(io.RawIOBase):
    """A file at a URL; each read is a request."""

    def __init__(self, shard: RemoteShard, size: int):
        self._shard, self._size, self._at = shard, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        first, end = self._at, min(self._at + len(buffer), self._size)
        if first < end:
            buffer[: end - first] = self._shard.read(first, end, self._size)
            self._at = end
        return max(end - first, 0)


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
    found = [name for name in list_files(url, options) if name.endswith(tuple(endings)) or not is_folder]
    if not found:
        what = f"files that end in {', '.join(endings)}" if is_folder else "files of these names"
        raise DataError(
            f"{display_url(url)}: matches nothing; expected {what}. Are the names of bucket and folder right?"
        )
    return [RemoteShard(f"{protocol}://{name}", options) for name in sorted(found)]


STORES = ("s3", "gs", "az")
"""Protocols of object stores that can be written to."""
_SMALL = 1 << 20
"""Bytes of a file that is read into memory."""


def require_writable(folder: str) -> str:
    """Return a local path, or the URL of a folder in an object store, without a slash at its end.

    Raises:
        DataError: another protocol.
        ConfigError: a URL that cannot be written to.
    """
    if (local := local_path(folder)) is not None:
        return local
    if protocol_of(folder) not in STORES or set(folder) & set("?#*"):
        raise ConfigError(
            f"got {display_url(folder)}; expected a local folder, or a URL of {', '.join(STORES)} without ?, # and *"
        )
    return folder.rstrip("/")


class RemoteFolder:
    """Files below a URL; names are relative to it. Every method may be called from any thread.

    An object store has no folders and renames nothing. A file appears whole or not at all, and is seen by all readers
    as soon as it is written.

    Args:
        url: of an object store.
        options: retries and time limits of each call.
        section: key of the options in a configuration, for messages.
    """

    def __init__(self, url: str, options: TransferConfig, section: str = "remote"):
        self.url, self.options, self._section = url, options, section

    def __str__(self) -> str:
        return display_url(self.url)

    def list(self, below: str = "") -> dict[str, int]:
        """Return the names of all files below a name, with their sizes in bytes."""
        root = self._path("")

        def find(system: Any, path: str, timeout: float) -> dict[str, int]:
            system.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                found = system.find(path, detail=True, timeout=timeout).items()
                return {each.removeprefix(root): int(info["size"]) for each, info in found if _is_plain(each, root)}
            return {}

        return self._call(below, "listed", find)

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is none.

        Raises:
            StorageError: it cannot be read, or is larger than a MiB.
        """

        def read(system: Any, path: str, timeout: float) -> bytes | None:
            try:
                return bytes(system.cat_file(path, start=0, end=_SMALL + 1, timeout=timeout))
            except FileNotFoundError:
                return None
            except Exception:  # S3 refuses any range of an empty object
                if system.info(path, timeout=timeout)["size"] == 0:
                    return b""
                raise

        content = self._call(name, "read", read)
        if content is not None and len(content) > _SMALL:
            raise StorageError(f"{self}/{name}: has more than {_SMALL} bytes; at most these are read")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; replaces another one."""
        self._call(name, "written", lambda system, path, timeout: system.pipe_file(path, content, timeout=timeout))

    def upload(self, name: str, path: Path) -> None:
        """Copy a local file to a name; replaces another one."""
        self._call(name, "written", lambda system, to, timeout: system.put_file(str(path), to, timeout=timeout))

    def download(self, name: str, path: Path) -> None:
        """Copy a file to a local path, in blocks.

        Raises:
            StorageError: it cannot be copied, such as an object that is a folder of others too.
        """

        def download(system: Any, of: str, timeout: float) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(of, str(path), timeout=timeout)

        self._call(name, "fetched", download)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

        def remove(system: Any, path: str, timeout: float) -> None:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(path, timeout=timeout)

        self._call(name, "removed", remove)

    def _call(self, name: str, done: str, action: Callable[[Any, str, float], T]) -> T:
        url = f"{self.url}/{name}"

        def once(deadline: Deadline) -> T:
            with translate_errors(url):
                system = object_store(url, self.options.timeout_s)
                try:
                    return action(system, self._path(name), max(deadline.left, 0.001))
                except FileNotFoundError:
                    raise FetchError(
                        f"there is no such {'bucket' if done == 'written' else 'file'}", again=False
                    ) from None

        return retry(once, url, self.options, None, done, self._section)

    def _path(self, name: str) -> str:
        return f"{self.url.partition('://')[2]}/{name}"


def _is_plain(path: str, root: str) -> bool:
    """Return whether a name can be a path below a local folder; markers of empty folders are left out too."""
    name = path.removeprefix(root)
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))
