"""Images of a page as ``data:`` addresses: thumbnails and code maps.

A code map shows the ids of one codebook over the tokens of an image, one colour a code. Shapes: N tokens.
"""

from __future__ import annotations

import base64
import colorsys
import io
import math
from collections.abc import Sequence

from markupsafe import Markup
from PIL import Image
from torch import Tensor

MAX_SIDE = 512
"""Largest side of an image that is shown, in pixels: a small file can hold a huge image."""
_SIDE = 160
"""Pixels of the longer side of a thumbnail."""
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg"}
_GOLDEN, _PLASTIC = 0.6180339887, 0.7548776662
"""Multiples of these, modulo 1, spread evenly: codes with near numbers get colours that differ."""


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
    colours = [(0, 0, 0, 0) if code < 0 else (*code_colour(code), 255) for code in codes]
    image.putdata(colours + [(0, 0, 0, 0)] * (rows * columns - len(codes)))
    return image


def png_uri(image: Image.Image) -> Markup:
    """Return the address of an image as PNG."""
    content = io.BytesIO()
    image.save(content, format="PNG", compress_level=1)
    return _address("image/png", content.getvalue())


def _address(kind: str, content: bytes) -> Markup:
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")


def code_colour(code: int) -> tuple[int, int, int]:
    """Return red, green and blue of a code: always the same ones, distinct from those of the codes near it."""
    hue, shade = code * _GOLDEN % 1, code * _PLASTIC % 1
    red, green, blue = colorsys.hls_to_rgb(hue, 0.38 + 0.32 * shade, 0.45 + 0.4 * (code * _GOLDEN * _PLASTIC % 1))
    return round(255 * red), round(255 * green), round(255 * blue)


def find_grid(tokens: int) -> tuple[int, int]:
    """Return rows and columns of N tokens: a square where they fill one, else as nearly square as they divide.

    Towers have square images and number patches row by row. Tokens of a reduction have no place in the image.
    """
    rows = next(rows for rows in range(math.isqrt(max(1, tokens)), 0, -1) if tokens % rows == 0)
    return rows, max(1, tokens) // rows
