"""WebP and JPEG files of a given number of bytes, to compare reconstructions with.

Every byte of a file counts, with the fixed headers of its container: about 40 bytes of WebP and 300 to 600 of JPEG. So
neither can make a file of 100 bytes, whatever the image; `compress` then makes the smallest file that it can.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

Codec = Literal["webp", "jpeg"]
_OPTIONS: dict[Codec, dict[str, int | bool]] = {"webp": {"method": 6}, "jpeg": {"optimize": True}}
_BEST = 100
_FURTHER = 3
"""Qualities that are tried after the bisection, because a better WebP is sometimes a few bytes smaller."""
_REDUCED = (1, 2, 4, 8)
"""Factors by which `compress` reduces height and width."""


class Compressed(NamedTuple):
    """An image that a codec has compressed."""

    pixels: Tensor
    """``(3, H, W)`` uint8, the decoded file at the size of the original."""
    bytes: int
    """Size of the file."""


def compress(pixels: Tensor, codec: Codec, budget: int) -> list[Compressed]:
    """Compress an image to files of at most ``budget`` bytes, at full and at reduced sizes.

    Each file has the largest quality that fits, found by bisection; if none fits, the lowest quality, and more than
    ``budget`` bytes.

    Args:
        pixels: ``(3, H, W)`` uint8.
        codec: WebP (lossy, ``method`` 6, the slowest one) or JPEG (optimised Huffman tables, chroma at half the size).
        budget: bytes.

    Returns:
        One for each factor by which height and width are reduced (Lanczos), and enlarged again (bicubic); 1 first.
    """
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return [_compress(image, codec, budget, factor) for factor in _REDUCED]


def _compress(image: Image.Image, codec: Codec, budget: int, factor: int) -> Compressed:
    width, height = (max(1, round(side / factor)) for side in image.size)
    smaller = image if factor == 1 else image.resize((width, height), Image.Resampling.LANCZOS)

    def encode(quality: int) -> bytes:
        file = io.BytesIO()
        smaller.save(file, codec, quality=quality, **_OPTIONS[codec])
        return file.getvalue()

    best, low, high = encode(0), 0, _BEST + 1  # low fits and high does not, or is too much
    if len(best) <= budget:
        while low + 1 < high:
            quality = (low + high) // 2
            file = encode(quality)
            if len(file) <= budget:
                best, low = file, quality
            else:
                high = quality
        for quality in range(high + 1, min(high + _FURTHER, _BEST) + 1):
            file = encode(quality)
            best = file if len(file) <= budget else best
    made = Image.open(io.BytesIO(best)).convert("RGB")
    if made.size != image.size:
        made = made.resize(image.size, Image.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8)
    return Compressed(pixels.view(image.height, image.width, 3).permute(2, 0, 1).contiguous(), len(best))


def best_within(found: Sequence[Compressed], pixels: Tensor, budget: int) -> Compressed:
    """Return the file of at most ``budget`` bytes that is nearest to ``pixels``, or the smallest file if none fits."""
    fitting = [each for each in found if each.bytes <= budget]
    if not fitting:
        return min(found, key=lambda each: each.bytes)
    return min(fitting, key=lambda each: int((each.pixels.int() - pixels.int()).square().sum()))
