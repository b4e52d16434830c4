"""Limits of the files of a sample, and reading an image file."""

from __future__ import annotations

from pathlib import Path

from vqclip.errors import DataError
from vqclip.io.files import read_bounded

__all__ = ["MAX_BYTES", "MAX_IMAGE_BYTES", "read_image"]

MAX_IMAGE_BYTES = 64 << 20
MAX_BYTES = {"image": MAX_IMAGE_BYTES, "txt": 1 << 20, "json": 4 << 20, "cls": 64}
"""Larger members are refused before they are read."""


def read_image(file: Path, name: str) -> bytes:
    """Read an image file; raise DataError, which begins with its name, if it cannot be read or is too large."""
    try:
        data = read_bounded(file, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{name}: cannot be read: {reason}", "unreadable file") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise DataError(f"{name}: more than {MAX_IMAGE_BYTES} bytes, which are not read", "too many bytes")
    return data
