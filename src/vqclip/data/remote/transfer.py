"""One try to get what lies at a URL, through fsspec."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from vqclip.data.remote.retry import Failure
from vqclip.data.remote.urls import protocol_of, redacted
from vqclip.errors import StorageError

__all__ = ["Body", "file_system", "opened", "translated"]

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
def opened(url: str, timeout_s: float, left_s: float) -> Iterator[Body]:
    """What lies at a URL, for one reading from its beginning to its end.

    Args:
        url: of an allowed protocol.
        timeout_s: longest wait for a connection and for bytes.
        left_s: longest time for everything.

    Raises:
        Failure: here or while the blocks are read.
        StorageError: the protocol's package is not installed.
    """
    protocol = protocol_of(url)
    end = time.monotonic() + left_s
    with translated(url):
        if protocol in ("http", "https"):
            file, length = _open_http(url, timeout_s, left_s)
        else:
            file = file_system(url, timeout_s).open(url, "rb", block_size=_BLOCK, cache_type="readahead")
            length = file.size
    try:
        yield Body(length, _blocks(file, url, timeout_s, end))
    finally:
        with contextlib.suppress(Exception):
            file.close()


def file_system(url: str, timeout_s: float) -> Any:
    """The file system of fsspec for object stores; credentials and endpoint are those of its own package.

    Raises:
        StorageError: the package is not installed.
    """
    protocol = protocol_of(url)
    options: dict[str, Any] = {"requests_timeout": timeout_s}
    if protocol == "s3":
        options = {"config_kwargs": {"connect_timeout": timeout_s, "read_timeout": timeout_s}}
    # No listings are kept: what the second listing of a run says is what is there then.
    return _fsspec(url).filesystem(protocol, use_listings_cache=False, **options)


@contextlib.contextmanager
def translated(url: str) -> Iterator[None]:
    """Turns errors of fsspec and what it stands on into `Failure`, without the credentials that they may show."""
    try:
        yield
    except (Failure, StorageError):
        raise
    except Exception as error:
        raise _failure(error, url) from None


def _open_http(url: str, timeout_s: float, left_s: float) -> tuple[Any, int | None]:
    fsspec = _fsspec(url)
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=max(left_s, 0.001), connect=timeout_s, sock_read=timeout_s)
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


def _blocks(file: Any, url: str, timeout_s: float, end: float) -> Iterator[bytes]:
    since, received = time.monotonic(), 0
    while True:
        with translated(url):
            block = file.read(1 << 20)
        if not block:
            return
        yield block
        now, received = time.monotonic(), received + len(block)
        if now >= end:
            raise Failure("not through with it when the time was over", again=False)
        if now - since >= timeout_s:
            if received < _SLOWEST * (now - since):
                raise Failure(
                    f"slow: {received} bytes in {now - since:.1f} s (remote.timeout_s={timeout_s:g})", again=True
                )
            since, received = now, 0


def _failure(error: Exception, url: str) -> Failure:
    if isinstance(error, FileNotFoundError):
        return Failure("not found (404)", again=False)
    status = getattr(error, "status", None)
    status = getattr(error, "code", None) if status is None else status
    if isinstance(status, int) and 300 <= status < 600:
        reason = redacted(str(getattr(error, "message", "")), url)
        after = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
        return Failure(
            f"HTTP {status} {reason}".rstrip(),
            again=status >= 500 or status in (408, 425, 429),
            after_s=float(after) if after.isascii() and after.isdigit() and len(after) < 9 else 0.0,
        )
    text = redacted(str(error), url)
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
