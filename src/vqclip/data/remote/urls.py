"""URLs of shards: which are allowed, and how they appear in messages without their credentials."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, unquote, unquote_plus

from vqclip.errors import DataError

T = TypeVar("T")

PROTOCOLS = ("file", "http", "https", "s3", "gs", "az", "hf")
"""Allowed protocols. Others of fsspec open archives, run commands or reach other machines."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_PROTOCOL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*:/|(?:https?|s3|gs|az|hf|ftp):)/+)(.*)", re.DOTALL | re.IGNORECASE)
"""A protocol and the rest. `Path` turns the two slashes of a URL into one."""
_ANY_URL = re.compile(
    r"""(?:[a-z][a-z0-9+.-]{0,31}:/|(?:https?|s3|gs|az|hf|ftp):)/+[^\s'"<>]*(?:['"<>][\w%&=@?/#.~+-][^\s'"<>]*)*""",
    re.IGNORECASE,
)
"""A URL in a text. A quote or an angle bracket ends it unless text follows at once, as in a password: it is better to
hide too much than too little. The length of a protocol is bounded; otherwise a long word would take quadratic time."""
_ENDS = ",:;)]"
"""Punctuation that does not belong to a URL when it is at its end."""
_TAIL = re.compile(r"([?#]|%(?:25)*(?:3f|23))", re.IGNORECASE)
_AT = re.compile(r"@|%(?:25)*40", re.IGNORECASE)
_COLON = re.compile(r":|%(?:25)*3a", re.IGNORECASE)
_PORT = re.compile(r"^[^\[{]*(?::|%(?:25)*3a)(?!\d*$)", re.IGNORECASE)
"""A host with an invalid port."""
_BETWEEN = re.compile(r"[&;#]|%(?:25)*(?:26|3b|23)", re.IGNORECASE)
_EQUALS = re.compile(r"=|%(?:25)*3d", re.IGNORECASE)
_PLAIN = re.compile(r"([a-z][a-z0-9]*)://[\w.-]+(:\d+)?(/[\w./{}+,-]*)?", re.ASCII)
"""A URL without anything to hide, as most are; there may be 100,000 of them."""
_IPV6 = re.compile(r"(?<=[/@])\[[0-9A-Fa-f:.]+\]")
_SHOWN_DIGITS = 12
_SECRET = 6
"""Shortest value of a query, and shortest user name beside a password, that counts as a secret."""


def protocol_of(path: str) -> str | None:
    """Return the protocol of a URL in lower case; None for a local path.

    Raises:
        DataError: another protocol, a command, a chain of protocols, or a missing host or bucket.
    """
    if (plain := _PLAIN.fullmatch(path)) and plain[1] in PROTOCOLS:
        return plain[1]
    if path.lower().startswith("pipe:"):
        raise DataError(f"pipe:...: commands are not run; {_EXPECTED}")
    match = _SCHEME.match(path)
    if match is None:
        if "://" in path:  # such as zip::https://..., also spelt with braces
            raise DataError(f"{_mask(path)}: chains of protocols and URLs inside paths are not read; {_EXPECTED}")
        return None
    protocol = match[1].lower()
    if "::" in _IPV6.sub("", path):
        raise DataError(f"{_mask(path)}: chains of protocols (::) are not read; {_EXPECTED}")
    if protocol not in PROTOCOLS:
        raise DataError(f"{_mask(path)}: protocol {protocol} is not read; {_EXPECTED}")
    if not path.isprintable():
        raise DataError(f"{_mask(path)}: a URL with control characters is not read")
    is_web = protocol in ("http", "https")
    if protocol != "file" and any(mark in path for mark in (" \\'\"<>" if is_web else " '\"<>")):
        remedy = "write %20, %5C, %27, %22, %3C or %3E" if is_web else "rename it"
        raise DataError(f"{_mask(path)}: a name with a blank, backslash, quote or angle bracket is not read; {remedy}")
    if protocol != "file" and not re.split("[/?#]", path.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]:
        raise DataError(f"{_mask(path)}: names no {'host' if is_web else 'bucket'}")
    return protocol


_EXPECTED = f"expected a local path or a URL of one of {', '.join(PROTOCOLS)}"


def local_path(path: str) -> str | None:
    """Return a local path, also that in ``file:///path``; None for other URLs.

    Raises:
        DataError: see `protocol_of`; or it names another machine.
    """
    protocol, url = protocol_of(path), path
    if protocol != "file":
        return path if protocol is None else None
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise DataError(f"{_mask(url)}: names the host {host!r}; expected file:///path, which is on this machine")
    return unquote(f"/{path}")


def digest(url: str) -> str:
    """Return the SHA-256 of the full URL, query included."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()


def display_url(path: str) -> str:
    """Return a URL without credentials, followed by the first digits of its `digest` if anything was hidden.

    ``https://me:pw@host/a.tar?sig=x`` → ``https://host/a.tar?... [0c9a9a0f3a6b]``. A local path is returned
    unchanged.
    """
    hidden = _mask(path)
    return hidden if hidden == path else f"{hidden} [{digest(path)[:_SHOWN_DIGITS]}]"


def mask_credentials(value: T) -> T:
    """Hide the credentials of all URLs in a value, so that it may appear in files, logs and messages.

    User, password, query and fragment are hidden, also when their delimiters are percent-encoded.

    Args:
        value: a text, which may contain more than a URL, or lists and mappings of texts; other values are unchanged.
    """
    result: Any = value
    if isinstance(value, str):
        is_one = _PROTOCOL.fullmatch(value) and not any(mark.isspace() for mark in value)
        result = _mask(value) if is_one else _ANY_URL.sub(_mask_match, value)
    elif isinstance(value, (list, tuple)):
        result = [mask_credentials(each) for each in value]
    elif isinstance(value, Mapping):
        result = {name: mask_credentials(each) for name, each in value.items()}
    return result


def redact_message(text: str, url: str) -> str:
    """Hide the credentials of a URL, and of every other URL, in a message from another library."""
    text = mask_credentials(text.replace(url, _mask(url)))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        # Short secrets are replaced as whole words only; gaps inside of other words would reveal them.
        text = re.sub(
            re.escape(secret) if len(secret) >= _SECRET else rf"(?<!\w){re.escape(secret)}(?!\w)", "...", text
        )
    return "".join(mark if mark.isprintable() else "?" for mark in " ".join(text.split()))[:400]


def beneath(url: str, name: str) -> str:
    """Return the URL of a file in the folder at a URL; query and fragment stay at the end."""
    path, query = split_query(url)
    return f"{path.rstrip('/')}/{name}{query}"


def path_in_url(url: str) -> str:
    """Return protocol, host and path of a URL, without credentials and query."""
    if _PLAIN.fullmatch(url):
        return url
    return split_query(_mask(url))[0]


def split_query(url: str) -> tuple[str, str]:
    """Return a URL up to its path, and its query and fragment with their delimiter."""
    path = url.partition("?")[0].partition("#")[0]
    return path, url[len(path) :]


def _split(url: str) -> tuple[str, str, str, str, str]:
    """Split into protocol with its slashes, user and password, host and path, the delimiter after them, and the rest.

    Percent-encoded delimiters count too. In doubt a part is treated as a password.
    """
    protocol, rest = _PROTOCOL.fullmatch(url).groups()  # type: ignore[union-attr]
    address, mark, tail = (*_TAIL.split(rest, maxsplit=1), "", "")[:3]
    *before, after = _AT.split(address)
    user = address[: len(address) - len(after)] if before else ""
    if user and "/" in user:
        user, address = (user, f"...{after}") if _COLON.search(user) else ("", address)
    else:
        address = after
    if _PORT.search(address.partition("/")[0]) or (mark and "/" not in address):  # a password that contains a delimiter
        user, address = f"{user}{address}", "..."
    return protocol, user, address, mark, tail


def _mask(path: str) -> str:
    if _PLAIN.fullmatch(path):
        return path
    if not _PROTOCOL.fullmatch(path):
        return path
    protocol, _, address, mark, _ = _split(path)
    hidden = f"{protocol}{address}{mark}{'...' if mark else ''}"
    return hidden if hidden.isprintable() else ascii(hidden)


def _mask_match(match: re.Match[str]) -> str:
    url = match[0].rstrip(_ENDS)
    return _mask(url) + match[0][len(url) :]


def _secrets(url: str) -> set[str]:
    """Return the secret parts of a URL, in all their encodings."""
    _, user, _, _, tail = _split(url)
    user = _AT.sub("@", user).rstrip("@")
    name, *password = _COLON.split(user, maxsplit=1)
    values = [_EQUALS.split(part, maxsplit=1)[-1] for part in _BETWEEN.split(tail)]
    others = [name, *values] if password else values
    found = {tail, user, *(password or [name]), *(each for each in others if len(each) >= _SECRET)} - {""}
    # Libraries may decode or encode them before they print them.
    forms = (
        str,
        unquote,
        lambda each: unquote(unquote(each)),
        unquote_plus,
        _encode,
        lambda each: _encode(unquote(each)),
    )
    return {form(each) for each in found for form in forms}


def _encode(text: str) -> str:
    return quote(text, safe="")
