"""Image bytes to a uint8 RGB tensor, for files that nobody checked.

The format is told by the first bytes, never by the name, and the size is read from the header before a pixel is
decoded. JPEG and WebP go through torchvision (twice Pillow's speed). PNG goes through Pillow: torchvision's PNG decoder
(0.29 with its bundled libpng) ends the whole process with a segmentation fault on about a third of damaged files.

Transparency is composited on white, grey becomes RGB, 16 bits become 8, the EXIF orientation is applied.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vqclip.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_PIXELS", "MAX_SCANS", "decode_image", "image_header", "pil_to_uint8"]

MAX_PIXELS = 50_000_000
"""Larger images are refused before decoding: they would take 150 MB as RGB."""

MAX_SCANS = 100
"""JPEGs of more scans are refused: one of some bytes costs a pass over the whole image. Usual are 10, and some dozens
where an optimiser was at work."""

_RGB_MODE = "RGB"
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")
"""A marker with a payload, or the end; among the pixels of a scan none of these occurs but as such."""
_SOURCE_PLACE = re.compile(r"^.*\.cpp:\d+, ")  # where in torchvision's source an error was raised


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decodes a JPEG, PNG or WebP file.

    Args:
        data: the whole file.
        max_pixels: refuse larger images, by their header.

    Returns:
        ``(3, H, W)`` uint8 RGB, usually a channels-last view.

    Raises:
        DataError: another format, damaged, animated, too large, or a JPEG of too many scans. The message does not know
            the sample's name; the caller puts it in front.
    """
    kind, height, width = image_header(data)
    if height < 1 or width < 1:
        raise DataError(f"{kind} image of {width}x{height} pixels; expected at least 1x1", "image size")
    if height * width > max_pixels:
        raise DataError(
            f"{kind} image of {width}x{height} pixels; at most {max_pixels} pixels are decoded", "image size"
        )
    if kind == "jpeg":
        _check_scans(data)
    try:
        if kind == "jpeg":
            return _decode_jpeg(data)
        if kind == "webp" and not _webp_needs_pillow(data):
            return _decode_webp(data)
        if kind == "png":
            _check_png(data)
        return _decode_with_pillow(data, kind)
    except DataError:
        raise
    except Exception as error:
        # RuntimeError from torchvision; Pillow raises OSError, SyntaxError, ValueError, struct.error and others.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = _SOURCE_PLACE.sub("", reason)
        raise DataError(f"{kind} image cannot be decoded: {reason}", "damaged image") from error


def image_header(data: bytes) -> tuple[str, int, int]:
    """Format ("jpeg", "png" or "webp"), height and width of an image file, from its header alone.

    Raises:
        DataError: neither of these formats, or a header that ends early.
    """
    try:
        if data[:3] == b"\xff\xd8\xff":
            return "jpeg", *_jpeg_size(data)
        if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
            width, height = struct.unpack_from(">II", data, 16)
            return "png", height, width
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return "webp", *_webp_size(data)
    except (IndexError, struct.error):
        raise DataError("image ends inside its header", "damaged image") from None
    got = f"begins with {bytes(data[:8])!r} ({len(data)} bytes)"
    raise DataError(f"not a JPEG, PNG or WebP image: {got}", "image format")


def pil_to_uint8(image: Image) -> Tensor:
    """The same conversion for a Pillow image: orientation, transparency on white, RGB.

    Returns:
        ``(3, H, W)`` uint8.

    Raises:
        DataError: a mode without a stated range (32-bit integers, floats).
    """
    from PIL import ImageOps

    return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Image) -> Tensor:
    """`pil_to_uint8` of an image that stands upright."""
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow opens 16-bit PNGs as either, and would clip instead of scaling.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(
                f"Pillow image of mode {image.mode} with values outside 0...65535; convert it to RGB first",
                "image mode",
            )
        grey = torch.from_numpy((values >> 8).astype(np.uint8))
        return grey.expand(3, *grey.shape)
    if image.mode == "F":
        raise DataError("Pillow image of mode F (floats); convert it to RGB first", "image mode")
    if image.has_transparency_data:
        image = _on_white(image.convert("RGBA"))
    elif image.mode != _RGB_MODE:
        image = image.convert(_RGB_MODE)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _on_white(image: Image) -> Image:
    """RGBA → RGB; Pillow's blending rounds to the nearest, and is six times as fast as tensor operations."""
    from PIL import Image

    white = Image.new(_RGB_MODE, image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _decode_jpeg(data: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    with torch.no_grad():
        return decode_jpeg(_as_tensor(data), mode=ImageReadMode.RGB, apply_exif_orientation=True)


def _decode_webp(data: bytes) -> Tensor:
    from PIL import Image
    from torchvision.io import decode_webp

    with torch.no_grad():
        image = decode_webp(_as_tensor(data))
    if image.shape[0] == 3:
        return image
    return _to_rgb(Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy())))


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode_with_pillow(data: bytes, kind: str) -> Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=(kind.upper(),)) as image:
        if getattr(image, "n_frames", 1) > 1:
            raise DataError(f"animated {kind} image; expected a still one", "animated image")
        if kind == "png" and data[24] == 16 and "transparency" in image.info:
            raise DataError("16-bit png image with one transparent colour, which Pillow would miss", "image mode")
        image.load()  # the orientation may come after the pixels
        # Looking for an orientation is slow, and without such a field there is none.
        turned = any("exif" in key.lower() or "xmp" in key.lower() for key in image.info if isinstance(key, str))
        return pil_to_uint8(image) if turned else _to_rgb(image)


def _check_png(data: bytes) -> None:
    """Compare the checksums of all that decides about pixels; Pillow leaves out those of the pixels themselves."""
    at, view = 8, memoryview(data)
    while at + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            break
        critical = not name[0] & 0x20
        if (critical or name == b"tRNS") and zlib.crc32(view[at + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise DataError(f"png image cannot be decoded: wrong checksum of its chunk {name!r}", "damaged image")
        if name == b"IEND":
            return
        at = end + 4
    raise DataError("png image cannot be decoded: it is cut short", "damaged image")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Height and width from the first start-of-frame segment."""
    at = 2
    while True:
        while data[at] != 0xFF:
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        if marker in (0x01, *range(0xD0, 0xD9)):  # markers without a payload
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 4)
            return height, width
        at += 1 + struct.unpack_from(">H", data, at + 1)[0]


def _check_scans(data: bytes) -> None:
    """Goes from marker to marker, in time linear in the bytes; payloads, which may hold pictures, are passed over."""
    at, scans = 2, 0
    while (marker := _MARKER.search(data, at)) and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        if scans > MAX_SCANS:
            raise DataError(f"jpeg image of more than {MAX_SCANS} scans; it is not decoded", "too many scans")
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Height and width from the first chunk (RFC 9649)."""
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ((bits >> 14) & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF
    raise DataError(f"WebP image with an unknown first chunk {chunk!r}", "damaged image")


def _webp_needs_pillow(data: bytes) -> bool:
    """Whether the file is animated or carries EXIF, which torchvision refuses or ignores."""
    return data[12:16] == b"VP8X" and bool(data[20] & 0b0000_1010)


# Said by torchvision >= 0.29 at every call. Its successor needs FFmpeg; this module is the place to change.
warnings.filterwarnings(
    "ignore", message=r".*decoding and encoding capabilities of TorchVision are deprecated", category=DeprecationWarning
)
