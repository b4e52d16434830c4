"""Details of an evaluation, for a report: hits and misses, classes, code maps.

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
MAX_CARDS = 96
"""Largest number of cards in a section."""
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
Row = Annotated[tuple[Text, ...], Field(max_length=10)]
"""A row of a table."""
Interval = tuple[Rate, Rate]
"""Lowest and highest rate of a 95 % confidence interval."""


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


class Item(Part):
    """An image or a text on a card."""

    image: Thumbnail | None = None
    """None for a text, for an image that could not be read again, and for one whose file would be too large."""
    name: Text = ""
    """Name of the image in messages: file, or shard and key."""
    text: Text = ""
    """The text, or what the image shows."""
    note: Text = ""
    """Further remarks, such as a score."""
    right: bool | None = None
    """Whether the query should find it; None for other items."""


class Card(Part):
    """A few images and texts that belong together."""

    title: Text = ""
    note: Text = ""
    items: Annotated[tuple[Item, ...], Field(max_length=256)]


class Section(Part):
    """Cards of one kind."""

    layout: Literal["found", "maps", "patches", "decoded"]
    """A query and what it finds; an image and maps of its codes; patches; an image and what its ids decode to."""
    title: Text = ""
    note: Annotated[str, Field(max_length=4 * MAX_TEXT)] = ""
    cards: Annotated[tuple[Card, ...], Field(max_length=MAX_CARDS)]


class Table(Part):
    """A table of texts, the most important rows first."""

    title: Text
    heads: Row
    rows: Annotated[tuple[Row, ...], Field(max_length=MAX_CLASSES)]
    left: Count
    """Number of columns that are aligned left: the first ones."""


class Details(Part):
    """Everything that a report needs of an evaluation beside its figures and their intervals."""

    examples: Annotated[tuple[Section, ...], Field(max_length=4)] = ()
    """Worst misses and clearest hits, codes only, of both directions of retrieval: a query with the nearest candidates,
    best first. Empty for other tasks and without codes. See `vqclip.evaluation.image_details.choose_examples`."""
    tables: Annotated[tuple[Table, ...], Field(max_length=2)] = ()
    """Accuracy by class, lowest first, and the largest confusions, codes only; empty for other tasks."""
    codes: Annotated[tuple[Section, ...], Field(max_length=1 + MAX_CODEBOOKS)] = ()
    """Maps of the codes of some images, then for each codebook patches that share a code; empty without codes."""
    reconstructions: Section | None = None
    """Images beside what their ids decode to; None without a pixel decoder, and for other tasks than `pixels`."""


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
        self._source, self.side = source, side
        self.pixels = functools.cache(functools.partial(_read_pixels, source, transform))
        """Return what the model sees of an image, ``(3, H, W)`` uint8; None if it cannot be read again."""

    def item(self, index: int, note: str = "", right: bool | None = None) -> Item:
        """Return an image with its name and a thumbnail."""
        pixels = self.pixels(index)
        small = None if pixels is None else thumbnail(pixels, self.side)
        return Item(image=small, name=self.name(index), note=note, right=right)

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return clip_text(self._source.name(index))


def _read_pixels(source: Source, transform: EvalTransform, index: int) -> Tensor | None:
    try:
        return as_pixels(transform(read_decoded(source, index, MAX_PIXELS)[1]), transform.size)
    except DataError:  # the evaluation has read it; a report without one thumbnail is still a report
        return None


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
