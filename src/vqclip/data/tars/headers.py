"""A strict parser of the headers of plain tar files.

Reads USTAR, PAX and GNU long names. Everything that WebDataset shards do not need is an error with the file's name and
the offset: compression, sparse members, links, devices, a wrong checksum, a member beyond the end of the file, a
missing end-of-archive mark, data after it. In an accepted file every byte has a known meaning. (Python's tarfile ends
silently at a damaged header, so that the samples after it would be lost.)
"""

from __future__ import annotations

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
_OF_NEXT = (b"g", b"K")
"""Types of other extended headers, which are not read: of all members, and the name of a link."""
_NOT_READ = (*_OF_NEXT, b"5")
"""Types that are not read; 5 is a folder."""
_MAX_EXTENDED = 1 << 16
"""Bytes of a PAX header or a long name; real ones are a few hundred."""
_MAX_BEFORE = 1 << 20
"""Bytes of all extended headers of a member."""


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    begin: int
    """Position of its header, or of the extended header before it."""
    offset: int
    """Position of its first byte."""
    size: int


class _Bytes:
    """The bytes of a file, which come in blocks; those that were not consumed yet are kept."""

    def __init__(self, blocks: Iterable[bytes], at: int):
        self.at = at
        """Place of the next byte to consume."""
        self._blocks, self._data = iter(blocks), memoryview(b"")

    def read(self, first: int, size: int) -> bytes:
        """Return bytes that were not consumed yet, which stay there; fewer if the file ends."""
        missing = first + size - self.at - len(self._data)
        while missing > 0 and (block := next(self._blocks, None)) is not None:
            self._data = memoryview(b"".join([self._data, block]))
            missing -= len(block)
        return bytes(self._data[first - self.at : first - self.at + size])

    def consume(self, end: int) -> memoryview:
        """Return the next bytes, up to a place, as many as there are at hand; none if the file ends."""
        while not self._data and (block := next(self._blocks, None)) is not None:
            self._data = memoryview(block)
        data, self._data = self._data[: end - self.at], self._data[end - self.at :]
        self.at += len(data)
        return data


def walk_tar(
    path: Shard, blocks: Iterable[bytes], length: int, first: int = 0, end: int | None = None
) -> Iterator[tuple[Member | None, memoryview]]:
    """Yield all bytes of a tar again, each time with the member that begins with them, if one does.

    Args:
        path: the tar's name, for messages.
        blocks: its bytes from `first` to `end`.
        length: size of the tar in bytes.
        first: byte where the first header is.
        end: byte at which the walk ends; before the end of the tar no end-of-archive mark is expected.

    Raises:
        DataError: see the module's docstring.
    """
    if length == 0:
        raise DataError(f"{path}: is empty (0 bytes); expected a tar file: copy it again")
    file, at, end, extended = _Bytes(blocks, first), first, length if end is None else end, dict[str, str]()
    if first == 0:
        _require_tar(path, file.read(0, BLOCK))
    is_at_mark = False
    while at + BLOCK <= end and len(header := file.read(at, BLOCK)) == BLOCK:
        if is_at_mark := not header.strip(b"\0"):
            break
        if not _has_checksum(header):
            raise DataError(f"{path}: no valid tar header at offset {at} (wrong checksum); the shard is damaged")
        kind, size, start = header[156:157], _number(path, header[124:136], at), at + BLOCK
        if kind in _REGULAR and "size" in extended:
            size = _extended_size(path, extended["size"], at)
        if start + size > length:
            raise DataError(
                f"{path}: truncated: member {_name(header, extended)!r} at offset {at} needs {start + size} "
                f"bytes, the file has {length}; copy the shard again"
            )
        if kind in _NAMED:
            if size > _MAX_EXTENDED:
                raise DataError(
                    f"{path}: extended header of {size} bytes at offset {at}; at most {_MAX_EXTENDED} are read"
                )
            if len(payload := file.read(start, size)) < size:
                break
            extended |= _read_extended(path, kind, payload, at)
        elif kind not in (*_REGULAR, *_NOT_READ):
            what = {b"S": "a sparse file", b"1": "a hard link", b"2": "a symbolic link"}.get(kind, f"of type {kind!r}")
            raise DataError(
                f"{path}: member {_name(header, extended)!r} at offset {at} is {what}; only regular files are "
                "read. Write the shard again, with plain files (tar --hard-dereference --dereference)"
            )
        is_extended, at = at > file.at, start + -(-size // BLOCK) * BLOCK
        if kind in _NAMED or (kind in _OF_NEXT and is_extended):  # they belong to the next member
            if at - file.at > _MAX_BEFORE:
                raise DataError(f"{path}: extended headers of more than {_MAX_BEFORE} bytes at {file.at}")
            continue
        member = None
        if kind in _REGULAR and not (name := _name(header, extended)).endswith("/"):  # a folder in old tars
            member = Member(name, file.at, start, size)
        extended = {}
        while file.at < at and (data := file.consume(at)):
            yield member, data
            member = None
    if is_at_mark:
        mark = at
        if file.at < mark:
            yield None, file.consume(mark)
        while data := file.consume(end):
            if bytes(data).strip(b"\0"):
                raise DataError(
                    f"{path}: zeroed header at offset {mark} with data after it; the shard is damaged, or several "
                    "tars in one file (unpack those and write one tar)"
                )
            yield None, data
        at = file.at
    if at < end:
        raise DataError(
            f"{path}: truncated at offset {at}: a tar header has {BLOCK} bytes, {end - at} are left; copy it again"
        )
    if end == length and not is_at_mark:
        raise DataError(
            f"{path}: ends at offset {end} without the end-of-archive mark, so members may be missing; copy it "
            f"again, or append the mark to a complete one: head -c 1024 /dev/zero >> {path.name}"
        )
    if at > end or file.at < at:
        raise DataError(f"{path}: a member crosses byte {end}, where a sample should end")


def _require_tar(path: Shard, start: bytes) -> None:
    """Check the first block of a file; there are no others before it that could be damaged."""
    if len(start) < BLOCK or (start.strip(b"\0") and not _has_checksum(start)):
        raise DataError(
            f"{path}: no valid tar header at offset 0, but {start[:16]!r}; expected a shard: a plain tar of images, "
            "each with a .txt, .json or .cls of the same name. Unpack a compressed tar, or name it .tar.gz; "
            "download again what is a page of HTML, or a pointer of Git LFS (git lfs pull); img2dataset makes shards "
            "from a table of URLs"
        )


def _has_checksum(header: bytes) -> bool:
    """Return whether the checksum in a header is that of its bytes."""
    try:
        stated = int(header[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    # The checksum itself counts as eight spaces; some old tars add signed bytes. The low half of the Adler-32 of 256
    # bytes is 1 plus their sum.
    halves = header[:148] + b" " * 8 + header[156:256], header[256:]
    plain = (zlib.adler32(halves[0]) & 0xFFFF) + (zlib.adler32(halves[1]) & 0xFFFF) - 2
    return stated == plain or stated == plain - 256 * sum(byte > 127 for half in halves for byte in half)


def _number(path: Shard, field: bytes, at: int) -> int:
    """Parse an octal number, or a binary one (GNU, for 8 GiB and more)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise DataError(f"{path}: tar header at offset {at} has no valid size: {field!r}")
    return int(digits or b"0", 8)


def _extended_size(path: Shard, digits: str, at: int) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise DataError(f"{path}: PAX header before offset {at} has no valid size: {digits[:40]!r}")
    return int(digits)


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
