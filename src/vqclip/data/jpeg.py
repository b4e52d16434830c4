"""Decode JPEG: by torchvision, or with the same pixels by simplejpeg, which takes less time, where it is installed.

plain file (8 bits, grey or three components, baseline or progressive, no EXIF)
    simplejpeg, unless the file is damaged in any way or the libraries disagree about test images
    otherwise, if it is decoded at a fraction of its size: Pillow
any other file, or damage: torchvision decides

All three use libjpeg-turbo: their pixels were equal for all 6,394 JPEGs of the test data, 3,808 made ones of 17 sizes,
8 qualities and every subsampling, and 90,000 of 690,000 damaged ones (simplejpeg refuses the rest). So results do
not depend on whether simplejpeg is installed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import struct
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from vqclip.errors import DataError

__all__ = ["decode_jpeg"]

logger = logging.getLogger("vqclip.data")

_PLAIN_FRAMES = (0xC0, 0xC2)
_SMALLEST = 8
"""Smaller sides have ambiguous fractions: several give equal sizes."""


def decode_jpeg(data: bytes, min_side: int | None = None) -> Tensor:
    """Decode a JPEG whose frame header comes first, and whose size has been checked.

    Args:
        data: the file.
        min_side: decode plain files at 1/2, 1/4 or 1/8 of their size (rounded up), if the shorter side still has as
            many pixels; None: in full.

    Returns:
        ``(3, H, W)`` uint8 RGB, a channels-last view.

    Raises:
        RuntimeError: the file is damaged. Pillow raises others.
    """
    marker, precision, height, width, components = struct.unpack_from(">xBxxBHHB", data, 2)
    is_plain = marker in _PLAIN_FRAMES and precision == 8 and components in (1, 3) and b"Exif" not in data
    if is_plain:
        divisor = 1 if min_side is None else _divisor(min(height, width), min_side)
        if (library := _find_simplejpeg()) is not None:
            with contextlib.suppress(ValueError, RuntimeError):  # damaged; others may read more of it
                return _to_tensor(_by_simplejpeg(library, data, height, width, divisor))
        if divisor > 1:
            return _to_tensor(_by_pillow(data, height, width, divisor))
    return _by_torchvision(data)


def _divisor(side: int, min_side: int) -> int:
    """Return the largest fraction 1/n of a side that has at least ``min_side`` pixels."""
    return next((n for n in (8, 4, 2) if side // n >= max(min_side, _SMALLEST)), 1)


def _by_simplejpeg(library: ModuleType, data: bytes, height: int, width: int, divisor: int) -> np.ndarray:
    """Decode to ``(H, W, 3)``; raise ValueError where libjpeg so much as warns."""
    height, width = -(-height // divisor), -(-width // divisor)
    image = library.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    if image.shape != (height, width, 3):
        raise ValueError(f"size {image.shape}")
    return image


def _by_pillow(data: bytes, height: int, width: int, divisor: int) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        if image.size != (width, height):  # a second header
            raise DataError(f"jpeg image with two sizes: {(width, height)} and {image.size}", "image size")
        image.draft(None, (width // divisor, height // divisor))
        return np.array(image.convert("RGB"))


def _by_torchvision(data: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    with torch.no_grad():
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)


def _to_tensor(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


@functools.cache
def _find_simplejpeg() -> ModuleType | None:
    """Return simplejpeg if it is installed and decodes test images like the others; compared once a process."""
    try:
        import simplejpeg
    except ImportError:
        return None
    for data, height, width in _test_images():
        full = _by_simplejpeg(simplejpeg, data, height, width, 1)
        half = _by_simplejpeg(simplejpeg, data, height, width, 2)
        if not torch.equal(_to_tensor(full), _by_torchvision(data)) or not np.array_equal(
            half, _by_pillow(data, height, width, 2)
        ):
            logger.warning("simplejpeg is not used: its pixels differ from those of torchvision or Pillow")
            return None
    return simplejpeg


def _test_images() -> list[tuple[bytes, int, int]]:
    """Return JPEGs with height and width: every usual subsampling, baseline and progressive, and grey."""
    from PIL import Image

    height, width = 37, 50
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 5 + columns % 7 * 9, columns * 5, (rows * columns) % 251], -1).astype(np.uint8)
    images = []
    for progressive in (False, True):
        for subsampling in (0, 1, 2, None):  # 4:4:4, 4:2:2, 4:2:0, grey
            image, stream = Image.fromarray(pixels), io.BytesIO()
            image = image.convert("L") if subsampling is None else image
            image.save(stream, "JPEG", progressive=progressive, subsampling=subsampling or 0)
            images.append((stream.getvalue(), height, width))
    return images
