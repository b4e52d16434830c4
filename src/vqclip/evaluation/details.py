"""Details of an evaluation, for a report: intervals, hits and misses, classes, code maps.

`Details` is what is stored; `ImageReader` reads the images in it again, and makes thumbnails of what the model sees.

Shapes: N tokens of an image, C codebooks, K classes.
"""

from __future__ import annotations

import colorsys
import functools
import io
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torchvision.transforms.v2.functional as F
from PIL import Image
from pydantic import ConfigDict, Field
from torch import Tensor

from vqclip.config import Config
from vqclip.data import Source, mask_credentials
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.samples import read_decoded
from vqclip.data.transforms import EvalTransform, as_pixels
from vqclip.errors import DataError
from vqclip.io.json_files import Strict

MAX_TEXT = 300
"""Characters of a name or a caption; longer ones are cut."""
MAX_THUMBNAIL = 96
"""Largest side of a thumbnail, in pixels."""
MAX_THUMBNAIL_BYTES = 64 << 10
"""Largest size of a thumbnail's file."""
MAX_CLASSES = 1000
"""Largest number of classes whose accuracy is listed: those with the lowest one."""
MAX_CONFUSED = 30
"""Largest number of confusions that are listed."""
MAX_CODEBOOKS = 16
"""Largest number of codebooks in code maps and galleries: the first ones."""
DIFFERENCE_GAIN = 4
"""Factor of the differences of reconstructions."""
_GOLDEN, _PLASTIC = 0.6180339887, 0.7548776662
"""Multiples of these, modulo 1, spread evenly: codes with near numbers get colours that differ."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Mode = Text
"""One of `MODES`, or a prefix of the ids as ``str(Prefix)``."""
Thumbnail = Annotated[bytes, Field(max_length=MAX_THUMBNAIL_BYTES)]
"""A PNG or JPEG file; base64 in JSON."""
Rate = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Id = Annotated[int, Field(le=2**64)]
"""Id of a code, or the number of codes of a codebook."""
Interval = tuple[Rate, Rate]
"""Lowest and highest rate of a 95 % confidence interval."""
Figures = Annotated[dict[Text, Rate], Field(max_length=100)]


class DetailsConfig(Config):
    """Amounts of the details of an evaluation; 0 leaves a part out."""

    hits: int = Field(3, ge=0, le=32)
    """Images, and captions, that are found best."""
    misses: int = Field(6, ge=0, le=32)
    """Images, and captions, that are found worst."""
    nearest: int = Field(3, ge=1, le=10)
    """Found things shown of each."""
    code_maps: int = Field(4, ge=0, le=32)
    """Images whose codes are shown."""
    gallery_codes: int = Field(4, ge=0, le=32)
    """Codes of a codebook whose patches are shown."""
    gallery_patches: int = Field(6, ge=2, le=32)
    """Patches of a code."""
    gallery_codebooks: int = Field(2, ge=1, le=MAX_CODEBOOKS)
    """Codebooks with such galleries: the first ones."""
    gallery_images: int = Field(24, ge=2, le=512)
    """Images, evenly spread over the set, that patches are cut from."""
    reconstructions: int = Field(4, ge=0, le=32)
    """Images, evenly spread over the set, that tasks of kind `pixels` show beside what their ids decode to."""
    thumbnail: int = Field(64, ge=16, le=MAX_THUMBNAIL)
    """Side of a thumbnail in pixels."""


class Part(Strict):
    """Base of the details; bytes are base64 in JSON."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class ShownImage(Part):
    """An image of the set."""

    index: Count
    """Its number in the source."""
    name: Text
    """Its name in messages: file, or shard and key."""
    thumbnail: Thumbnail | None
    """The image as the model sees it, made small; None if the image could not be read again."""
    text: Text
    """Its first caption, or its class."""


class Candidate(Part):
    """Something that a query could find: a caption, a class or an image."""

    text: Text
    """The caption, or the name of the class; of an image, its first caption."""
    image: ShownImage | None
    """The image; None for a caption or a class."""
    score: float
    """Cosine similarity to the query, codes only."""
    right: bool
    """Whether it is right."""


class Example(Part):
    """A query with what it finds, codes only."""

    image: ShownImage
    """The image of the query; of a caption, the image that it belongs to."""
    text: Text
    """The right class, or the right caption: the one that is found first, or the query itself."""
    score: float
    """Similarity of the right candidate with the highest one."""
    rank: Annotated[Count, Field(ge=1)]
    """Its rank, 1 is the best; of candidates with the same score, the middle one."""
    candidates: Annotated[Count, Field(ge=1)]
    """Number of candidates."""
    found: Annotated[tuple[Candidate, ...], Field(max_length=10)]
    """Nearest candidates, best first."""


Examples_ = Annotated[tuple[Example, ...], Field(max_length=32)]


class Examples(Part):
    """Hits and misses in one direction, codes only."""

    direction: Literal["image_to_text", "text_to_image", "image_to_class"]
    """Query and candidates."""
    hits: Examples_
    """Queries whose right candidate is first, by the largest lead over the best wrong one."""
    misses: Examples_
    """Queries whose right candidate is not first: those with the worst rank, then the largest lead of the best wrong
    candidate. Of classes: by that lead, so that the first is the most confidently wrong."""


class ClassAccuracy(Part):
    """Accuracy of one class."""

    name: Text
    images: Count
    """Images of the class."""
    accuracy: dict[Mode, Rate]
    """Mode → share of its images that are classified right."""


class Confused(Part):
    """Images of one class that are classified as another."""

    right: Text
    predicted: Text
    images: Annotated[Count, Field(ge=1)]


class Codebook(Part):
    """A codebook of the image tokenizer that code maps and galleries show."""

    name: Text
    """Such as `stage 2` or `codebook 1`, counted from 0 as in the metrics."""
    size: Annotated[Id, Field(ge=1)]
    """Number of codes."""


class CodeMap(Part):
    """Codes of one image."""

    image: ShownImage
    panels: Annotated[tuple[Thumbnail, ...], Field(max_length=MAX_CODEBOOKS)]
    """A map of each codebook of `Codes.codebooks`, from `draw_map`."""


class Gallery(Part):
    """Patches that share a code."""

    codebook: Text
    """Name of the codebook."""
    code: Annotated[Id, Field(ge=0)]
    """The id."""
    images: Count
    """Images that contain it, out of `Codes.looked_at`."""
    patches: Annotated[tuple[Thumbnail, ...], Field(max_length=32)]
    """A patch of each of several images."""


class Codes(Part):
    """Codes of the image tokenizer on images of the set."""

    codebooks: Annotated[tuple[Codebook, ...], Field(max_length=MAX_CODEBOOKS)]
    """Codebooks that are shown: the first ones."""
    all_codebooks: Count
    """C, number of all codebooks."""
    grid: tuple[Annotated[int, Field(ge=1, le=1 << 14)], Annotated[int, Field(ge=1, le=1 << 14)]] | None
    """Rows and columns of tokens; None if tokens have no place in the image: a map shows them in their order."""
    maps: Annotated[tuple[CodeMap, ...], Field(max_length=32)]
    """Images with their codes, evenly spread over the set."""
    looked_at: Count
    """Images that galleries are made from, evenly spread over the set."""
    galleries: Annotated[tuple[Gallery, ...], Field(max_length=512)]
    """Codes in the most of these images, codebook by codebook; empty without a grid."""


class DecodedImage(Part):
    """An image made from some of the ids of another one, or by a codec."""

    label: Text
    """Source, such as `2 of 4 stages`."""
    bits: Annotated[float, Field(ge=0, le=1e15)]
    """Size of the ids, or of the file."""
    figures: Annotated[dict[Text, Annotated[float, Field(ge=-1e6, le=1e6)]], Field(max_length=20)]
    """Values of `vqclip.pixels.metrics.compare_images`, such as `psnr` in dB, at full size."""
    image: Thumbnail | None
    """None if the file would be too large."""
    difference: Thumbnail | None = None
    """Mean difference of the three channels from the original, `DIFFERENCE_GAIN` times; None if it is not shown."""


class Reconstruction(Part):
    """An image beside what its ids decode to."""

    image: ShownImage
    decoded: Annotated[tuple[DecodedImage, ...], Field(max_length=64)]
    """In the order of `Prefix.shorter`: with all ids last; then codecs."""


class Details(Part):
    """Everything that a report needs of an evaluation beside `Result.figures`."""

    intervals: dict[Mode, dict[Text, Interval]]
    """Mode → figure → 95 % confidence interval; see `vqclip.evaluation.intervals`."""
    examples: Annotated[tuple[Examples, ...], Field(max_length=2)] = ()
    """Hits and misses, both directions of retrieval; empty for other tasks and without codes."""
    classes: Annotated[tuple[ClassAccuracy, ...], Field(max_length=MAX_CLASSES)] = ()
    """Classes that have images, those with the lowest codes-only accuracy first; at most `MAX_CLASSES`."""
    confusions: Annotated[tuple[Confused, ...], Field(max_length=MAX_CONFUSED)] = ()
    """Confusions with the most images, most first, codes only; of equally near classes the first one is predicted."""
    codes: Codes | None = None
    """None if the image tokenizer has no codes."""
    reconstructions: Annotated[tuple[Reconstruction, ...], Field(max_length=32)] = ()
    """Images beside what their ids decode to; empty without a pixel decoder, and for other tasks than `pixels`."""


def clip_text(text: str) -> str:
    """Return a text without credentials, of at most `MAX_TEXT` characters that JSON can hold; it may be hostile."""
    text = mask_credentials(text.encode("utf-8", "replace").decode("utf-8"))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


class ImageReader:
    """Reader of single images of a set, each read once.

    Args:
        source: the set.
        transform: the transform of evaluation.
        side: largest side of a thumbnail, in pixels.
    """

    def __init__(self, source: Source, transform: EvalTransform, side: int):
        self._source, self._transform, self.side = source, transform, side
        self.pixels = functools.cache(self._read)
        """Return what the model sees of an image, ``(3, H, W)`` uint8; None if it cannot be read again."""

    def _read(self, index: int) -> Tensor | None:
        try:
            image = read_decoded(self._source, index, MAX_PIXELS)[1]
            return as_pixels(self._transform(image), self._transform.size)
        except DataError:  # the evaluation has read it; a report without one thumbnail is still a report
            return None

    def describe(self, index: int, text: str) -> ShownImage:
        """Return an image with its name, its caption or class ``text``, and a thumbnail."""
        pixels, name, text = self.pixels(index), clip_text(self._source.name(index)), clip_text(text)
        small = None if pixels is None else thumbnail(pixels, self.side)
        return ShownImage(index=index, name=name, thumbnail=small, text=text)


def thumbnail(pixels: Tensor, side: int) -> bytes | None:
    """Return ``(3, H, W)`` uint8 as a JPEG of at most ``side`` pixels; None if that is too large a file."""
    return _encode(_shrink(pixels, side), "JPEG", quality=85)


def exact_thumbnail(pixels: Tensor, side: int) -> bytes | None:
    """Return ``(3, H, W)`` uint8 of at most ``side`` pixels as a PNG, or as a JPEG where that is too large a file."""
    image = _shrink(pixels, side)
    return _encode(image, "PNG", optimize=True) or _encode(image, "JPEG", quality=92)


def code_map(codes: Sequence[int], columns: int) -> bytes | None:
    """Return `draw_map` as a PNG; None if that is too large a file."""
    return _encode(draw_map(codes, columns), "PNG", compress_level=1)


def draw_map(codes: Sequence[int], columns: int) -> Image.Image:
    """Return an image with a pixel for each token, row by row, in the colour of its code; -1 is transparent.

    A code always has the same colour, distinct from those of the codes near it.
    """
    rows = -(-len(codes) // columns)
    image = Image.new("RGBA", (columns, rows))
    image.putdata([_colour(code) for code in codes] + [_colour(-1)] * (rows * columns - len(codes)))
    return image


def _colour(code: int) -> tuple[int, int, int, int]:
    if code < 0:
        return 0, 0, 0, 0
    hue, shade = code * _GOLDEN % 1, code * _PLASTIC % 1
    rgb = colorsys.hls_to_rgb(hue, 0.38 + 0.32 * shade, 0.45 + 0.4 * (code * _GOLDEN * _PLASTIC % 1))
    red, green, blue = (round(255 * each) for each in rgb)
    return red, green, blue, 255


def find_grid(tokens: int) -> tuple[int, int]:
    """Return rows and columns of N tokens: a square where they fill one, else as nearly square as they divide."""
    rows = next(rows for rows in range(math.isqrt(max(1, tokens)), 0, -1) if tokens % rows == 0)
    return rows, max(1, tokens) // rows


def _shrink(pixels: Tensor, side: int) -> Image.Image:
    if (longest := max(pixels.shape[1:])) > side:
        size = [max(1, round(edge * side / longest)) for edge in pixels.shape[1:]]
        pixels = F.resize(pixels, size, antialias=True)
    image: Image.Image = F.to_pil_image(pixels)
    return image


def _encode(image: Image.Image, kind: str, **options: int) -> bytes | None:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue() if file.tell() <= MAX_THUMBNAIL_BYTES else None
