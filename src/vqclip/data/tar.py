"""A strict parser of the headers of plain tar files.

Reads USTAR, PAX and GNU long names. Everything that WebDataset shards do not need is an error with the file's name and
the offset: compression, sparse members, links, devices, a wrong checksum, a member beyond the end of the file, a
missing end-of-archive mark, data after it. In an accepted file every byte has a known meaning. (Python's tarfile ends
silently at a damaged header, so that the samples after it would be lost.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vqclip.data.shard import Shard
from vqclip.errors import DataError

__all__ = ["Member", "TarWalk", "walk"]

_BLOCK = 512
_READ = 1 << 20
"""Bytes read at a time; more than an extended header has."""
_REGULAR = (b"0", b"\0", b"7")
"""Types of regular files."""
_MAX_EXTENDED = 1 << 16
"""Bytes of a PAX header or a long name; real ones are a few hundred."""
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


def walk(path: Shard, file: int, length: int) -> Iterator[Member]:
    """Yield the regular files of a tar in order; folders are skipped.

    Args:
        path: the tar's name, for messages.
        file: descriptor of the open tar; its position is not used.
        length: size of the tar in bytes.

    Raises:
        DataError: see the module's docstring.
    """
    tar, before = TarWalk(path, length), -1
    while before < tar.at < length:  # it stops at a header that is cut off
        before = tar.at
        yield from tar.feed(os.pread(file, _READ, before), before)
    tar.finish()


class TarWalk:
    """Walk over the headers of a tar whose bytes come in blocks.

    Args:
        path: the tar's name, for messages.
        length: size of the tar in bytes.
        first: byte where the first header is.
        end: byte at which the walk ends; before the end of the tar no end-of-archive mark is expected.
    """

    def __init__(self, path: Shard, length: int, first: int = 0, end: int | None = None):
        self.at = first
        """Byte that is needed next: bytes before it are done with, or are contents of members."""
        self._path, self._length, self._end = path, length, length if end is None else end
        self._extended: dict[str, str] = {}
        self._begin = -1
        self._zeros_at = -1
        if length == 0:
            raise DataError(f"{path}: is empty (0 bytes); expected a tar file")

    def walk(self, blocks: Iterable[bytes]) -> Iterator[tuple[memoryview, list[Member]]]:
        """Yield all bytes again, each time with the members whose headers begin in them; then `finish`.

        Raises:
            DataError: see the module's docstring.
        """
        offset, rest = self.at, b""
        for block in blocks:
            data = rest + block if rest else block
            members = self.feed(data, offset)
            used = min(len(data), self.at - offset)
            yield memoryview(data)[:used], members
            offset, rest = offset + used, data[used:]
        yield memoryview(rest), []
        self.finish()

    def feed(self, data: bytes, offset: int) -> list[Member]:
        """Return the members whose headers are complete in some bytes of the tar.

        Args:
            data: bytes of the tar; the byte `at` is among them, or after them.
            offset: position of the first of them.

        Raises:
            DataError: see the module's docstring.
        """
        if offset == 0 and self.at == 0:
            _refuse_other_formats(self._path, data[:_BLOCK])
        found: list[Member] = []
        while self._zeros_at < 0 and self.at + _BLOCK <= min(offset + len(data), self._end):
            if not self._step(data, offset, found):
                break
        if self._zeros_at >= 0 and self.at < offset + len(data):
            if data[self.at - offset :].strip(b"\0"):
                raise DataError(
                    f"{self._path}: zeroed header at offset {self._zeros_at} with data after it; the shard is damaged, "
                    "or several tars in one file (unpack those and write one tar)"
                )
            self.at = offset + len(data)
        return found

    def finish(self) -> None:
        """Require that the tar ends as it should.

        Raises:
            DataError: it is truncated, or the end-of-archive mark is missing.
        """
        path, at, end = self._path, self.at, self._end
        if self._zeros_at >= 0 and at >= end:
            return
        if at < end:
            left = end - at
            raise DataError(f"{path}: truncated at offset {at}: a tar header has {_BLOCK} bytes, {left} are left")
        if end == self._length:
            raise DataError(
                f"{path}: ends at offset {end} without the end-of-archive mark, so members may be missing; copy the "
                "shard again, or, if it is known to be complete, append the mark: head -c 1024 /dev/zero >> "
                f"{path.name}"
            )
        if at > end or self._extended:
            raise DataError(f"{path}: a member crosses byte {end}, where a sample should end")

    def _step(self, data: bytes, offset: int, found: list[Member]) -> bool:
        """Read one header; return False if bytes that belong to it are still to come."""
        path, at = self._path, self.at
        header = data[at - offset : at - offset + _BLOCK]
        if not header.strip(b"\0"):
            self._zeros_at = at
            return True
        _check_sum(path, header, at)
        kind = header[156:157]
        size = _number(path, header[124:136], at)
        if kind in _REGULAR and "size" in self._extended:
            size = _decimal(path, self._extended["size"], at)
        start = at + _BLOCK
        if start + size > self._length:
            raise DataError(
                f"{path}: truncated: member {_name(header, self._extended)!r} at offset {at} needs {start + size} "
                f"bytes, the file has {self._length}; copy the shard again"
            )
        if kind in (b"x", b"L"):
            if size > _MAX_EXTENDED:
                raise DataError(
                    f"{path}: extended header of {size} bytes at offset {at}; at most {_MAX_EXTENDED} are read"
                )
            payload = data[start - offset : start - offset + size]
            if len(payload) < size:
                return False
            self._extended |= _read_extended(path, kind, payload, at)
            self._begin = at if self._begin < 0 else self._begin
        elif kind in _REGULAR:
            name = _name(header, self._extended)
            if not name.endswith("/"):  # a folder in old tars
                found.append(Member(name, at if self._begin < 0 else self._begin, start, size))
            self._forget()
        elif kind == b"5":
            self._forget()
        elif kind not in (b"g", b"K"):
            what = {b"S": "a sparse file", b"1": "a hard link", b"2": "a symbolic link"}.get(kind, f"of type {kind!r}")
            raise DataError(
                f"{path}: member {_name(header, self._extended)!r} at offset {at} is {what}; only regular files are "
                "read. Write the shard again, with plain files (tar --hard-dereference --dereference)"
            )
        self.at = start + -(-size // _BLOCK) * _BLOCK
        return True

    def _forget(self) -> None:
        self._extended, self._begin = {}, -1


def _refuse_other_formats(path: Shard, start: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{path}: is {name}-compressed; shards are read at random places, so unpack it to a plain tar"
                + (", or name it .tar.gz: it is then unpacked in the cache" if name == "gzip" else "")
            )
    is_text = not _CONTROL.search(start) or start.startswith((b"\xff\xfe", b"\xfe\xff"))  # UTF-16, as Excel writes it
    if is_text or start.startswith(b"PAR1"):
        kind = "text, such as a csv or tsv table" if is_text else "a Parquet table"
        raise DataError(
            f"{path}: is {kind}, not a tar; expected a shard: a tar of images, each with a .txt, .json or .cls of the "
            "same name (img2dataset makes shards from a table of URLs)"
        )


def _check_sum(path: Shard, header: bytes, at: int) -> None:
    try:
        stated = int(header[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        stated = -1
    # The checksum itself counts as eight spaces; some old tars add signed bytes.
    rest = header[:148] + b" " * 8 + header[156:]
    plain = sum(rest)
    if stated not in (plain, plain - 256 * sum(byte > 127 for byte in rest)):
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


def _decimal(path: Shard, text: str, at: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise DataError(f"{path}: PAX header before offset {at} has no valid size: {text[:40]!r}")
    return int(text)


def _name(header: bytes, extended: dict[str, str]) -> str:
    if "path" in extended:
        return extended["path"]
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "replace")


def _read_extended(path: Shard, kind: bytes, payload: bytes, at: int) -> dict[str, str]:
    """Return `path` and `size` of the next member from a GNU long name or a PAX header."""
    if kind == b"L":
        return {"path": payload.partition(b"\0")[0].decode("utf-8", "replace")}
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
            records[keyword.decode()] = value.decode("utf-8", "replace")
        begin = end
    return records
