"""A strict parser of the headers of plain tar files.

Reads USTAR, PAX and GNU long names. Everything that WebDataset shards do not need is an error with the file's name and
the offset: compression, sparse members, links, devices, a wrong checksum, a member beyond the end of the file, a
missing end-of-archive mark, data after it. In an accepted file every byte has a known meaning. (Python's tarfile ends
silently at a damaged header, so that the samples after it would be lost.)
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vqclip.data.remote.files import Shard
from vqclip.errors import DataError

BLOCK = 512
"""Bytes of a block of a tar."""
_REGULAR = (b"0", b"\0", b"7")
"""Types of regular files."""
_NAMED = (b"x", b"L")
"""Types of extended headers with the name of the next member."""
_MAX_EXTENDED = 1 << 16
"""Bytes of a PAX header or a long name; real ones are a few hundred."""
_MAX_BEFORE = 1 << 20
"""Bytes of all extended headers of a member."""
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f\x7f]")
"""Bytes that are in no text, whether UTF-8 or Latin-1."""
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    begin: int
    """Position of its header, or of the extended header before it."""
    offset: int
    """Position of its first byte."""
    size: int


class TarWalk:
    """Walk over the headers of a tar whose bytes come in blocks.

    Args:
        path: the tar's name, for messages.
        length: size of the tar in bytes.
        first: byte where the first header is.
        end: byte at which the walk ends; before the end of the tar no end-of-archive mark is expected.
    """

    def __init__(self, path: Shard, length: int, first: int = 0, end: int | None = None):
        self._at = first  # byte that is needed next; those before it are done with, or are contents of members
        self._path, self._length, self._end = path, length, length if end is None else end
        self._extended: dict[str, str] = {}
        self._begin = -1
        self._zeros_at = -1
        if length == 0:
            raise DataError(f"{path}: is empty (0 bytes); expected a tar file: copy it again")

    def walk(self, blocks: Iterable[bytes]) -> Iterator[tuple[memoryview, list[Member]]]:
        """Yield all bytes again, each time with the members whose headers begin in them.

        Raises:
            DataError: see the module's docstring.
        """
        offset, rest = self._at, b""
        for block in blocks:
            data = rest + block if rest else block
            members = self._parse(data, offset)
            if 0 <= self._begin < self._at - _MAX_BEFORE:
                raise DataError(f"{self._path}: extended headers of more than {_MAX_BEFORE} bytes at {self._begin}")
            used = min(len(data), (self._at if self._begin < 0 else self._begin) - offset)
            yield memoryview(data)[:used], members
            offset, rest = offset + used, data[used:]
        yield memoryview(rest), []
        self._finish()

    def _parse(self, data: bytes, offset: int) -> list[Member]:
        """Return the members whose headers are complete in some bytes of the tar, which begin at `offset`."""
        if offset == 0 and self._at == 0:
            _refuse_other_formats(self._path, data[:BLOCK])
        found: list[Member] = []
        limit = min(offset + len(data), self._end)
        while self._zeros_at < 0 and self._at + BLOCK <= limit and self._read_header(data, offset, found):
            pass
        if self._zeros_at >= 0 and self._at < offset + len(data):
            if data[self._at - offset :].strip(b"\0"):
                raise DataError(
                    f"{self._path}: zeroed header at offset {self._zeros_at} with data after it; the shard is damaged, "
                    "or several tars in one file (unpack those and write one tar)"
                )
            self._at = offset + len(data)
        return found

    def _finish(self) -> None:
        """Raise DataError if the tar is truncated, or its end-of-archive mark is missing."""
        path, at, end = self._path, self._at, self._end
        if self._zeros_at >= 0 and at >= end:
            return
        if at < end:
            left = end - at
            raise DataError(
                f"{path}: truncated at offset {at}: a tar header has {BLOCK} bytes, {left} are left; copy it again"
            )
        if end == self._length:
            raise DataError(
                f"{path}: ends at offset {end} without the end-of-archive mark, so members may be missing; copy it "
                f"again, or append the mark to a complete one: head -c 1024 /dev/zero >> {path.name}"
            )
        if at > end or self._extended:
            raise DataError(f"{path}: a member crosses byte {end}, where a sample should end")

    def _read_header(self, data: bytes, offset: int, found: list[Member]) -> bool:
        """Read one header; return False if bytes that belong to it are still to come."""
        path, at = self._path, self._at
        header = data[at - offset : at - offset + BLOCK]
        if not header.strip(b"\0"):
            self._zeros_at = at
            return True
        _check_sum(path, header, at)
        kind = header[156:157]
        size = _number(path, header[124:136], at)
        if kind in _REGULAR and "size" in self._extended:
            digits = self._extended["size"]
            if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
                raise DataError(f"{path}: PAX header before offset {at} has no valid size: {digits[:40]!r}")
            size = int(digits)
        start = at + BLOCK
        if start + size > self._length:
            raise DataError(
                f"{path}: truncated: member {_name(header, self._extended)!r} at offset {at} needs {start + size} "
                f"bytes, the file has {self._length}; copy the shard again"
            )
        payload = b""
        if kind in _NAMED:
            if size > _MAX_EXTENDED:
                raise DataError(
                    f"{path}: extended header of {size} bytes at offset {at}; at most {_MAX_EXTENDED} are read"
                )
            payload = data[start - offset : start - offset + size]
            if len(payload) < size:
                return False
        elif kind not in (*_REGULAR, b"5", b"g", b"K"):
            what = {b"S": "a sparse file", b"1": "a hard link", b"2": "a symbolic link"}.get(kind, f"of type {kind!r}")
            raise DataError(
                f"{path}: member {_name(header, self._extended)!r} at offset {at} is {what}; only regular files are "
                "read. Write the shard again, with plain files (tar --hard-dereference --dereference)"
            )
        begin = at if self._begin < 0 else self._begin
        if kind in _NAMED:
            self._extended |= _read_extended(path, kind, payload, at)
            self._begin = begin
        elif kind in _REGULAR or kind == b"5":
            name = _name(header, self._extended)
            if kind != b"5" and not name.endswith("/"):  # a folder in old tars
                found.append(Member(name, begin, start, size))
            self._extended, self._begin = {}, -1
        self._at = start + -(-size // BLOCK) * BLOCK
        return True


def _refuse_other_formats(path: Shard, start: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{path}: is {name}-compressed; shards are read at random places, so unpack it to a plain tar"
                + (", or name it .tar.gz: it is then unpacked in the cache" if name == "gzip" else "")
            )
    if start.startswith(b"version https://git-lfs"):
        raise DataError(f"{path}: is a pointer of Git LFS, not the file itself; fetch it: git lfs pull")
    is_text = not _CONTROL.search(start) or start.startswith((b"\xff\xfe", b"\xfe\xff"))  # UTF-16, as Excel writes it
    if is_text or start.startswith(b"PAR1"):
        kind = "text, such as a csv or tsv table" if is_text else "a Parquet table"
        if start.lstrip()[:15].lower().startswith((b"<html", b"<!doctype html")):
            kind = "a page of HTML, as servers send it in place of a file; download it again"
        raise DataError(
            f"{path}: is {kind}, not a tar; expected a shard: a tar of images, each with a .txt, .json or .cls of the "
            "same name (img2dataset makes shards from a table of URLs)"
        )


def _check_sum(path: Shard, header: bytes, at: int) -> None:
    try:
        stated = int(header[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        stated = -1
    # The checksum itself counts as eight spaces; some old tars add signed bytes. The low half of the Adler-32 of 256
    # bytes is 1 plus their sum.
    halves = header[:148] + b" " * 8 + header[156:256], header[256:]
    plain = (zlib.adler32(halves[0]) & 0xFFFF) + (zlib.adler32(halves[1]) & 0xFFFF) - 2
    if stated != plain and stated != plain - 256 * sum(byte > 127 for half in halves for byte in half):
        raise DataError(
            f"{path}: no valid tar header at offset {at} (wrong checksum); the shard is damaged or not a tar"
        )


def _number(path: Shard, field: bytes, at: int) -> int:
    """Parse an octal number, or a binary one (GNU, for 8 GiB and more)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise DataError(f"{path}: tar header at offset {at} has no valid size: {field!r}")
    return int(digits or b"0", 8)


def _name(header: bytes, extended: dict[str, str]) -> str:
    if "path" in extended:
        return extended["path"]
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _read_extended(path: Shard, kind: bytes, payload: bytes, at: int) -> dict[str, str]:
    """Return `path` and `size` of the next member from a GNU long name or a PAX header."""
    if kind == b"L":
        return {"path": payload.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    records = {}
    payload, begin = payload.rstrip(b"\0"), 0
    while begin < len(payload):
        blank = payload.find(b" ", begin, begin + 8)
        stated = payload[begin:blank] if blank >= 0 else b""
        end = begin + int(stated) if stated.isdigit() else 0
        keyword, equals, value = payload[blank + 1 : max(end - 1, 0)].partition(b"=")
        if not (equals and blank < end <= len(payload)):
            raise DataError(f"{path}: damaged PAX header at offset {at}")
        if keyword.startswith(b"GNU.sparse"):
            raise DataError(f"{path}: sparse member at offset {at}; write the shard again without --sparse")
        if keyword in (b"path", b"size"):
            records[keyword.decode()] = value.decode("utf-8", "surrogateescape")
        begin = end
    return records
