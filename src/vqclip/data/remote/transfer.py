"""One try to get what lies at a URL, through fsspec, with no retries but our own."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vqclip.data.remote.deadline import Deadline
from vqclip.data.remote.retry import Failure
from vqclip.data.remote.urls import protocol_of, redact_message
from vqclip.errors import StorageError

__all__ = ["Body", "list_urls", "open_url"]

_SLOWEST = 16 << 10
"""Bytes a second, over the time after which no bytes at all are a stall."""
_BLOCK = 16 << 20
"""Bytes of one request to an object store."""
_PACKAGES = {"http": ("aiohttp", "remote"), "https": ("aiohttp", "remote"), "s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs")}
_HOPELESS = (ValueError, TypeError, LookupError, PermissionError, IsADirectoryError, NotADirectoryError)
_HOPELESS_NAMES = {"InvalidURL", "NonHttpUrlClientError", "TooManyRedirects", "ClientConnectorCertificateError"} | {
    f"{whose}CredentialsError" for whose in ("No", "Partial", "Default")
}
"""Classes of aiohttp, botocore and google.auth, which may not be installed."""


class Body(NamedTuple):
    """What a server has begun to send."""

    length: int | None
    """Bytes that it says will come; None if it does not say."""
    blocks: Iterator[bytes]


@contextlib.contextmanager
def open_url(url: str, timeout_s: float, deadline: Deadline) -> Iterator[Body]:
    """What lies at a URL, for one reading from its beginning to its end.

    Args:
        url: of an allowed protocol.
        timeout_s: longest wait for a connection and for bytes.
        deadline: of everything.

    Raises:
        Failure: here or while the blocks are read.
        StorageError: the protocol's package is not installed.
    """
    if protocol_of(url) in ("http", "https"):
        with _translated(url):
            file, length = _open_http(url, timeout_s, deadline)
        try:
            yield Body(length, _watched(lambda: file.read(1 << 20), url, timeout_s, deadline))
        finally:
            with contextlib.suppress(Exception):
                file.close()
    else:
        with _translated(url):
            store = _Store(url, timeout_s, deadline)
            length = store.size()
        yield Body(length, _watched(store.next_block, url, timeout_s, deadline))


def list_urls(url: str, timeout_s: float, deadline: Deadline) -> list[str]:
    """What a glob in an object store matches, as bucket and path.

    Raises:
        Failure: the store cannot be reached.
        StorageError: the protocol's package is not installed.
    """
    with _translated(url):
        return _Store(url, timeout_s, deadline).glob()


class _Store:
    """What lies at a URL in an object store; credentials and endpoint are those that its package finds by itself.

    Args:
        url: of a file, or a glob.
        timeout_s: longest wait for a connection and for bytes.
        deadline: of every call.
    """

    def __init__(self, url: str, timeout_s: float, deadline: Deadline):
        protocol = protocol_of(url)
        options: dict[str, Any] = {"requests_timeout": timeout_s}
        if protocol == "s3":
            once = {"total_max_attempts": 1}
            options = {"config_kwargs": {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": once}}
        # No listings are kept: what the second listing of a run says is what is there then.
        self._system = _fsspec(url).filesystem(protocol, use_listings_cache=False, **options)
        self._system.retries = 1  # of s3fs; gcsfs has fixed ones, which the deadline ends
        self._path, self._deadline = url.partition("://")[2], deadline
        self._at = 0

    def glob(self) -> list[str]:
        return [str(name) for name in self._wait_for(self._system._glob)]

    def size(self) -> int:
        self._facts = self._wait_for(self._system._info)
        if self._facts["type"] != "file":
            raise Failure("is a folder", again=False)
        return int(self._facts["size"])

    def next_block(self) -> bytes:
        """The next bytes; none at the end. What lies there must be the same from the first request to the last."""
        start = self._at
        self._at = min(start + _BLOCK, self._facts["size"])
        if start < self._at:
            return self._wait_for(self._system._cat_file, start=start, end=self._at)
        if self._wait_for(self._system._info) != self._facts:
            raise Failure("it changed while it was fetched", again=True)
        return b""

    def _wait_for(self, coroutine: Callable[..., Any], **options: Any) -> Any:
        sync = importlib.import_module("fsspec.asyn").sync
        return sync(self._system.loop, coroutine, self._path, timeout=max(self._deadline.left, 0.001), **options)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turns errors of fsspec and what it stands on into `Failure`, without the credentials that they may show."""
    try:
        yield
    except (Failure, StorageError):
        raise
    except Exception as error:
        raise _failure(error, url) from None


def _open_http(url: str, timeout_s: float, deadline: Deadline) -> tuple[Any, int | None]:
    fsspec = _fsspec(url)
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=max(deadline.left, 0.001), connect=timeout_s, sock_read=timeout_s)
    system = fsspec.filesystem(
        "http",
        skip_instance_cache=True,
        encoded=True,  # signed URLs break when they are quoted anew
        client_kwargs={"timeout": timeout, "auto_decompress": False},
        headers={"Accept-Encoding": "identity"},
    )
    # Without a block size it streams, in one request; a size, whichever, saves it from asking for one by HEAD.
    file = system.open(url, "rb", block_size=0, size=1)
    response = file.r
    try:
        if response.status != 200:
            raise Failure(f"HTTP {response.status} {response.reason}; expected 200", again=False)
        if url.lower().startswith("https:") and any(hop.url.scheme != "https" for hop in (*response.history, response)):
            raise Failure("redirected from https to http, which anybody on the way can change", again=False)
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise Failure(f"sent with Content-Encoding {encoding[:40]!r}; shards are fetched as they are", again=False)
        stated = response.headers.get("Content-Length", "")
        return file, int(stated) if stated.isascii() and stated.isdigit() else None
    except Failure:
        file.close()
        raise


def _watched(read: Callable[[], bytes], url: str, timeout_s: float, deadline: Deadline) -> Iterator[bytes]:
    """What `read` gives until it gives nothing, if it comes in time.

    Only the time within `read` tells whether the server is slow: whoever takes the blocks may wait for room.
    """
    waited, received = 0.0, 0
    while True:
        since = time.monotonic()
        with _translated(url):
            block = read()
        waited += time.monotonic() - since
        if not block:
            return
        received += len(block)
        yield block
        if deadline.left <= 0:
            raise Failure("not through with it when the time was over", again=False)
        if waited >= timeout_s:
            if received < _SLOWEST * waited:
                raise Failure(f"slow: {received} bytes in {waited:.1f} s (remote.timeout_s={timeout_s:g})", again=True)
            waited, received = 0.0, 0


def _failure(error: Exception, url: str) -> Failure:
    if isinstance(error, FileNotFoundError):
        return Failure("not found (404)", again=False)
    status = getattr(error, "status", None)
    status = getattr(error, "code", None) if status is None else status
    if isinstance(status, int) and 300 <= status < 600:
        reason = redact_message(str(getattr(error, "message", "")), url)
        after = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
        return Failure(
            f"HTTP {status} {reason}".rstrip(),
            again=status >= 500 or status in (408, 425, 429),
            after_s=float(after) if after.isascii() and after.isdigit() and len(after) < 9 else 0.0,
        )
    text = redact_message(str(error), url)
    hopeless = isinstance(error, _HOPELESS) or any(kind.__name__ in _HOPELESS_NAMES for kind in type(error).__mro__)
    return Failure(f"{type(error).__name__}{': ' if text else ''}{text}", again=not hopeless)


def _fsspec(url: str) -> Any:
    package, extra = _PACKAGES[str(protocol_of(url))]
    try:
        importlib.import_module(package)
    except ImportError:
        raise StorageError(
            f"{url.partition('://')[0]}:// needs the package {package}: pip install 'vqclip[{extra}]'"
        ) from None
    return importlib.import_module("fsspec")


def _forget_the_loop() -> None:
    """The event loop of fsspec runs in a thread, which a fork leaves behind: whoever waits for it waits for ever.

    Newer versions of fsspec see to it by themselves, 2024.2 does not.
    """
    if "fsspec.asyn" in sys.modules:
        sys.modules["fsspec.asyn"].reset_lock()


os.register_at_fork(after_in_child=_forget_the_loop)
