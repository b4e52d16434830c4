"""Decode image bytes from untrusted files to uint8 RGB tensors.

    format = from the first bytes, never from the file's name
    clean: keep the first image, and of the metadata only the EXIF orientation     # JPEG, PNG, GIF, TIFF, AVIF
    raise if height * width > max_pixels                                           # before a pixel is decoded
    decode: JPEG of 8 bits by simplejpeg, all else by the Pillow plugin of this format
    composite transparency on white; grey -> RGB; 16 bits -> 8; apply the EXIF orientation

Files are cleaned because Pillow reads all metadata and all frames: in a file of kilobytes, thousands of fields can name
the same bytes, which would take gigabytes or hours. The size that is checked is the one that the decoder uses. The
frame header of a JPEG is moved in front of all other segments, and libjpeg refuses a second one. Of other formats it is
the size of the opened Pillow image.

simplejpeg and Pillow both contain libjpeg-turbo, and give equal pixels. simplejpeg takes less time, and refuses files
at which libjpeg warns; then Pillow decides.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from vqclip.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
"""Endings of image files, in lower case. They select files; how a file is decoded depends on its content alone."""

OTHER_ENDINGS = (".heic", ".heif", ".jxl", ".jp2", ".svg", ".exr")
"""Endings of images that are not read."""

MAX_PIXELS = 50_000_000
"""Default limit, 150 MB as RGB; larger images are not decoded."""

MAX_SCANS = 100
"""Largest number of scans of a JPEG: a scan of a few bytes costs a pass over the whole image. Usual are 10, some dozens
after an optimiser."""

_MAX_PARTS = 4096
"""Largest number of JPEG segments, and of PNG chunks without pixels; decoders allocate objects for each."""

_FIRST_BYTES = re.compile(
    rb"(?P<Jpeg>\xff\xd8\xff)|(?P<Png>\x89PNG\r\n\x1a\n.{4}IHDR)|(?P<WebP>RIFF.{4}WEBP)|(?P<Gif>GIF8[79]a)"
    rb"|(?P<Bmp>BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0)|(?P<Tiff>II\*\0|MM\0\*)|(?P<Ppm>P[1-6][\s#])"
    rb"|(?P<Avif>.{4}ftyp(?:.{4}){0,16}?avi[fs])",
    re.DOTALL,
)
"""The formats that are read, by the name of Pillow's plugin; no other plugin is ever given a file."""
_PLUGINS = {name.lower(): name for name in _FIRST_BYTES.groupindex}


class DecodedImage(NamedTuple):
    """Decoded image with properties of its file."""

    pixels: Tensor
    """``(3, H, W)`` uint8 RGB, usually a channels-last view."""
    mode: str
    """Pillow's mode of the file: RGB, L, P, CMYK, I;16, ..."""
    orientation: int = 1
    """EXIF orientation that was applied, 1 (none) to 8."""
    transparent: bool = False
    """Whether pixels were composited on white."""
    largest: int | None = None
    """Largest value of a grey image of 16 bits; None for others."""


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS, min_side: int | None = None) -> Tensor:
    """Decode an image file to its pixels; see `read_image`."""
    return read_image(data, max_pixels, min_side).pixels


def read_image(data: bytes, max_pixels: int = MAX_PIXELS, min_side: int | None = None) -> DecodedImage:
    """Decode a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF file; of several frames or pages, the first.

    Args:
        data: the whole file.
        max_pixels: larger images are not decoded.
        min_side: decode JPEGs at 1/2, 1/4 or 1/8 of their size (rounded up), if the shorter side still has as many
            pixels; None: in full.

    Raises:
        DataError: another format, damaged, too large, or made of too many parts. The caller adds the sample's name to
            the message.
    """
    kind = image_format(data)
    try:
        if kind == "jpeg":
            return _read_jpeg(data, max_pixels, min_side)
        if kind == "webp":  # Pillow allocates its pixels when it opens it
            _check_size(kind, _webp_size(data), max_pixels)
        data, orientation = _CLEANERS[kind](data) if kind in _CLEANERS else (data, None)
        return _read_by_pillow(kind, data, orientation, max_pixels)
    except DataError:
        raise
    except (IndexError, struct.error):
        raise DataError("image ends inside its header", "damaged image") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{kind} image cannot be decoded: {reason}", "damaged image") from error


def image_format(data: bytes) -> str:
    """Return "jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm" or "avif", from the first bytes of a file.

    Raises:
        DataError: it is of another format.
    """
    if (match := _FIRST_BYTES.match(data[:96])) is not None:
        return str(match.lastgroup).lower()
    got = f"begins with {bytes(data[:12])!r} ({len(data)} bytes); convert it to one of these" if data else "is empty"
    raise DataError(f"not a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF image: {got}", "image format")


def pil_to_uint8(image: Image) -> Tensor:
    """Convert a Pillow image like `decode_image`: orientation, transparency on white, RGB.

    Returns:
        ``(3, H, W)`` uint8.

    Raises:
        DataError: a mode without a defined range (32-bit integers, floats).
    """
    from PIL import ImageOps

    return _to_rgb(ImageOps.exif_transpose(image))


def _read_by_pillow(kind: str, data: bytes, orientation: int | None, max_pixels: int, divisor: int = 1) -> DecodedImage:
    """Decode clean bytes; without an orientation, it is that of Pillow's metadata."""
    try:
        plugin = importlib.import_module(f"PIL.{_PLUGINS[kind]}ImagePlugin")
    except ImportError:
        raise DataError(f"{kind} image, which needs pillow>=11.3", "image format") from None
    with getattr(plugin, f"{_PLUGINS[kind]}ImageFile")(io.BytesIO(data)) as image:
        _check_size(kind, image.size, max_pixels)
        if kind == "png" and data[24] == 16 and "transparency" in image.info:
            raise DataError("16-bit png image with one transparent colour, which Pillow would miss", "image mode")
        if divisor > 1:
            image.draft(None, (image.width // divisor, image.height // divisor))
        image.load()  # PNG can have its orientation after the pixels
        turned = orientation or _orientation_in(image.info)
        largest = int(np.asarray(image).max()) if _has_16_bits(image) else None
        pixels = _turn_upright(_to_rgb(image), turned)
        return DecodedImage(pixels, image.mode, turned, image.has_transparency_data, largest)


def _check_size(kind: str, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if height < 1 or width < 1:
        raise DataError(f"{kind} image of {width}x{height} pixels; expected at least 1x1", "image size")
    if height * width > max_pixels:
        raise DataError(
            f"{kind} image of {width}x{height} pixels; at most {max_pixels} pixels are decoded", "image size"
        )


def _has_16_bits(image: Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _to_rgb(image: Image) -> Tensor:
    """Convert an upright Pillow image to ``(3, H, W)`` uint8."""
    from PIL import Image

    if _has_16_bits(image):  # Pillow would clip instead of scaling
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(
                f"image of mode {image.mode} with values outside 0...65535; convert it to RGB first", "image mode"
            )
        grey = torch.from_numpy((values >> 8).astype(np.uint8))
        return grey.expand(3, *grey.shape)
    if image.mode == "F":
        raise DataError("image of mode F (floats); convert it to RGB first", "image mode")
    if image.has_transparency_data:
        # Pillow rounds to nearest, and is six times as fast as tensor operations.
        rgba, image = image.convert("RGBA"), Image.new("RGB", image.size, (255, 255, 255))
        image.paste(rgba, mask=rgba.getchannel("A"))
    elif image.mode != "RGB":
        image = image.convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _turn_upright(image: Tensor, orientation: int) -> Tensor:
    """Rotate and flip ``(3, H, W)`` by an EXIF orientation, 1 to 8."""
    turned = image.transpose(1, 2) if 5 <= orientation <= 8 else image
    axes = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return turned.flip(axes) if axes else turned


def _orientation_in(info: dict[Any, Any]) -> int:
    """Return the orientation in the metadata of an opened image: EXIF, ImageMagick's form of EXIF, or XMP."""
    exif = info.get("exif") or bytes.fromhex("".join(info.get("Raw profile type exif", "").split("\n")[3:]))
    xmp = re.search(r'tiff:Orientation(?:="|>)([0-9])', info.get("XML:com.adobe.xmp", ""))
    return int(xmp[1]) if xmp and not exif else _exif_orientation(exif)


def _exif_orientation(exif: bytes) -> int:
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


# JPEG

_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
"""A JPEG marker with a payload, or the end. libjpeg refuses the reserved markers below, or skips them in a scan."""
_FRAMES = {b"%c" % marker for marker in range(0xC0, 0xD0)} - {b"\xc4", b"\xc8", b"\xcc"}
_METADATA = {b"%c" % marker for marker in (*range(0xE1, 0xEE), 0xEF, 0xFE)}
"""Segments of applications and comments, without JFIF's and Adobe's, which tell the colour space."""


def _read_jpeg(data: bytes, max_pixels: int, min_side: int | None) -> DecodedImage:
    data, orientation = _clean_jpeg(data)
    marker, precision, height, width, components = struct.unpack_from(">xBxxBHHB", data, 2)
    _check_size("jpeg", (width, height), max_pixels)
    divisor = 1
    if min_side is not None:  # of sides below 8 pixels, several fractions have equal sizes
        divisor = next((n for n in (8, 4, 2) if min(height, width) // n >= max(min_side, 8)), 1)
    if marker in (0xC0, 0xC2) and precision == 8 and components in (1, 3):
        shape = -(-height // divisor), -(-width // divisor), 3
        with contextlib.suppress(ValueError, RuntimeError):  # damage, or a warning
            pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=shape[0], min_width=shape[1])
            if pixels.shape == shape:
                upright = _turn_upright(torch.from_numpy(pixels).permute(2, 0, 1), orientation)
                return DecodedImage(upright, "L" if components == 1 else "RGB", orientation)
    return _read_by_pillow("jpeg", data, orientation, max_pixels, divisor)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height in the header of a WebP; ``(1, 1)`` if its first chunk has none."""
    head = data[12:30].ljust(18, b"\0")
    if head[:4] == b"VP8X":
        return int.from_bytes(head[12:15], "little") + 1, int.from_bytes(head[15:18], "little") + 1
    if head[:4] == b"VP8L":
        bits = int.from_bytes(head[9:13], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = (int.from_bytes(head[at : at + 2], "little") & 0x3FFF for at in (14, 16))
    return (width, height) if head[:4] == b"VP8 " and width and height else (1, 1)


def _clean_jpeg(data: bytes) -> tuple[bytes, int]:
    """Move the first frame header in front of all other segments, leave metadata out, and return the orientation too.

    Walks from marker to marker like libjpeg, in time linear in the bytes.
    """
    frame, orientation, pieces, begin = b"", 0, list[bytes](), 2
    at, parts, scans, size = 2, 0, 0, len(data)
    while (found := _MARKER.search(data, at)) is not None and (marker := found[1]) != b"\xd9":
        start, at = found.span()
        at += max(2, data[at] << 8 | data[at + 1] if at + 2 <= size else 2)
        parts += 1
        if marker == b"\xda":
            scans += 1
        elif not scans and (marker in _METADATA or (not frame and marker in _FRAMES)):
            pieces.append(data[begin:start])
            begin = at
            if marker in _FRAMES:
                frame = data[start:at]
            elif marker == b"\xe1" and not orientation and data.startswith(b"Exif\0\0", start + 4):
                orientation = _exif_orientation(data[start + 4 : at])
        if parts > _MAX_PARTS or scans > MAX_SCANS:
            raise DataError(
                f"jpeg image of more than {MAX_SCANS} scans or {_MAX_PARTS} segments; it is not decoded",
                "too many scans",
            )
    if not frame:
        raise IndexError("no frame header before the pixels")
    return b"".join([data[:2], frame, *pieces, data[begin:]]), orientation or 1


# Other formats


def _clean_png(data: bytes) -> tuple[bytes, None]:
    """Leave out the frames of an animation, and verify the checksums of all chunks that affect pixels.

    Pillow skips the checksums of the pixel data. Raises DataError.
    """
    at, others, view, pieces = 8, 0, memoryview(data), [data[:8]]
    while at + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            break
        critical = not name[0] & 0x20
        if (critical or name == b"tRNS") and zlib.crc32(view[at + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise DataError(f"png image cannot be decoded: wrong checksum of its chunk {name!r}", "damaged image")
        if name not in (b"acTL", b"fcTL", b"fdAT"):
            pieces.append(data[at : end + 4])
        if name == b"IEND":
            return b"".join(pieces), None
        others += name != b"IDAT"
        if others > _MAX_PARTS:
            raise DataError(f"png image of more than {_MAX_PARTS} chunks beside its pixels", "too many parts")
        at = end + 4
    raise DataError("png image cannot be decoded: it is cut short", "damaged image")


def _clean_gif(data: bytes) -> tuple[bytes, int]:
    """Keep the colour table, the first frame and its transparent colour."""

    def table_size(flags: int) -> int:
        return 6 << (flags & 7) if flags & 0x80 else 0

    def skip_blocks(at: int) -> int:
        while data[at]:
            at += 1 + data[at]
        return at + 1

    begin = at = 13 + table_size(data[10])
    control = b""
    while data[at] == 0x21:  # an extension
        if data[at + 1 : at + 3] == b"\xf9\x04":
            control = b"\x21\xf9\x04%c\0\0%c\0" % (data[at + 3] & 1, data[at + 6])
        at = skip_blocks(at + 2)
    if data[at] != 0x2C:
        raise DataError("gif image cannot be decoded: it has no frame", "damaged image")
    end = skip_blocks(at + 11 + table_size(data[at + 9]))
    return data[:begin] + control + data[at:end] + b";", 1


_TIFF_TAGS = {
    *(256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 338, 339, 347),
    *(529, 530, 531, 532),
}
"""Fields of a TIFF that describe its pixels."""
_TIFF_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946)
"""None, CCITT, LZW, JPEG, deflate, PackBits. Others are rare, or allocate what the file asks for (LZMA)."""


def _clean_tiff(data: bytes) -> tuple[bytes, int]:
    """Replace the directories of a TIFF by one of the fields that describe the pixels of its first image.

    Raises:
        DataError: fields or strips are more than the image needs, or the compression is not read.
    """
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    fields = dict[int, tuple[int, int, bytes]]()
    for place in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, length = struct.unpack_from(order + "HHI", data, place)
        if tag in _TIFF_TAGS or tag == 0x0112:
            fields.setdefault(tag, (kind, length, data[place : place + 12]))

    def number(tag: int, default: int = 0) -> int:
        kind, length, entry = fields.get(tag, (4, 1, struct.pack(order + "8xI", default)))
        if length != 1 or kind not in (3, 4):
            raise DataError(f"tiff image with {length} values of type {kind} in field {tag}", "damaged image")
        return int(struct.unpack_from(order + ("H" if kind == 3 else "I"), entry, 8)[0])

    orientation, width, height = number(0x0112, 1), number(256), number(257)
    fields.pop(0x0112, None)
    if number(259, 1) not in _TIFF_COMPRESSIONS:
        expected = "none, CCITT, LZW, JPEG, deflate or PackBits"
        raise DataError(f"tiff image of compression {number(259)}; expected {expected}", "image format")
    is_tiled = 322 in fields
    across, down = (number(322), number(323)) if is_tiled else (width, min(height, number(278, height)))
    planes = number(277, 1) if number(284, 1) == 2 else 1
    if not 0 < across * down <= max(4 * width * height, 1 << 22):
        raise DataError(f"tiff image of {width}x{height} pixels with parts of {across}x{down}", "damaged image")
    needed = min(1 << 16, planes * -(-width // across) * -(-height // down))
    parts = 324 if is_tiled else 273
    if any(length > (needed if tag == parts else 1 << 16) for tag, (_, length, _) in fields.items()):
        raise DataError("tiff image with more parts or values than its pixels need", "too many parts")
    unused = (273, 278, 279) if is_tiled else (323, 324, 325)
    entries = [fields[tag][2] for tag in sorted(fields) if tag not in unused]
    data += bytes(len(data) % 2)
    header = data[:4] + struct.pack(order + "I", len(data))
    return b"".join([header, data[8:], struct.pack(order + "H", len(entries)), *entries, bytes(4)]), orientation


def _clean_avif(data: bytes) -> tuple[bytes, None]:
    """Rename EXIF, which Pillow would read whole; the orientation of an AVIF is a property of its own."""
    at, pieces = 0, list[bytes]()
    while at + 8 <= len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
        box = data[at : at + size] if size >= 8 else data[at:]
        pieces.append(box if name == b"mdat" else box.replace(b"Exif", b"exif"))
        at += len(box)
    return b"".join([*pieces, data[at:]]), None


_CLEANERS: dict[str, Callable[[bytes], tuple[bytes, int | None]]] = {
    "png": _clean_png,
    "gif": _clean_gif,
    "tiff": _clean_tiff,
    "avif": _clean_avif,
}
"""Format → function that returns clean bytes, and the orientation if it was left out with the metadata."""
