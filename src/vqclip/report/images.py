"""Images of a page as ``data:`` addresses: thumbnails, and code maps."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from vqclip.report.code_maps import code_colour

MAX_SIDE = 512
"""Largest side of an image that is shown, in pixels: a small file can hold a huge image."""
_SIDE = 160
"""Pixels of the longer side of a thumbnail."""
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg"}


def image_uri(content: bytes | None) -> Markup | None:
    """Return the address of a PNG or JPEG image; None for anything else, and for a large one."""
    if not content:
        return None
    try:
        with Image.open(io.BytesIO(content), formats=tuple(_TYPES)) as image:
            kind, size = image.format, image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    if kind is None or kind not in _TYPES or max(size) > MAX_SIDE:  # MPO, several images, is opened as JPEG
        return None
    return _address(_TYPES[kind], content)


def thumbnail_uri(pixels: Tensor) -> Markup:
    """Return the address of an image ``(3, H, W)`` uint8, made smaller."""
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((_SIDE, _SIDE))
    return png_uri(image)


def draw_map(codes: Sequence[int], columns: int) -> Image.Image:
    """Return an image with a pixel for each token, row by row, in the colour of its code; -1 is transparent."""
    rows = -(-len(codes) // columns)
    image = Image.new("RGBA", (columns, rows))
    image.putdata([_pixel(code) for code in codes] + [(0, 0, 0, 0)] * (rows * columns - len(codes)))
    return image


def png_uri(image: Image.Image) -> Markup:
    """Return the address of an image as PNG."""
    content = io.BytesIO()
    image.save(content, format="PNG", compress_level=1)
    return _address("image/png", content.getvalue())


def _address(kind: str, content: bytes) -> Markup:
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")


def _pixel(code: int) -> tuple[int, int, int, int]:
    if code < 0:
        return (0, 0, 0, 0)
    red, green, blue = bytes.fromhex(code_colour(code)[1:])
    return (red, green, blue, 255)
