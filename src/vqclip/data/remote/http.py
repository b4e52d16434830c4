"""Requests to HTTP servers, by urllib3."""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
import urllib.request
from urllib.parse import unquote, urljoin

import urllib3
from urllib3.util import Timeout, Url, make_headers, parse_url

from vqclip.data.remote.retry import Deadline, FetchError

__all__ = ["is_permanent", "open_http", "status_error"]

_REDIRECTS = 10
_CONNECTIONS = 32
"""Largest number of servers, and of connections to one of them, that are used again."""


def open_http(url: str, headers: dict[str, str], timeout_s: float, deadline: Deadline) -> urllib3.BaseHTTPResponse:
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
            return _require_whole_or_part(response)
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
    raise FetchError(f"more than {_REDIRECTS} redirects", again=False)


def _require_whole_or_part(response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
    encoding = response.headers.get("Content-Encoding", "identity")
    if response.status in (200, 206) and encoding.lower() == "identity":
        return response
    response.close()
    if response.status >= 400:
        raise status_error(response.status, response.reason or "", response.headers.get("Retry-After", ""))
    if response.status not in (200, 206):
        raise FetchError(f"HTTP {response.status} {response.reason}; expected 200", again=False)
    raise FetchError(f"sent with Content-Encoding {encoding[:40]!r}; expected identity", again=False)


def status_error(status: int, reason: str, retry_after: str = "") -> FetchError:
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


def is_permanent(error: Exception) -> bool:
    """Return whether an error of urllib3 comes again: a certificate that is not trusted, or an invalid URL."""
    cause = error.args[0] if error.args else None
    return isinstance(cause, ssl.SSLCertVerificationError) or isinstance(error, urllib3.exceptions.LocationValueError)


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
