"""Details of an evaluation as images, for trackers: hits and misses of a retrieval, code maps, reconstructions."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from vqclip.evaluation import Details
from vqclip.evaluation.details import MAX_TEXT, Codes, DecodedImage, Example, Examples, Reconstruction
from vqclip.report.images import draw_map

SIDE = 64
"""Side of an image on a sheet, in pixels."""
_GAP, _WIDTH, _LINE = 8, 480, 18
_MIDDLE = 166
"""Width of the column with the text of a query."""
_RIGHT, _WRONG, _TEXT, _PAPER = "#1a7f37", "#c0392b", "#222222", "#ffffff"
_MAPS = 8
"""Largest number of codebooks shown of an image: the first ones."""

_DECODED = 12
"""Largest number of decoded images shown of an image: those with the most bits."""


_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@functools.cache
def _load_font() -> _Font:
    return ImageFont.load_default(14)


def draw_sheets(name: str, details: Details) -> dict[str, Image.Image]:
    """Return images of an evaluation by name: ``retrieved/<task> image to text``, ``code maps/<task>``, ..."""
    sheets = {}
    for examples in details.examples:
        if examples.hits or examples.misses:
            direction = examples.direction.replace("_", " ")
            sheets[f"retrieved/{name} {direction}"] = _draw_examples(examples)
    codes = details.codes
    if codes is not None and codes.grid is not None and codes.maps:
        sheets[f"code maps/{name}"] = _draw_codes(codes, codes.grid)
    if details.reconstructions:
        sheets[f"reconstructed/{name}"] = _draw_reconstructions(details.reconstructions)
    return sheets


def _draw_examples(examples: Examples) -> Image.Image:
    rows = [*examples.hits, *examples.misses]
    pitch = SIDE + 2 * _GAP
    sheet = Image.new("RGB", (_WIDTH, pitch * len(rows)), _PAPER)
    for number, example in enumerate(rows):
        _draw_example(sheet, number * pitch, example)
    return sheet


def _draw_example(sheet: Image.Image, top: int, example: Example) -> None:
    """Draw the image of a query, its text and rank, and what it finds: green where it is right, else red."""
    pen = ImageDraw.Draw(sheet)
    pen.rectangle((0, top, 3, top + SIDE + 2 * _GAP - 3), _RIGHT if example.rank == 1 else _WRONG)
    _paste(sheet, (_GAP, top + _GAP), example.image.thumbnail)
    left = SIDE + 2 * _GAP
    _write(pen, (left, top + _GAP), [example.text, f"rank {example.rank} of {example.candidates}"], _TEXT, _MIDDLE, 2)
    left += _MIDDLE + _GAP
    for number, found in enumerate(example.found):
        colour = _RIGHT if found.right else _WRONG
        if found.image is None:
            line = f"{number + 1}. {found.text}"
            _write(pen, (left, top + _GAP + number * _LINE), [line], colour, _WIDTH - left - _GAP)
        elif left + SIDE <= _WIDTH:
            pen.rectangle((left - 3, top + _GAP - 3, left + SIDE + 2, top + _GAP + SIDE + 2), colour)
            _paste(sheet, (left, top + _GAP), found.image.thumbnail)
            left += SIDE + _GAP


def _draw_codes(codes: Codes, grid: tuple[int, int]) -> Image.Image:
    """Draw a row for each image: the image, and the map of each codebook, one colour a code."""
    shown, pitch = min(len(codes.codebooks), _MAPS), SIDE + _GAP
    sheet = Image.new("RGB", ((shown + 1) * pitch + _GAP, len(codes.maps) * pitch + _GAP + _LINE), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for column in range(shown):
        what, _, number = codes.codebooks[column].name.rpartition(" ")
        _write(pen, (_GAP, _GAP // 2), [what] if column == 0 else [], _TEXT, pitch)
        _write(pen, (_GAP + (column + 1) * pitch, _GAP // 2), [number], _TEXT, SIDE)
    for row, each in enumerate(codes.maps):
        top = _GAP + _LINE + row * pitch
        _paste(sheet, (_GAP, top), each.image.thumbnail)
        for codebook in range(shown):
            image = draw_map([ids[codebook] for ids in each.ids], grid[1]).resize(
                (SIDE, SIDE), Image.Resampling.NEAREST
            )
            sheet.paste(image, (_GAP + (codebook + 1) * pitch, top), image)
    return sheet


def _draw_reconstructions(images: Sequence[Reconstruction]) -> Image.Image:
    """Draw a row for each image: the original, and the decoded images with their bits and PSNR."""
    pitch, height = SIDE + _GAP, SIDE + _GAP + 2 * _LINE
    shown = min(_DECODED, max(len(each.decoded) for each in images))
    sheet = Image.new("RGB", ((shown + 1) * pitch + _GAP, len(images) * height + _GAP), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for row, each in enumerate(images):
        top = _GAP + row * height
        _paste(sheet, (_GAP, top), each.image.thumbnail)
        _write(pen, (_GAP, top + SIDE), ["original"], _TEXT, SIDE)
        for column, decoded in enumerate(each.decoded[-shown:], start=1):  # the last ones have the most bits
            left = _GAP + column * pitch
            _paste(sheet, (left, top), decoded.image)
            _write(pen, (left, top + SIDE), _captions(decoded), _TEXT, SIDE)
    return sheet


def _captions(decoded: DecodedImage) -> list[str]:
    psnr = decoded.figures.get("psnr")
    return [f"{decoded.bits:,.0f} bits", *([] if psnr is None else [f"{psnr:.1f} dB"])]


def _paste(sheet: Image.Image, place: tuple[int, int], thumbnail: bytes | None) -> None:
    if thumbnail is None:
        ImageDraw.Draw(sheet).rectangle((*place, place[0] + SIDE - 1, place[1] + SIDE - 1), outline=_TEXT)
        return
    with Image.open(io.BytesIO(thumbnail), formats=("PNG", "JPEG")) as image:
        sheet.paste(image.convert("RGB").resize((SIDE, SIDE)), place)


def _write(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], texts: Sequence[str], colour: str, width: int, most: int = 1
) -> None:
    """Write texts below each other, each in at most ``most`` lines, the last of them cut at the width."""
    font, lines = _load_font(), list[str]()
    for text in texts:
        words, last = text.split(), len(lines) + most - 1
        lines.append("")
        for word in words:
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and pen.textlength(longer, font) > width and len(lines) <= last:
                lines.append(word)
            else:
                lines[-1] = longer
    for number, line in enumerate(lines):
        pen.text((place[0], place[1] + number * _LINE), _cut(pen, font, line[:MAX_TEXT], width), colour, font)


def _cut(pen: ImageDraw.ImageDraw, font: _Font, line: str, width: int) -> str:
    length = pen.textlength(line, font)
    if length <= width:
        return line
    line = line[: int(len(line) * width / length)]
    while line and pen.textlength(f"{line}…", font) > width:
        line = line[:-1]
    return f"{line}…"
