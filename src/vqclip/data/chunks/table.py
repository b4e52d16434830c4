"""Tables of the samples of a chunk, so that one read finds the members of any of them.

    rows   64 bytes a sample: offset, size and CRC-32 of its image, .txt, .json, .cls and name; CRC-32 of the row
    names  of the samples
    bytes  of the chunk, where the chunk is from a URL

Offsets of names count from the start of the table; those of members too where the bytes follow, otherwise from the
start of the chunk. The checksum of a row covers the digest of the chunk and the number of the row: a damaged table, or
that of another chunk, gives no sample.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from vqclip.data.members import KINDS, SampleTable

__all__ = ["ROW", "Extent", "Row", "make_table", "parse_row"]

_COLUMNS = (*KINDS, "key")
_FORMAT = f"<{3 * len(_COLUMNS)}I"
ROW = struct.calcsize(_FORMAT) + 4
"""Bytes of a row."""
_MAX_NAME = 1 << 20
"""Bytes of the name of a sample at most; `vqclip.data.tar` reads fewer."""
_NONE = 2**32 - 1
"""Offset of a member that the sample lacks."""


class Extent(NamedTuple):
    """Place of some bytes, and their checksum."""

    offset: int
    size: int
    crc: int


class Row(NamedTuple):
    """Members and name of a sample; None for members that it lacks."""

    image: Extent | None
    txt: Extent | None
    json: Extent | None
    cls: Extent | None
    key: Extent


def make_table(digest: bytes, samples: SampleTable, data: bytes, with_data: bool) -> bytes:
    """Return the table of a chunk.

    Args:
        digest: of the chunk.
        samples: its samples, with offsets in ``data``.
        data: bytes of the chunk, less than 4 GiB with the table.
        with_data: append the bytes of the chunk.
    """
    view, count, names = memoryview(data), len(samples.key_ends), memoryview(samples.keys)
    name_at, data_at = count * ROW, count * ROW + len(names)
    rows = bytearray()
    start = 0
    for number, end in enumerate(samples.key_ends.tolist()):
        fields: list[int] = []
        for offset, size in zip(samples.offsets[number].tolist(), samples.sizes[number].tolist(), strict=True):
            crc = zlib.crc32(view[offset : offset + size]) if offset >= 0 else 0
            fields += [offset + data_at * with_data, size, crc] if offset >= 0 else [_NONE, 0, 0]
        body = struct.pack(_FORMAT, *fields, name_at + start, end - start, zlib.crc32(names[start:end]))
        rows += body + _checksum(digest, number, body).to_bytes(4, "little")
        start = end
    return b"".join([rows, names, data if with_data else b""])


def parse_row(digest: bytes, number: int, body: bytes) -> Row | None:
    """Return a row of the table of the chunk with this digest; None if it is damaged."""
    body, checksum = body[:-4], body[-4:]
    if len(body) != struct.calcsize(_FORMAT) or checksum != _checksum(digest, number, body).to_bytes(4, "little"):
        return None
    extents = [Extent(*each) for each in struct.iter_unpack("<3I", body)]
    if extents[-1].size > _MAX_NAME:
        return None
    return Row(*(None if each.offset == _NONE else each for each in extents))  # type: ignore[arg-type]


def _checksum(digest: bytes, number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(digest + number.to_bytes(4, "little")))
