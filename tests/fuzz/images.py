"""The image decoder on crafted headers: what it allocates is bounded by the pixels allowed and the size of the file."""

import functools
import itertools
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image, features

from tests.data import hostile
from tests.data.making import encode, pixels
from tests.fuzz.mutate import mutated
from vqclip.data.decode import decode_image
from vqclip.errors import DataError

_MAX_PIXELS = 10**6
_BOUND = 20 * _MAX_PIXELS + (64 << 20)
"""Bytes; docs/security.md. Four times the size of the file are added."""
_SIZES = (0, 1, 7, 8, 63, 1000, 1001, 4000, 13_300, 16_383, 25_000, 65_500, 65_535)


def seeds() -> list[bytes]:
    """Good images of every kind, of sizes about the limit and far below."""
    exif = Image.Exif()
    exif[0x0112] = 6
    small, alpha = Image.fromarray(pixels(0, 40, 56)), Image.fromarray(pixels(1, 40, 56, channels=4))
    images = []
    for options in ({}, {"exif": exif.tobytes()}):
        images += [encode(small, "JPEG", **options), encode(small, "JPEG", progressive=True, **options)]
        images += [encode(alpha, "PNG", **options), encode(small.quantize(8), "PNG", transparency=1, **options)]
        images += [encode(alpha, "WEBP", **options), encode(alpha, "WEBP", lossless=True, **options)]
        images += [encode(Image.new(mode, (1000, 1000)), kind, **options) for mode, kind in _LARGE]
        images += [encode(small, kind, **options) for kind in _OTHERS]
    return images


_OTHERS = ("GIF", "BMP", "PPM", "TIFF", *(["AVIF"] if features.check("avif") else []))
_LARGE = (("RGB", "BMP"), ("P", "GIF"), ("I;16", "TIFF"), ("CMYK", "JPEG"), ("LA", "PNG"), ("RGBA", "WEBP"))


def case(draw: random.Random, known: list[bytes]) -> bytes:
    """Parts of a good image are doubled, moved, dropped, resized, taken from another one or lied about."""
    data = draw.choice(known)
    if draw.random() < 0.1:
        data = draw.choice(_hostile())
    if not data.startswith((b"\xff\xd8", b"RIFF", b"\x89PNG")):
        return mutated(draw, data, known)
    join, parts = _taken_apart(data)
    others = _taken_apart(draw.choice(known))[1]
    for _ in range(1 << draw.randrange(3)):
        at, to = draw.randrange(len(parts)), draw.randrange(len(parts) + 1)
        parts[to:to] = draw.choice(([parts[at]], [draw.choice(others)], [_resized(draw, parts[0])]))
        at = draw.randrange(len(parts))
        if draw.random() < 0.6:
            parts[at] = _resized(draw, parts[at])
        elif draw.random() < 0.3:
            parts[at] = mutated(draw, parts[at], others)
        elif len(parts) > 2 and draw.random() < 0.3:
            del parts[at]
    result = join(parts)
    if draw.random() < 0.3:  # a fake marker, a stuffed byte, a length that lies
        at = draw.randrange(min(len(result), 800))
        result = result[:at] + draw.choice((b"\xff\0", b"\xff\xc0", b"\xff\xff\xff", b"\xff\xfe\0\0")) + result[at:]
    return result if draw.random() < 0.9 else result[: draw.randrange(len(result))]


@functools.cache
def _hostile() -> list[bytes]:
    sizes = [hostile.two_sizes(kind, side) for kind in ("JPEG", "PNG") for side in (200, 1200, 4000)]
    lies = [hostile.lying_webp(1200), hostile.huge_png(3000), hostile.huge_jpeg(25_000), hostile.scans_jpeg(90, 1000)]
    bombs = [hostile.exif_bomb("PNG", 2000), hostile.exif_bomb("WEBP", 2000), hostile.text_bomb_png()]
    return [*sizes, *lies, *bombs, *(hostile.animated(kind) for kind in ("GIF", "PNG", "WEBP"))]


def check(data: bytes, folder: Path) -> str:
    """Decode; raises anything that is no `DataError`, and AssertionError where it takes more memory than the bound."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _kilobytes("VmRSS")
    try:
        height, width = decode_image(data, _MAX_PIXELS).shape[1:]
        assert height * width <= _MAX_PIXELS
        outcome = "read"
    except DataError:
        outcome = "refused"
    taken = (_kilobytes("VmHWM") - before) << 10
    assert taken <= _BOUND + 4 * len(data), f"{taken} bytes for a file of {len(data)}"
    return outcome


def _kilobytes(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def _taken_apart(data: bytes) -> tuple[Callable[[list[bytes]], bytes], list[bytes]]:
    """What puts parts together again, and segments or chunks; those of PNG and WebP without checksums and lengths."""
    if data.startswith(b"\xff\xd8"):
        ends = [found.start() for found in re.finditer(rb"\xff[\xc0-\xcf\xd9-\xfe]", data)] + [len(data)]
        return (lambda parts: data[:2] + b"".join(parts)), [data[a:b] for a, b in itertools.pairwise(ends)]
    if data.startswith(b"RIFF"):
        parts, at = [], 12
        while at + 8 <= len(data):
            (length,) = struct.unpack_from("<I", data, at + 4)
            parts.append(data[at : at + 4] + data[at + 8 : at + 8 + length])
            at += 8 + length + length % 2
        return _webp, parts
    parts, at = [], 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        parts.append(data[at + 4 : at + 8 + length])
        at += 12 + length
    return _png, parts


def _png(parts: list[bytes]) -> bytes:
    whole = (struct.pack(">I", max(len(part) - 4, 0)) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def _webp(parts: list[bytes]) -> bytes:
    chunks = (part[:4] + struct.pack("<I", max(len(part) - 4, 0)) + part[4:] + bytes(len(part) % 2) for part in parts)
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _resized(draw: random.Random, part: bytes) -> bytes:
    """A header with another width or height, wherever its kind has them; other parts stay."""
    size, second = draw.choice(_SIZES), draw.choice(_SIZES)
    result = bytearray(part + bytes(16))
    if part[:4] == b"IHDR":
        struct.pack_into(">II", result, 4, size, second)
    elif part[:4] == b"fcTL":
        struct.pack_into(">IIII", result, 8, size, second, draw.choice(_SIZES), draw.choice(_SIZES))
    elif part[:4] == b"VP8X":
        result[8:14] = size.to_bytes(3, "little") + second.to_bytes(3, "little")
    elif part[:4] == b"VP8 ":
        struct.pack_into("<HH", result, 10, size, second)
    elif part[:4] == b"VP8L":
        struct.pack_into("<I", result, 5, (size & 0x3FFF) | (second & 0x3FFF) << 14)
    elif re.match(rb"\xff[\xc0-\xcf]", part):
        struct.pack_into(">HH", result, 5, size, second)
    return bytes(result[: len(part)])
