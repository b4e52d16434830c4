"""Images of a page as ``data:`` addresses."""

from __future__ import annotations

import base64
import io

from markupsafe import Markup
from PIL import Image

MAX_SIDE = 512
"""Largest side of an image that is shown, in pixels: a small file can hold a huge image."""
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


def png_uri(image: Image.Image) -> Markup:
    """Return the address of an image as PNG."""
    content = io.BytesIO()
    image.save(content, format="PNG", compress_level=1)
    return _address("image/png", content.getvalue())


def _address(kind: str, content: bytes) -> Markup:
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")
