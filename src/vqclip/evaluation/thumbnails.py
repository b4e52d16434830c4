"""Thumbnails of the images of a set, made of what the model sees."""

from __future__ import annotations

import io
from collections.abc import Callable

import torchvision.transforms.v2.functional as F
from PIL import Image
from torch import Tensor

from vqclip.data import Source
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.samples import read_decoded
from vqclip.errors import DataError
from vqclip.evaluation.details import MAX_THUMBNAIL_BYTES, ShownImage, clip_text


class ImageReader:
    """Reader of single images of a set, each read once.

    Args:
        source: the set.
        transform: ``(3, H, W)`` uint8 → ``(3, S, S)`` uint8, the transform of evaluation.
        side: largest side of a thumbnail, in pixels.
    """

    def __init__(self, source: Source, transform: Callable[[Tensor], Tensor], side: int):
        self._source, self._transform, self.side = source, transform, side
        self._pixels: dict[int, Tensor | None] = {}
        self._thumbnails: dict[int, bytes | None] = {}

    def pixels(self, index: int) -> Tensor | None:
        """Return what the model sees of an image, ``(3, S, S)`` uint8; None if it cannot be read again."""
        if index not in self._pixels:
            try:
                self._pixels[index] = self._transform(read_decoded(self._source, index, MAX_PIXELS)[1])
            except DataError:  # the evaluation has read it; a report without one thumbnail is still a report
                self._pixels[index] = None
        return self._pixels[index]

    def describe(self, index: int, text: str) -> ShownImage:
        """Return an image with its name, its caption or class ``text``, and a thumbnail."""
        if index not in self._thumbnails:
            pixels = self.pixels(index)
            self._thumbnails[index] = None if pixels is None else thumbnail(pixels, self.side)
        name, text = clip_text(self._source.name(index)), clip_text(text)
        return ShownImage(index=index, name=name, thumbnail=self._thumbnails[index], text=text)


def thumbnail(pixels: Tensor, side: int) -> bytes | None:
    """Return ``(3, H, W)`` uint8 as a JPEG of at most ``side`` pixels; None if that is too large a file."""
    longest = max(pixels.shape[1:])
    if longest > side:
        size = [max(1, round(edge * side / longest)) for edge in pixels.shape[1:]]
        pixels = F.resize(pixels, size, antialias=True)
    return _encode(pixels, "JPEG", quality=85)


def patch(pixels: Tensor, side: int) -> bytes | None:
    """Return ``(3, H, W)`` uint8 as a PNG of at most ``side`` pixels; None if that is too large a file."""
    return _encode(_shrink_square(pixels, side), "PNG", compress_level=1)


def exact_thumbnail(pixels: Tensor, side: int) -> bytes | None:
    """Return ``(3, S, S)`` uint8 of at most ``side`` pixels as a PNG, or as a JPEG where that is too large a file."""
    pixels = _shrink_square(pixels, side)
    return _encode(pixels, "PNG", optimize=True) or _encode(pixels, "JPEG", quality=92)


def _shrink_square(pixels: Tensor, side: int) -> Tensor:
    return F.resize(pixels, [side, side], antialias=True) if max(pixels.shape[1:]) > side else pixels


def _encode(pixels: Tensor, kind: str, **options: int) -> bytes | None:
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(file, kind, **options)
    return file.getvalue() if file.tell() <= MAX_THUMBNAIL_BYTES else None
