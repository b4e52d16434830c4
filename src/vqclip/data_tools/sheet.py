"""Contact sheets: images with their captions on one page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw
from torch import Tensor

from vqclip.data_tools.fonts import Fonts

__all__ = ["GAP", "HEAD", "Caption", "Tile", "draw_sheet", "scale_of"]

GAP, HEAD = 18, 34
"""Pixels between tiles, and above the first ones."""
_WIDTH, _LEAST_SIDE, _LEAST_TILE = 1360, 144, 180
_LINE, _LINES = 17, 9
"""Height of a line of text, and the largest number of lines of a caption."""
_PART = 40
"""Characters after which a line may break within a word."""
_SHADES = ("#e6ecf5", "#f5ecdc")
"""Backgrounds of the tokens of a caption, in turn."""
_TEXT, _NOTE, _CUT, _FRAME = "#26262c", "#77777f", "#c02020", "#c8c8cc"


class Caption(NamedTuple):
    """A caption as its tokens."""

    pieces: tuple[str, ...]
    """Text of each token."""
    read: int | None = None
    """Number of tokens that are read; the rest is cut. None draws plain text."""


class Tile(NamedTuple):
    """Images of one sample side by side, with text below."""

    images: tuple[Tensor, ...]
    """``(3, S, S)`` uint8 each."""
    title: str
    captions: tuple[Caption, ...]
    warning: str = ""
    """Remark in red."""


class _Box(NamedTuple):
    """A text in a line."""

    x: float
    text: str
    token: int
    """Number of its token; its background shows where tokens begin and end."""
    cut: bool


def scale_of(side: int) -> int:
    """Return how many pixels wide and high a pixel of an image is drawn, a whole number."""
    return max(1, _LEAST_SIDE // side)


def draw_sheet(tiles: Sequence[Tile], head: str, font: Path | None = None) -> Image.Image:
    """Draw tiles in rows. Pixels of images are drawn exactly, as squares; see `scale_of`.

    Args:
        tiles: at least one; their images have one size.
        head: line above them.
        font: used first for captions.

    Raises:
        ConfigError: the font cannot be read.
    """
    fonts, side = Fonts(13, font), tiles[0].images[0].shape[-1]
    scaled, views = side * scale_of(side), max(len(tile.images) for tile in tiles)
    width = max(_LEAST_TILE, views * (scaled + 4) - 4)
    columns = max(1, min(len(tiles), (_WIDTH - GAP) // (width + GAP)))
    texts = [_lines_of_tile(tile, fonts, width) for tile in tiles]
    rows = [range(start, min(start + columns, len(tiles))) for start in range(0, len(tiles), columns)]
    heights = [scaled + _LINE * max(len(texts[number]) for number in row) + 8 for row in rows]
    size = GAP + columns * (width + GAP), HEAD + sum(heights) + GAP * len(rows)
    sheet = Image.new("RGB", size, "#fcfcfa")
    pen = ImageDraw.Draw(sheet)
    fonts.draw(pen, (GAP, 22), fonts.replace_missing(head), _NOTE)
    y = HEAD
    for row, height in zip(rows, heights, strict=True):
        for column, number in enumerate(row):
            x = GAP + column * (width + GAP)
            for view, image in enumerate(tiles[number].images):
                left = x + view * (scaled + 4)
                pen.rectangle((left - 1, y - 1, left + scaled, y + scaled), outline=_FRAME)
                sheet.paste(_enlarge(image, scaled), (left, y))
            _draw_lines(pen, fonts, texts[number], x, y + scaled + 15)
        y += height + GAP
    return sheet


def _enlarge(image: Tensor, side: int) -> Image.Image:
    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    return pixels.resize((side, side), Image.Resampling.NEAREST)


def _lines_of_tile(tile: Tile, fonts: Fonts, width: int) -> list[tuple[str, list[_Box]]]:
    """Return the lines of text below the images: each a colour and its boxes."""
    lines: list[tuple[str, list[_Box]]] = []
    for text, colour in ((tile.title, _NOTE), (tile.warning, _CUT)):
        if text:
            some = [*_break(Caption((fonts.replace_missing(text),)), fonts, width)]
            lines += [(colour, line) for line in some[:3]]
    for caption in tile.captions:
        shown = caption._replace(pieces=tuple(map(fonts.replace_missing, caption.pieces)))
        some = [*itertools.islice(_break(shown, fonts, width), _LINES + 1)]  # a caption may have 65,536 characters
        lines += [(_TEXT, line) for line in some[:_LINES]]
        if len(some) > _LINES:
            lines.append((_NOTE, [_Box(0, "...", -1, False)]))
    return lines


def _break(caption: Caption, fonts: Fonts, width: int) -> Iterator[list[_Box]]:
    """Break a caption into lines, between words where possible."""
    line: list[_Box] = []
    x = 0.0
    for token, text, cut in _words(caption):
        if line and x + fonts.width(text.rstrip()) > width:
            yield line
            line, x = [], 0.0
        while fonts.width(text.rstrip()) > width:  # a word longer than a line
            fit = next(n for n in range(len(text) - 1, 0, -1) if n == 1 or fonts.width(text[:n]) <= width)
            yield [_Box(0, text[:fit], token, cut)]
            text = text[fit:]
        line.append(_Box(x, text, token, cut))
        x += fonts.width(text)
    if line:
        yield line


def _words(caption: Caption) -> Iterator[tuple[int, str, bool]]:
    """Yield parts of a caption between which a line may break: tokens, or the words of plain text."""
    for token, piece in enumerate(caption.pieces):
        if caption.read is not None:
            yield from ((token, part, token >= caption.read) for part in _parts(piece))
        else:
            yield from ((-1, part, False) for word in piece.split(" ") for part in _parts(f"{word} "))


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts whose width is measured in little time."""
    for start in range(0, len(text), _PART):
        yield text[start : start + _PART]


def _draw_lines(
    pen: ImageDraw.ImageDraw, fonts: Fonts, lines: Sequence[tuple[str, list[_Box]]], x: int, y: int
) -> None:
    for row, (colour, line) in enumerate(lines):
        base = y + row * _LINE
        for box in line:
            left, right = x + box.x, x + box.x + fonts.width(box.text.rstrip())
            if box.token >= 0 and not box.cut:
                pen.rectangle((left, base - 12, right, base + 3), _SHADES[box.token % 2])
            fonts.draw(pen, (left, base), box.text, _CUT if box.cut else colour)
            if box.cut:
                pen.line((left, base - 4, x + box.x + fonts.width(box.text), base - 4), _CUT)
