"""URLs of shards: which ones are read, and how they are named without the credentials in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, unquote, unquote_plus

from vqclip.errors import DataError

T = TypeVar("T")

__all__ = [
    "PROTOCOLS",
    "beneath",
    "digest",
    "display_url",
    "file_name",
    "local_path",
    "mask_credentials",
    "protocol_of",
    "redact_message",
]

PROTOCOLS = ("file", "http", "https", "s3", "gs")
"""All that is read. Others of fsspec's open archives, run commands or reach other machines."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_PROTOCOL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*:/|(?:https?|s3|gs|ftp):)/+)(.*)", re.DOTALL | re.IGNORECASE)
"""With one slash it is what a `Path` makes of a URL."""
_ANY_URL = re.compile(
    r"""(?:[a-z][a-z0-9+.-]{0,31}:/|(?:https?|s3|gs|ftp):)/+[^\s'"<>]*(?:['"<>][\w%&=@?/#.~+-][^\s'"<>]*)*""",
    re.IGNORECASE,
)
"""A URL somewhere in a text. A quote or an angle bracket ends it unless it goes on at once, as a password may: rather
too much is left out than too little. The length of a protocol is bounded, or a long word would take quadratic time."""
_ENDS = ",:;)]"
"""Marks of the text around a URL, not of the URL, where they are its last."""
_TAIL = re.compile(r"([?#]|%(?:25)*(?:3f|23))", re.IGNORECASE)
_AT = re.compile(r"@|%(?:25)*40", re.IGNORECASE)
_COLON = re.compile(r":|%(?:25)*3a", re.IGNORECASE)
_PORT = re.compile(r"^[^\[{]*(?::|%(?:25)*3a)(?!\d*$)", re.IGNORECASE)
"""A host with a port that is none."""
_BETWEEN = re.compile(r"[&;#]|%(?:25)*(?:26|3b|23)", re.IGNORECASE)
_EQUALS = re.compile(r"=|%(?:25)*3d", re.IGNORECASE)
_NAME = re.compile(r"[\w.-]{1,64}")
_IPV6 = re.compile(r"(?<=[/@])\[[0-9A-Fa-f:.]+\]")
_SHOWN_DIGITS = 12
_SECRET = 6
"""Shorter values of a query are no secrets, nor is a shorter name beside a password."""


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
    if protocol in ("http", "https") and any(mark in path for mark in " \\'\"<>"):
        raise DataError(
            f"{_masked(path)}: a URL has no blank, backslash, quote or angle bracket; write %20, %5C, %27, %22, %3C "
            "or %3E"
        )
    if protocol in ("s3", "gs") and any(mark in path for mark in " '\"<>"):
        raise DataError(f"{_masked(path)}: no object with a blank, quote or angle bracket is read; rename it")
    if protocol != "file" and not re.split("[/?#]", path.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]:
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


def display_url(path: str) -> str:
    """A URL for messages: `mask_credentials`, but still one of its own.

    ``https://me:pw@host/a.tar?sig=x`` → ``https://host/a.tar?sig=... [0c9a9a0f3a6b]``: the beginning of `digest`, with
    which the file's name in the cache begins too. A local path is shown as it is.
    """
    hidden = _masked(path)
    return hidden if hidden == path else f"{hidden} [{digest(path)[:_SHOWN_DIGITS]}]"


def mask_credentials(value: T) -> T:
    """The same without credentials in any URL: what may stand in files, logs and messages.

    User, password, fragment and the values of the query are left out, also where their marks are percent-encoded.

    Args:
        value: text, which may be more than a URL, or lists and mappings of it; all else is left alone.
    """
    result: Any = value
    if isinstance(value, str):
        is_one = _PROTOCOL.fullmatch(value) and not any(mark.isspace() for mark in value)
        result = _masked(value) if is_one else _ANY_URL.sub(_masked_match, value)
    elif isinstance(value, (list, tuple)):
        result = [mask_credentials(each) for each in value]
    elif isinstance(value, Mapping):
        result = {name: mask_credentials(each) for name, each in value.items()}
    return result


def redact_message(text: str, url: str) -> str:
    """Somebody else's message about a URL, with no credentials of this URL or any other in it."""
    text = mask_credentials(text.replace(url, _masked(url)))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        # A short one is part of many words, which would give it away.
        text = re.sub(
            re.escape(secret) if len(secret) >= _SECRET else rf"(?<!\w){re.escape(secret)}(?!\w)", "...", text
        )
    return "".join(mark if mark.isprintable() else "?" for mark in " ".join(text.split()))[:400]


def beneath(url: str, name: str) -> str:
    """The URL of a file in the folder at a URL; query and fragment stay at the end."""
    end = _end_of_path(url)
    return f"{url[:end].rstrip('/')}/{name}{url[end:]}"


def file_name(url: str) -> str:
    """The last part of the path, for messages."""
    hidden = _masked(url)
    return hidden[: _end_of_path(hidden)].rpartition("/")[2]


def _end_of_path(url: str) -> int:
    return min(end for end in (url.find("?"), url.find("#"), len(url)) if end >= 0)


def _split(url: str) -> tuple[str, str, str, str, str]:
    """Protocol with its slashes, user and password, host and path, the mark after them, and what follows it.

    Marks count in their percent-encoded forms too. What cannot be told from a password is taken for one.
    """
    protocol, rest = _PROTOCOL.fullmatch(url).groups()  # type: ignore[union-attr]
    address, mark, tail = (*_TAIL.split(rest, maxsplit=1), "", "")[:3]
    *before, after = _AT.split(address)
    user = address[: len(address) - len(after)] if before else ""
    if user and "/" in user:
        user, address = (user, f"...{after}") if _COLON.search(user) else ("", address)
    else:
        address = after
    if _PORT.search(address.partition("/")[0]) or (mark and "/" not in address):  # a password with a mark in it
        user, address = f"{user}{address}", "..."
    return protocol, user, address, mark, tail


def _masked(path: str) -> str:
    if not _PROTOCOL.fullmatch(path):
        return path
    protocol, _, address, mark, tail = _split(path)
    query, has_fragment, _ = tail.partition("#")
    if "#" in mark or mark.endswith("23"):
        tail = "..."
    elif mark:
        tail = "&".join(_masked_part(part) for part in re.split("[&;]", query)) + ("#..." if has_fragment else "")
    hidden = f"{protocol}{address}{mark}{tail}"
    return hidden if hidden.isprintable() else ascii(hidden)


def _masked_match(match: re.Match[str]) -> str:
    url = match[0].rstrip(_ENDS)
    return _masked(url) + match[0][len(url) :]


def _masked_part(part: str) -> str:
    name, _, value = part.partition("=")
    return f"{name}=..." if value.strip("=") and _NAME.fullmatch(name) else "..."


def _secrets(url: str) -> set[str]:
    """What of a URL must not be seen, in all its forms."""
    _, user, _, _, tail = _split(url)
    user = _AT.sub("@", user).rstrip("@")
    name, *password = _COLON.split(user, maxsplit=1)
    values = [_EQUALS.split(part, maxsplit=1)[-1] for part in _BETWEEN.split(tail)]
    others = [name, *values] if password else values
    found = {tail, user, *(password or [name]), *(each for each in others if len(each) >= _SECRET)} - {""}
    # Whoever tells of them may have decoded them, or encoded them anew.
    forms = (
        str,
        unquote,
        lambda each: unquote(unquote(each)),
        unquote_plus,
        _encoded,
        lambda each: _encoded(unquote(each)),
    )
    return {form(each) for each in found for form in forms}


def _encoded(text: str) -> str:
    return quote(text, safe="")
