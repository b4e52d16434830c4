"""Decode image bytes from untrusted files to uint8 RGB tensors.

    format, height, width = from the first bytes, never from the file's name
    raise if height * width > max_pixels                    # before a pixel is decoded
    decode: JPEG (see `vqclip.data.jpeg`) and WebP by torchvision (twice as fast as Pillow), PNG by Pillow
    composite transparency on white; grey -> RGB; 16 bits -> 8; apply the EXIF orientation

The decoder always uses the size that was checked: the checked frame header of a JPEG is moved in front of all
other segments, and libjpeg refuses a second one; Pillow's size is compared with it; libwebp reads the size at the same
fixed position. torchvision does not decode PNG here: its decoder (0.29 with its bundled libpng) ends the whole process
with a segmentation fault on about a third of damaged files.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vqclip.data.jpeg import decode_jpeg
from vqclip.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_PIXELS", "MAX_SCANS", "decode_image", "image_format", "pil_to_uint8"]

MAX_PIXELS = 50_000_000
"""Default limit, 150 MB as RGB; larger images are not decoded."""

MAX_SCANS = 100
"""Largest number of scans of a JPEG: a scan of a few bytes costs a pass over the whole image. Usual are 10, some dozens
after an optimiser."""

_MAX_PARTS = 4096
"""Largest number of JPEG segments, and of PNG chunks without pixels; decoders allocate objects for each."""

_RGB_MODE = "RGB"
_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
"""A JPEG marker with a payload, or the end. libjpeg refuses the reserved markers below, or skips them in a scan."""
_FRAMES = {b"%c" % marker for marker in range(0xC0, 0xD0)} - {b"\xc4", b"\xc8", b"\xcc"}
_SOURCE_PLACE = re.compile(r"^.*\.cpp:\d+, ")  # position in torchvision's source


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS, min_side: int | None = None) -> Tensor:
    """Decode a JPEG, PNG or WebP file.

    Args:
        data: the whole file.
        max_pixels: larger images are not decoded.
        min_side: decode large JPEGs at a fraction of their size, with at least as many pixels on the shorter side;
            see `vqclip.data.jpeg.decode_jpeg`.

    Returns:
        ``(3, H, W)`` uint8 RGB, usually a channels-last view.

    Raises:
        DataError: another format, damaged, animated, too large, or a JPEG with too many scans. The caller adds the
            sample's name to the message.
    """
    kind, height, width, data = _read_header(data)
    if height < 1 or width < 1:
        raise DataError(f"{kind} image of {width}x{height} pixels; expected at least 1x1", "image size")
    if height * width > max_pixels:
        raise DataError(
            f"{kind} image of {width}x{height} pixels; at most {max_pixels} pixels are decoded", "image size"
        )
    try:
        if kind == "jpeg":
            return decode_jpeg(data, min_side)
        if kind == "webp":
            return _decode_webp(data)
        return _decode_png(data, (width, height))
    except DataError:
        raise
    except Exception as error:
        # RuntimeError from torchvision; Pillow raises OSError, SyntaxError, ValueError, struct.error and others.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = _SOURCE_PLACE.sub("", reason)
        raise DataError(f"{kind} image cannot be decoded: {reason}", "damaged image") from error


def _read_header(data: bytes) -> tuple[str, int, int, bytes]:
    """Return the format ("jpeg", "png" or "webp"), height, width, and the bytes for the decoder."""
    kind = image_format(data)
    try:
        if kind == "jpeg":
            data = _move_frame_first(data)
            return kind, *struct.unpack_from(">HH", data, 7), data
        if kind == "png":
            width, height = struct.unpack_from(">II", data, 16)
            return kind, height, width, data
        return kind, *_webp_size(data), data
    except (IndexError, struct.error):
        raise DataError("image ends inside its header", "damaged image") from None


def image_format(data: bytes) -> str:
    """Return "jpeg", "png" or "webp", from the first bytes of a file.

    Raises:
        DataError: it is of another format.
    """
    if data[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    got = f"begins with {bytes(data[:8])!r} ({len(data)} bytes)"
    raise DataError(f"not a JPEG, PNG or WebP image: {got}", "image format")


def pil_to_uint8(image: Image) -> Tensor:
    """Convert a Pillow image like `decode_image`: orientation, transparency on white, RGB.

    Returns:
        ``(3, H, W)`` uint8.

    Raises:
        DataError: a mode without a defined range (32-bit integers, floats).
    """
    from PIL import ImageOps

    return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Image) -> Tensor:
    """Convert an upright Pillow image to ``(3, H, W)`` uint8."""
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow opens 16-bit PNGs in one of these modes, and would clip instead of scaling.
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
    """Composite RGBA on white, with Pillow, which rounds to nearest and is six times as fast as tensor operations."""
    from PIL import Image

    white = Image.new(_RGB_MODE, image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _decode_webp(data: bytes) -> Tensor:
    from PIL import Image
    from torchvision.io import decode_webp

    extended = data[12:16] == b"VP8X"
    if extended and data[20] & 0b0010:
        raise DataError("animated webp image; expected a still one", "animated image")
    with torch.no_grad():
        image = decode_webp(_as_tensor(data))
    if image.shape[0] == 4:
        image = _to_rgb(Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy())))
    return _upright(image, _orientation(_webp_exif(data)) if extended and data[20] & 0b1000 else 1)


def _decode_png(data: bytes, size: tuple[int, int]) -> Tensor:
    from PIL import Image

    _check_png(data)
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if image.size != size:  # a second header
            raise DataError(f"png image with two sizes: {size} and {image.size}", "image size")
        if getattr(image, "n_frames", 1) > 1:
            raise DataError("animated png image; expected a still one", "animated image")
        if data[24] == 16 and "transparency" in image.info:
            raise DataError("16-bit png image with one transparent colour, which Pillow would miss", "image mode")
        image.load()  # the orientation may come after the pixels
        return _upright(_to_rgb(image), _png_orientation(image.info))


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _upright(image: Tensor, orientation: int) -> Tensor:
    """Rotate and flip ``(3, H, W)`` by an EXIF orientation, 1 to 8."""
    turned = image.transpose(1, 2) if 5 <= orientation <= 8 else image
    axes = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return turned.flip(axes) if axes else turned


def _orientation(exif: bytes) -> int:
    """Return the orientation in the first directory of EXIF data; 1 without one.

    Not by Pillow, which copies every field first: thousands of fields can refer to the same megabytes.
    """
    exif = exif.removeprefix(b"Exif\0\0")
    order = ">" if exif[:2] == b"MM" else "<"
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (fields,) = struct.unpack_from(order + "H", exif, at)
        for field in range(at + 2, at + 2 + 12 * fields, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, field)
            if (tag, kind) == (0x0112, 3):
                return value
    except struct.error:  # cut short
        pass
    return 1


def _png_orientation(info: dict[Any, Any]) -> int:
    """Return the orientation from EXIF, from ImageMagick's form of EXIF, or from XMP."""
    exif = info.get("exif") or bytes.fromhex("".join(info.get("Raw profile type exif", "").split("\n")[3:]))
    xmp = re.search(r'tiff:Orientation(?:="|>)([0-9])', info.get("XML:com.adobe.xmp", ""))
    return int(xmp[1]) if xmp and not exif else _orientation(exif)


def _check_png(data: bytes) -> None:
    """Verify the checksums of all chunks that affect pixels; Pillow skips those of the pixel data."""
    at, others, view = 8, 0, memoryview(data)
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
        others += name != b"IDAT"
        if others > _MAX_PARTS:
            raise DataError(f"png image of more than {_MAX_PARTS} chunks beside its pixels", "too many parts")
        at = end + 4
    raise DataError("png image cannot be decoded: it is cut short", "damaged image")


def _move_frame_first(data: bytes) -> bytes:
    """Move the first frame header of a JPEG in front of all other segments: libjpeg decodes this size, or nothing.

    Walks from marker to marker like libjpeg, in time linear in the bytes.
    """
    at, begin, end, parts, scans = 2, 0, 0, 0, 0
    while (found := _MARKER.search(data, at)) and found[1] != b"\xd9":
        start, at = found.span()
        at += max(2, data[at] << 8 | data[at + 1] if at + 2 <= len(data) else 2)
        if not end and found[1] in _FRAMES:
            begin, end = start, at
        parts, scans = parts + 1, scans + (found[1] == b"\xda")
        if parts > _MAX_PARTS or scans > MAX_SCANS:
            raise DataError(
                f"jpeg image of more than {MAX_SCANS} scans or {_MAX_PARTS} segments; it is not decoded",
                "too many scans",
            )
    if not end:
        raise IndexError("no frame header")
    return data[:2] + data[begin:end] + data[2:begin] + data[end:]


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return height and width from the first chunk (RFC 9649)."""
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


def _webp_exif(data: bytes) -> bytes:
    at = 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            return data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2
    return b""


# torchvision >= 0.29 warns at every call. Its successor needs FFmpeg; only this module would change.
warnings.filterwarnings(
    "ignore", message=r".*decoding and encoding capabilities of TorchVision are deprecated", category=DeprecationWarning
)
