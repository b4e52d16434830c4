"""URLs of shards: which ones are read, and how they are named without the credentials in them."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import unquote

from vqclip.errors import DataError

__all__ = ["PROTOCOLS", "beneath", "digest", "local_path", "protocol_of", "redacted", "shown"]

PROTOCOLS = ("file", "http", "https", "s3", "gs")
"""All that is read. Others of fsspec's open archives, run commands or reach other machines."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_IPV6 = re.compile(r"(?<=[/@])\[[0-9A-Fa-f:.]+\]")
_SHOWN_DIGITS = 12
_SECRET = 6
"""Shorter values of a query are no secrets."""


def protocol_of(path: str) -> str | None:
    """The protocol of a URL, in lower case; None for a local path.

    Raises:
        DataError: another protocol, a command, a chain of protocols, or no host or bucket.
    """
    if path.lower().startswith("pipe:"):
        raise DataError(f"pipe:...: commands are not run; {_EXPECTED}")
    match = _SCHEME.match(path)
    if match is None:
        if "://" in path:  # such as zip::https://..., also where it is spelt with braces
            raise DataError(f"{_masked(path)}: chains of protocols and URLs inside paths are not read; {_EXPECTED}")
        return None
    protocol = match[1].lower()
    if "::" in _IPV6.sub("", path):
        raise DataError(f"{_masked(path)}: chains of protocols (::) are not read; {_EXPECTED}")
    if protocol not in PROTOCOLS:
        raise DataError(f"{_masked(path)}: protocol {protocol} is not read; {_EXPECTED}")
    if not path.isprintable():
        raise DataError(f"{_masked(path)}: a URL with control characters is not read")
    if protocol in ("http", "https") and any(mark in path for mark in " \\"):
        raise DataError(f"{_masked(path)}: a URL has no blank and no backslash; write %20 or %5C")
    if protocol != "file" and not _address(path)[1].partition("/")[0]:
        raise DataError(f"{_masked(path)}: names no {'host' if protocol.startswith('http') else 'bucket'}")
    return protocol


_EXPECTED = f"expected a local path or a URL of one of {', '.join(PROTOCOLS)}"


def local_path(url: str) -> str:
    """The path in ``file:///path``.

    Raises:
        DataError: it names another machine.
    """
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise DataError(f"{_masked(url)}: names the host {host!r}; expected file:///path, which is on this machine")
    return unquote(f"/{path}")


def digest(url: str) -> str:
    """SHA-256 of the full URL, query included; what the cache is keyed by."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()


def shown(path: str) -> str:
    """A URL for messages: without user, password and the values of its query, but still one of its own.

    ``https://me:pw@host/a.tar?sig=x`` → ``https://host/a.tar?sig=... [0c9a9a0f3a6b]``: the beginning of `digest`, with
    which the file's name in the cache begins too. A local path is shown as it is.
    """
    masked = _masked(path)
    return masked if masked == path else f"{masked} [{digest(path)[:_SHOWN_DIGITS]}]"


def redacted(text: str, url: str) -> str:
    """Somebody else's message about a URL, with no credentials of this URL or any other in it."""
    text = _ANY_URL.sub(lambda match: _masked(match[0]), text.replace(url, _masked(url)))
    user, _, query = _address(url)
    values = [part.rpartition("=")[2] for part in query.split("&")]
    for secret in (query, user, *user.split(":"), *(value for value in values if len(value) >= _SECRET)):
        if secret:
            text = text.replace(secret, "...")
    return "".join(mark if mark.isprintable() else "?" for mark in " ".join(text.split()))[:400]


def beneath(url: str, name: str) -> str:
    """The URL of a file in the folder at a URL; a query stays at the end."""
    folder, mark, query = url.partition("?")
    return f"{folder.rstrip('/')}/{name}{mark}{query}"


def _address(url: str) -> tuple[str, str, str]:
    """User and password, host and path, query."""
    address, _, query = url.partition("://")[2].partition("?")
    host, slash, path = address.partition("/")
    user, _, host = host.rpartition("@")
    return user, host + slash + path, query


def _masked(path: str) -> str:
    if "://" not in path:
        return path
    _, address, query = _address(path)
    values = [
        f"{name}=..." if equals else "..." for name, equals, _ in (part.partition("=") for part in query.split("&"))
    ]
    masked = f"{path.partition('://')[0]}://{address}" + (f"?{'&'.join(values)}" if query else "")
    return masked if masked.isprintable() else ascii(masked)
