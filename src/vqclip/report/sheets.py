"""Details of an evaluation as images, for trackers: hits and misses of a retrieval, code maps, reconstructions."""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from vqclip.evaluation import Details
from vqclip.evaluation.details import MAX_TEXT, Codes, Example, Reconstruction
from vqclip.report.images import draw_map

SIDE = 64
"""Side of an image on a sheet, in pixels."""
GAP = 8
"""Pixels between the cells of a sheet, and around them."""
_LINE = 18
_LETTERS = 2 * SIDE // 7
"""Letters of a line below an image of a retrieval."""
_RIGHT, _WRONG, _TEXT, _PAPER = "#1a7f37", "#c0392b", "#222222", "#ffffff"
_MAPS = 8
"""Largest number of codebooks shown of an image: the first ones."""
_DECODED = 12
"""Largest number of decoded images shown of an image: those with the most bits."""


_BLANK = Image.new("RGBA", (1, 1))
"""In place of an image that could not be read."""


class Cell(NamedTuple):
    """Part of a sheet: an image, and the text below it."""

    image: bytes | Image.Image | None
    """PNG or JPEG file, or an image; None: text alone."""
    lines: Sequence[str] = ()
    colour: str = _PAPER
    """Colour of the frame of the image, or of text alone."""


def draw_sheets(name: str, details: Details) -> dict[str, Image.Image]:
    """Return images of an evaluation by name: ``retrieved/<task> image to text``, ``code maps/<task>``, ..."""
    sheets = {}
    for examples in details.examples:
        if rows := [_example(each) for each in (*examples.hits, *examples.misses)]:
            sheets[f"retrieved/{name} {examples.direction.replace('_', ' ')}"] = _draw(rows, 2 * SIDE, lines=3)
    codes = details.codes
    if codes is not None and codes.grid is not None and codes.maps:
        sheets[f"code maps/{name}"] = _draw(_code_maps(codes, codes.grid[1]), SIDE, lines=1)
    if details.reconstructions:
        rows = [_reconstruction(each) for each in details.reconstructions]
        sheets[f"reconstructed/{name}"] = _draw(rows, SIDE, lines=2)
    return sheets


def _example(example: Example) -> list[Cell]:
    """Return the query, and what it finds: green where it is right, else red."""
    about = [*_wrap(example.text, 2), f"rank {example.rank} of {example.candidates}"]
    cells = [Cell(example.image.thumbnail or _BLANK, about, _RIGHT if example.rank == 1 else _WRONG)]
    for number, each in enumerate(example.found, start=1):
        image = None if each.image is None else each.image.thumbnail or _BLANK
        cells.append(Cell(image, _wrap(f"{number}. {each.text}", 3), _RIGHT if each.right else _WRONG))
    return cells


def _code_maps(codes: Codes, columns: int) -> Iterable[list[Cell]]:
    """Yield each image with the map of each codebook, one colour a code."""
    names = [each.name.replace("codebook ", "") for each in codes.codebooks[:_MAPS]]
    for each in codes.maps:
        maps = [draw_map([ids[number] for ids in each.ids], columns) for number in range(len(names))]
        cells = [Cell(image, [name]) for image, name in zip(maps, names, strict=True)]
        yield [Cell(each.image.thumbnail or _BLANK), *cells]


def _reconstruction(one: Reconstruction) -> list[Cell]:
    """Return the original, and the decoded images with their bits and PSNR."""
    cells = [Cell(one.image.thumbnail or _BLANK, ["original"])]
    for each in one.decoded[-_DECODED:]:  # the last ones have the most bits
        psnr = each.figures.get("psnr")
        cells.append(
            Cell(each.image or _BLANK, [f"{each.bits:,.0f} bits", *([] if psnr is None else [f"{psnr:.1f} dB"])])
        )
    return cells


def _draw(rows: Iterable[Sequence[Cell]], width: int, lines: int) -> Image.Image:
    """Draw cells ``width`` pixels wide, with space for so many lines of text."""
    table = list(rows)
    across, down = width + GAP, SIDE + GAP + lines * _LINE
    size = max(map(len, table)) * across + GAP, len(table) * down + GAP
    sheet = Image.new("RGB", size, _PAPER)
    pen, font = ImageDraw.Draw(sheet), _load_font()
    for row, cells in enumerate(table):
        for column, cell in enumerate(cells):
            left, top = GAP + column * across, GAP + row * down
            if cell.image is not None:
                pen.rectangle((left - 3, top - 3, left + SIDE + 2, top + SIDE + 2), cell.colour)
                sheet.paste(_open(cell.image), (left, top))
                top += SIDE + 3
            for number, line in enumerate(cell.lines):
                while pen.textlength(line, font) > width:
                    line = f"{line[:-2]}…"
                pen.text((left, top + number * _LINE), line, cell.colour if cell.image is None else _TEXT, font)
    return sheet


def _open(image: bytes | Image.Image) -> Image.Image:
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image), formats=("PNG", "JPEG")) as opened:
            return opened.convert("RGB").resize((SIDE, SIDE))
    paper = Image.new("RGB", (SIDE, SIDE), _PAPER)
    large = image.resize((SIDE, SIDE), Image.Resampling.NEAREST)
    paper.paste(large, (0, 0), large)  # absent codes are transparent
    return paper


def _wrap(text: str, most: int) -> list[str]:
    """Return the first lines of a text beside or below an image of a retrieval."""
    return textwrap.wrap(text[:MAX_TEXT], _LETTERS)[:most]


@functools.cache
def _load_font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(14)
