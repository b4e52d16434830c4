"""One try to download a file, through fsspec; retries are left to `retry`."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vqclip.data.remote.deadline import Deadline
from vqclip.data.remote.retry import FetchError
from vqclip.data.remote.urls import protocol_of, redact_message
from vqclip.errors import StorageError

__all__ = ["Body", "list_urls", "open_url"]

_SLOWEST = 16 << 10
"""Bytes a second; a slower download over `timeout_s` counts as stalled."""
_BLOCK = 16 << 20
"""Bytes of one request to an object store."""
_PACKAGES = {"http": ("aiohttp", "remote"), "https": ("aiohttp", "remote"), "s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs")}
_PERMANENT = (ValueError, TypeError, LookupError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT_NAMES = {"InvalidURL", "NonHttpUrlClientError", "TooManyRedirects", "ClientConnectorCertificateError"} | {
    f"{whose}CredentialsError" for whose in ("No", "Partial", "Default")
}
"""Errors of aiohttp, botocore and google.auth by name, since the packages may not be installed."""


class Body(NamedTuple):
    """A response whose content is still arriving."""

    length: int | None
    """Announced size in bytes; None if the server announces none."""
    blocks: Iterator[bytes]


@contextlib.contextmanager
def open_url(url: str, timeout_s: float, deadline: Deadline) -> Iterator[Body]:
    """Open a URL to read it once from beginning to end.

    Args:
        url: of an allowed protocol.
        timeout_s: longest wait for a connection and for bytes.
        deadline: ends everything.

    Raises:
        FetchError: here or while the blocks are read.
        StorageError: the protocol's package is not installed.
    """
    if protocol_of(url) in ("http", "https"):
        with _translate_errors(url):
            file, length = _open_http(url, timeout_s, deadline)
        try:
            yield Body(length, _check_speed(lambda: file.read(1 << 20), url, timeout_s, deadline))
        finally:
            with contextlib.suppress(Exception):
                file.close()
    else:
        with _translate_errors(url):
            store = _ObjectStore(url, timeout_s, deadline)
            length = store.size()
        yield Body(length, _check_speed(store.next_block, url, timeout_s, deadline))


def list_urls(url: str, timeout_s: float, deadline: Deadline) -> list[str]:
    """Return the matches of a glob in an object store, each as bucket and path.

    Raises:
        FetchError: the store cannot be reached.
        StorageError: the protocol's package is not installed.
    """
    with _translate_errors(url):
        return _ObjectStore(url, timeout_s, deadline).glob()


class _ObjectStore:
    """A file or glob in an object store; its package (s3fs, gcsfs) finds credentials and endpoint by itself.

    Args:
        url: of a file, or a glob.
        timeout_s: longest wait for a connection and for bytes.
        deadline: ends every call.
    """

    def __init__(self, url: str, timeout_s: float, deadline: Deadline):
        protocol = protocol_of(url)
        options: dict[str, Any] = {"requests_timeout": timeout_s}
        if protocol == "s3":
            once = {"total_max_attempts": 1}
            options = {"config_kwargs": {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": once}}
        # Without a cache of listings: a second listing in a run must return what is there then.
        self._system = _fsspec(url).filesystem(protocol, use_listings_cache=False, **options)
        self._system.retries = 1  # of s3fs; gcsfs has a fixed number, which the deadline ends
        self._path, self._deadline = url.partition("://")[2], deadline
        self._at = 0

    def glob(self) -> list[str]:
        return [str(name) for name in self._call(self._system.glob)]

    def size(self) -> int:
        self._info = self._call(self._system.info)
        if self._info["type"] != "file":
            raise FetchError("is a folder", again=False)
        return int(self._info["size"])

    def next_block(self) -> bytes:
        """Return the next bytes, none at the end; the file must not change from the first request to the last."""
        start = self._at
        self._at = min(start + _BLOCK, self._info["size"])
        if start < self._at:
            return self._call(self._system.cat_file, start=start, end=self._at)
        if self._call(self._system.info) != self._info:
            raise FetchError("it changed while it was fetched", again=True)
        return b""

    def _call(self, method: Callable[..., Any], **options: Any) -> Any:
        # All methods of asynchronous file systems pass `timeout` to `fsspec.asyn.sync`.
        return method(self._path, timeout=max(self._deadline.left, 0.001), **options)


@contextlib.contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn errors of fsspec and of its packages into `FetchError`, without the credentials that they may show."""
    try:
        yield
    except (FetchError, StorageError):
        raise
    except Exception as error:
        raise _fetch_error(error, url) from None


def _open_http(url: str, timeout_s: float, deadline: Deadline) -> tuple[Any, int | None]:
    fsspec = _fsspec(url)
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=max(deadline.left, 0.001), connect=timeout_s, sock_read=timeout_s)
    system = fsspec.filesystem(
        "http",
        skip_instance_cache=True,
        encoded=True,  # signed URLs break when they are quoted again
        client_kwargs={"timeout": timeout, "auto_decompress": False},
        headers={"Accept-Encoding": "identity"},
    )
    # Without a block size it streams in one request; with any size it sends no HEAD request to ask for one.
    file = system.open(url, "rb", block_size=0, size=1)
    response = file.r
    try:
        if response.status != 200:
            raise FetchError(f"HTTP {response.status} {response.reason}; expected 200", again=False)
        if url.lower().startswith("https:") and any(hop.url.scheme != "https" for hop in (*response.history, response)):
            raise FetchError(
                "redirected from https to http, where anybody on the way can change the content", again=False
            )
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise FetchError(f"sent with Content-Encoding {encoding[:40]!r}; expected identity", again=False)
        stated = response.headers.get("Content-Length", "")
        return file, int(stated) if stated.isascii() and stated.isdigit() else None
    except FetchError:
        file.close()
        raise


def _check_speed(read: Callable[[], bytes], url: str, timeout_s: float, deadline: Deadline) -> Iterator[bytes]:
    """Yield what `read` returns until it returns nothing, and check the speed and the deadline.

    Only the time within `read` counts as the server's: the caller may wait for space in the cache between blocks.
    """
    waited, received = 0.0, 0
    while True:
        since = time.monotonic()
        with _translate_errors(url):
            block = read()
        waited += time.monotonic() - since
        if not block:
            return
        received += len(block)
        yield block
        if deadline.left <= 0:
            raise FetchError("not complete when the time was over", again=False)
        if waited >= timeout_s:
            if received < _SLOWEST * waited:
                raise FetchError(
                    f"slow: {received} bytes in {waited:.1f} s (remote.timeout_s={timeout_s:g})", again=True
                )
            waited, received = 0.0, 0


def _fetch_error(error: Exception, url: str) -> FetchError:
    if isinstance(error, FileNotFoundError):
        return FetchError("not found (404)", again=False)
    status = getattr(error, "status", None)
    status = getattr(error, "code", None) if status is None else status
    if isinstance(status, int) and 300 <= status < 600:
        reason = redact_message(str(getattr(error, "message", "")), url)
        after = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
        return FetchError(
            f"HTTP {status} {reason}".rstrip(),
            again=status >= 500 or status in (408, 425, 429),
            after_s=float(after) if after.isascii() and after.isdigit() and len(after) < 9 else 0.0,
        )
    text = redact_message(str(error), url)
    permanent = isinstance(error, _PERMANENT) or any(kind.__name__ in _PERMANENT_NAMES for kind in type(error).__mro__)
    return FetchError(f"{type(error).__name__}{': ' if text else ''}{text}", again=not permanent)


def _fsspec(url: str) -> Any:
    package, extra = _PACKAGES[str(protocol_of(url))]
    try:
        importlib.import_module(package)
    except ImportError:
        raise StorageError(
            f"{url.partition('://')[0]}:// needs the package {package}: pip install 'vqclip[{extra}]'"
        ) from None
    return importlib.import_module("fsspec")
