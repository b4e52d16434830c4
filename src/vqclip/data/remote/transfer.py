"""Transfers by urllib3, and from object stores by fsspec.

open_url                 one try to download a file or a range of it; `vqclip.data.remote.files.fetch` makes several
find_facts, list_files   sizes and tags
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

import urllib3
from urllib3.util import Timeout, Url, make_headers, parse_url

from vqclip.data.remote.retry import Deadline, FetchError, TransferConfig, retry
from vqclip.data.remote.urls import protocol_of, redact_message
from vqclip.errors import StorageError

_SLOWEST = 16 << 10
"""Bytes a second; a slower download over `timeout_s` counts as stalled."""
_BLOCK = 16 << 20
"""Bytes of one request to an object store."""
_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "az": ("adlfs", "az")}
"""Package that fsspec needs for a protocol, and our extra that installs it; the hub's is always there."""
_OVER_HTTP = ("http", "https", "hf")
_PERMANENT = (
    *(ValueError, TypeError, LookupError),
    *(PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError),
)
_PERMANENT_NAMES = (
    "ClientAuthenticationError",
    *(f"{whose}CredentialsError" for whose in ("No", "Partial", "Default")),
)
"""Errors of botocore, google.auth and azure by name, since the packages may not be installed."""
_HINTS = {  # what to do about an error, by its name
    "NoCredentialsError": "; give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws/credentials"
}
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_REDIRECTS = 10
_CONNECTIONS = 32
"""Largest number of servers, and of connections to one of them, that are used again."""
_TAGS = ("ETag", "etag", "blob_id", "Last-Modified", "LastModified", "last_modified", "mtime")


class Body(NamedTuple):
    """A response whose content is still arriving."""

    length: int | None
    """Announced size in bytes, of the range if one was asked for; None if the server announces none."""
    blocks: Iterator[bytes]


class Span(NamedTuple):
    """A range of the bytes of a file."""

    first: int
    end: int
    total: int | None
    """Size of the whole file; None if it is not known."""


class FileFacts(NamedTuple):
    """Facts of a file that is not read yet."""

    size: int
    """Bytes."""
    tag: str
    """The server's name for this version of the file (ETag; else the time of its last change, if stated)."""
    has_ranges: bool = True
    """Whether the server answers a request for a range with that range."""


class NoRangesError(Exception):
    """A server sends whole files only."""


class ChangedError(Exception):
    """A file has another size than expected; its argument says which."""


@contextlib.contextmanager
def open_url(url: str, timeout_s: float, deadline: Deadline, span: Span | None = None) -> Iterator[Body]:
    """Open a URL to read it, or a range of it, once from beginning to end.

    Args:
        url: of an allowed protocol.
        timeout_s: longest wait for a connection and for bytes.
        deadline: ends everything.
        span: the range, at least one byte; None is the whole file.

    Raises:
        FetchError: here, or while the blocks are read: also if fewer bytes come than were announced, or more.
        StorageError: the package of an object store is not installed.
        NoRangesError: the server answers a request for a range with the whole file.
        ChangedError: the file does not have the size in `span`; here or while the blocks are read.
    """
    if protocol_of(url) in _OVER_HTTP:
        with translate_errors(url):
            response, length = _open_file(url, timeout_s, deadline, span)
        with response:
            read = functools.partial(response.read1, 1 << 20, decode_content=False)
            yield Body(length, _check_blocks(read, length, url, timeout_s, deadline))
    else:
        with translate_errors(url):
            facts: dict[str, Any] = {"size": span.total} if span else _call("info", url, timeout_s, deadline)
        if facts.get("type", "file") != "file":
            raise FetchError("is a folder", again=False)
        whole = span or Span(0, int(facts["size"]), None)
        blocks, length = _object_blocks(url, timeout_s, deadline, whole, facts), whole.end - whole.first
        read = functools.partial(next, blocks, b"")
        yield Body(length, _check_blocks(read, length, url, timeout_s, deadline))


def find_facts(url: str, options: TransferConfig) -> FileFacts:
    """Return size and tag of a file, and whether ranges of it can be read.

    Raises:
        StorageError: it cannot be reached, the server announces no size, or the protocol's package is not installed.
    """

    def once(deadline: Deadline) -> FileFacts:
        with translate_errors(url):
            if protocol_of(url) not in _OVER_HTTP:
                facts = _call("info", url, options.timeout_s, deadline)
                return FileFacts(int(facts["size"]), _tag(facts))
            has_ranges = True
            try:
                response, _ = _open_file(url, options.timeout_s, deadline, Span(0, 1, None))
                total = response.headers["Content-Range"].partition("/")[2]
                length = int(total) if total.isdigit() else None
            except (NoRangesError, ChangedError) as error:  # an empty file has no first byte
                response, length = _open_file(url, options.timeout_s, deadline, None)
                has_ranges = isinstance(error, ChangedError)
            response.close()
        if length is None:
            raise FetchError("the server announces no size (Content-Length), so it cannot be indexed", again=False)
        return FileFacts(length, _tag(response.headers), has_ranges)

    return retry(once, url, options)


def list_files(pattern: str, options: TransferConfig) -> dict[str, FileFacts]:
    """Return size and tag of the files that match a glob in an object store, by bucket and path.

    Raises:
        StorageError: the store cannot be reached, or the protocol's package is not installed.
    """

    def once(deadline: Deadline) -> dict[str, FileFacts]:
        with translate_errors(pattern):
            object_store(pattern, options.timeout_s).invalidate_cache()  # a second listing must see what is new
            found = _call("glob", pattern, options.timeout_s, deadline, detail=True)
            files = ((str(name), each) for name, each in found.items() if each.get("type", "file") == "file")
            return {name: FileFacts(int(each["size"]), _tag(each)) for name, each in files}

    return retry(once, pattern, options)


def object_store(url: str, timeout_s: float) -> Any:
    """Return the file system of fsspec for the object store of a URL; its package finds credentials by itself.

    Args:
        url: of an object or folder.
        timeout_s: longest wait for a connection and for bytes.

    Raises:
        StorageError: the protocol's package is not installed.
    """
    return _file_system(os.getpid(), str(protocol_of(url)), timeout_s)


@functools.lru_cache(maxsize=32)
def _file_system(process: int, protocol: str, timeout_s: float) -> Any:
    """Return a file system, the same one for all threads of this process: its connections are used again."""
    if protocol in _PACKAGES:
        package, extra = _PACKAGES[protocol]
        try:
            importlib.import_module(package)
        except ImportError:
            raise StorageError(f"{protocol}:// needs the package {package}: pip install 'vqclip[{extra}]'") from None
    import fsspec

    waits: dict[str, Any] = {"requests_timeout": timeout_s}
    if protocol == "s3":
        once = {"total_max_attempts": 1}
        waits = {"config_kwargs": {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": once}}
    elif protocol == "az":
        waits = {"connection_timeout": timeout_s, "read_timeout": timeout_s}
    options = {} if protocol == "hf" else {"use_listings_cache": False, **waits}
    system = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    system.retries = 1  # of s3fs; gcsfs has a fixed number, which the deadline ends
    return system


def _call(method: str, url: str, timeout_s: float, deadline: Deadline, **options: Any) -> Any:
    """Return what a method of a file system returns for the path of a URL, before the deadline."""
    system = object_store(url, timeout_s)
    # All methods of asynchronous file systems pass `timeout` to `fsspec.asyn.sync`; that of the hub has its own.
    if getattr(system, "async_impl", False):
        options["timeout"] = max(deadline.left, 0.001)
    return getattr(system, method)(url.partition("://")[2], **options)


def _object_blocks(
    url: str, timeout_s: float, deadline: Deadline, span: Span, facts: Mapping[str, Any]
) -> Iterator[bytes]:
    """Yield an object or a range of it; the object must not change from the first request to the last.

    Args:
        url: of the object.
        timeout_s: longest wait for a connection and for bytes.
        deadline: ends every request.
        span: the range; without a total size if it is all of the object.
        facts: what the store said of the object.
    """

    def require_size() -> None:
        with contextlib.suppress(OSError):
            now = int(_call("info", url, timeout_s, deadline)["size"])
            if span.total is not None and now != span.total:
                raise ChangedError(f"{now} bytes")

    for start in range(span.first, span.end, _BLOCK):
        end = min(start + _BLOCK, span.end)
        try:
            block: bytes = _call("cat_file", url, timeout_s, deadline, start=start, end=end)
        except FileNotFoundError:
            raise
        except Exception:
            require_size()  # a store may refuse a range beyond the end with any error
            raise
        if len(block) != end - start:
            require_size()
            raise FetchError(f"{len(block)} bytes came instead of {end - start}", again=True)
        yield block
    if span.total is None and _call("info", url, timeout_s, deadline) != facts:
        raise FetchError("it changed while it was fetched", again=True)


def _tag(facts: Mapping[str, Any]) -> str:
    """Return the ETag in headers, or in what s3fs, gcsfs and adlfs call it, without quotes."""
    found = next((facts[name] for name in _TAGS if name in facts), "")
    return str(found).removeprefix("W/").strip('"')[:128]


def _open_file(
    url: str, timeout_s: float, deadline: Deadline, span: Span | None
) -> tuple[urllib3.BaseHTTPResponse, int | None]:
    """Return the response to a request for a file or a range of it, and the length of its body if it is announced."""
    headers = {} if span is None else {"Range": f"bytes={span.first}-{span.end - 1}"}
    if protocol_of(url) == "hf":
        url, more = _at_hub(url)
        headers |= more
    try:
        response = _open_http(url, headers, timeout_s, deadline)
    except FetchError as error:
        if span is not None and error.status == 416:
            raise ChangedError(f"at most {span.first} bytes") from None
        raise
    try:
        if span is not None:
            _check_part(response, span)
            return response, span.end - span.first
        if response.status != 200:
            raise FetchError(f"HTTP {response.status} {response.reason}; expected 200", again=False)
        stated = response.headers.get("Content-Length", "")
        return response, int(stated) if stated.isascii() and stated.isdigit() else None
    except BaseException:
        response.close()
        raise


def _check_part(response: urllib3.BaseHTTPResponse, span: Span) -> None:
    if response.status == 200:
        whole = response.headers.get("Content-Length", str(span.total))
        if span.total is not None and whole != str(
            span.total
        ):  # such as the page of a proxy, after which ranges may come again
            raise FetchError(
                f"HTTP 200 with {whole[:20]} bytes; expected 206 and a part, or the file of {span.total} bytes",
                again=True,
            )
        raise NoRangesError
    stated = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(stated)
    if match is None:
        raise FetchError(
            f"HTTP {response.status} {response.reason} with Content-Range {stated[:60]!r}; expected 206 and a part",
            again=False,
        )
    if span.total is not None and match[3] not in ("*", str(span.total)):
        raise ChangedError(f"{match[3]} bytes")
    if (int(match[1]), int(match[2]) + 1) != span[:2]:
        raise FetchError(f"sent {stated}; asked for bytes {span.first}-{span.end - 1}", again=True)


def _at_hub(url: str) -> tuple[str, dict[str, str]]:
    """Return the https URL of a file at the Hugging Face hub, and a header with the token."""
    from huggingface_hub import get_token, hf_hub_url

    system = _file_system(os.getpid(), "hf", 0.0)
    file = system.resolve_path(url.partition("://")[2])  # asks the hub once for each repository
    if not hasattr(file, "repo_id"):
        raise FetchError("is in a bucket; expected hf://datasets/OWNER/NAME/PATH", again=False)
    token = get_token()
    where = hf_hub_url(
        file.repo_id, file.path_in_repo, repo_type=file.repo_type, revision=file.revision, endpoint=system.endpoint
    )
    return where, {"Authorization": f"Bearer {token}"} if token else {}


def _check_blocks(
    read: Callable[[], bytes], length: int | None, url: str, timeout_s: float, deadline: Deadline
) -> Iterator[bytes]:
    """Yield what `read` returns until it returns nothing, and check the number of bytes, the speed and the deadline.

    Only the time within `read` counts as the server's: the caller may wait between blocks.
    """
    waited, received, total = 0.0, 0, 0
    while True:
        since = time.monotonic()
        with translate_errors(url):
            block = read()
        waited += time.monotonic() - since
        received, total = received + len(block), total + len(block)
        if length is not None and (total > length or (total < length and not block)):
            more = " or more" if block else ""
            raise FetchError(f"{total} bytes{more} came, {length} were announced", again=True)
        if not block:
            return
        yield block
        if deadline.left <= 0:
            raise FetchError("not complete when the time was over", again=False)
        if waited >= timeout_s:
            if received < _SLOWEST * waited:
                raise FetchError(
                    f"slow: {received} bytes in {waited:.1f} s (remote.timeout_s={timeout_s:g})", again=True
                )
            waited, received = 0.0, 0


@contextlib.contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Turn errors of fsspec and of its packages into `FetchError`, without the credentials that they may show."""
    try:
        yield
    except (FetchError, StorageError, NoRangesError, ChangedError):
        raise
    except Exception as error:
        raise _fetch_error(error, url) from None


def _fetch_error(error: Exception, url: str) -> FetchError:
    status = 404 if isinstance(error, FileNotFoundError) else _status(error)
    if isinstance(status, int) and 400 <= status < 600:
        reason = redact_message(str(getattr(error, "message", "")), url)
        return _status_error(status, reason, str((getattr(error, "headers", None) or {}).get("Retry-After", "")))
    text = redact_message(str(error), url) + _HINTS.get(type(error).__name__, "")
    permanent = isinstance(error, _PERMANENT) or any(kind.__name__ in _PERMANENT_NAMES for kind in type(error).__mro__)
    # urllib3 wraps the error of a certificate that is not trusted.
    permanent = permanent or isinstance(next(iter(error.args), None), ssl.SSLCertVerificationError)
    return FetchError(f"{type(error).__name__}{': ' if text else ''}{text}", again=not permanent)


def _status(error: Exception) -> object:
    """Return the HTTP status in an error of gcsfs, azure or huggingface_hub."""
    for where in (error, getattr(error, "response", None)):
        for name in ("status", "code", "status_code"):
            if isinstance(status := getattr(where, name, None), int):
                return status
    return None


# ---- requests by urllib3


def _open_http(url: str, headers: dict[str, str], timeout_s: float, deadline: Deadline) -> urllib3.BaseHTTPResponse:
    """Ask for a file, and return the response with status 200 or 206, whose body is still arriving.

    Redirects are followed, but not from https to http. User and password in the URL are sent to its host alone, and so
    is a header `Authorization`. Nothing decompresses the body, and no cookies are kept.

    Args:
        url: sent as it is written: a signed URL would break if it were quoted again.
        headers: more headers.
        timeout_s: longest wait for a connection and for bytes.
        deadline: shortens these waits.

    Raises:
        FetchError: any other status, or a redirect that is not followed.
        Exception: errors of urllib3.
    """
    headers, is_safe = {"Accept-Encoding": "identity", **headers}, parse_url(url).scheme == "https"
    for _ in range(_REDIRECTS):
        here = parse_url(url)
        wait = min(timeout_s, max(deadline.left, 0.001))
        response = _connections(os.getpid(), _proxy(here)).request(
            "GET",
            here._replace(auth=None, fragment=None).url,
            headers=headers | (make_headers(basic_auth=unquote(here.auth)) if here.auth else {}),
            preload_content=False,
            redirect=False,
            retries=False,
            timeout=Timeout(connect=wait, read=wait),
        )
        location = response.get_redirect_location()
        if not location:
            break
        response.read1(1 << 16)  # most often all of it, so that the connection can be used again
        response.close()
        url = urljoin(url, location)
        there = parse_url(url)
        if there.scheme not in ("http", "https"):
            raise FetchError(f"redirected to protocol {there.scheme}; expected http or https", again=False)
        if is_safe and there.scheme != "https":
            raise FetchError(
                "redirected from https to http, where anybody on the way can change the content", again=False
            )
        if (here.scheme, here.netloc) != (there.scheme, there.netloc):
            headers.pop("Authorization", None)
    else:
        raise FetchError(f"more than {_REDIRECTS} redirects", again=False)
    encoding = response.headers.get("Content-Encoding", "identity")
    if response.status in (200, 206) and encoding.lower() == "identity":
        return response
    response.close()
    if response.status >= 400:
        raise _status_error(response.status, response.reason or "", response.headers.get("Retry-After", ""))
    if response.status not in (200, 206):
        raise FetchError(f"HTTP {response.status} {response.reason}; expected 200", again=False)
    raise FetchError(f"sent with Content-Encoding {encoding[:40]!r}; expected identity", again=False)


def _status_error(status: int, reason: str, retry_after: str = "") -> FetchError:
    """Return the error for the status of a response.

    Args:
        status: 400 to 599.
        reason: the server's words, without credentials.
        retry_after: the header `Retry-After`: seconds, or a date.
    """
    if status == 404:
        return FetchError("not found (404)", again=False)
    after_s = 0.0
    if 0 < len(retry_after) < 64:
        with contextlib.suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
            after_s = urllib3.Retry().parse_retry_after(retry_after)
    again = status >= 500 or status in (408, 425, 429)
    return FetchError(f"HTTP {status} {reason[:200]}".rstrip(), again, after_s, status)


@functools.lru_cache(maxsize=16)
def _connections(process: int, proxy: str | None) -> urllib3.PoolManager:
    """Return connections for a proxy; never those of another process, which a fork would share."""
    if proxy is None:
        return urllib3.PoolManager(_CONNECTIONS, maxsize=_CONNECTIONS)
    auth = parse_url(proxy).auth
    headers = make_headers(proxy_basic_auth=unquote(auth)) if auth else None
    return urllib3.ProxyManager(proxy, _CONNECTIONS, maxsize=_CONNECTIONS, proxy_headers=headers)


def _proxy(url: Url) -> str | None:
    """Return the proxy that the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) or the system has for it."""
    if urllib.request.proxy_bypass(url.netloc or ""):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme or "") or proxies.get("all")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"
