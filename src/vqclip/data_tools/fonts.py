"""Fonts for text in any script: each character in the first font that has it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import ImageDraw, ImageFont

from vqclip.errors import ConfigError

__all__ = ["Fonts"]

_OTHERS = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "Arial Unicode.ttf",
    "unifont.ttf",
)
"""Fonts that are used beside Pillow's own where they are installed."""
_MISSING = "\U0010fffe"
"""A character that no font has."""


class Fonts:
    """Draws text with the first of several fonts that has each character; others are escaped.

    Args:
        size: height in pixels.
        path: a font to use first.

    Raises:
        ConfigError: the font cannot be read.
    """

    def __init__(self, size: int, path: Path | None = None):
        self._fonts: list[Any] = []
        if path is not None:
            try:
                self._fonts.append(ImageFont.truetype(str(path), size))
            except OSError as error:
                raise ConfigError(f"--font: {path}: {error}; expected a TrueType or OpenType font") from None
        self._fonts.append(ImageFont.load_default(size=size))
        for name in _OTHERS:
            with contextlib.suppress(OSError):  # it is not installed
                self._fonts.append(ImageFont.truetype(name, size))
        # Without shaping, which would draw a circle below a mark that is alone, missing or not.
        self._bare = [font.font_variant(layout_engine=ImageFont.Layout.BASIC) for font in self._fonts]
        self._number = lru_cache(maxsize=4096)(self._find)

    def replace_missing(self, text: str) -> str:
        """Escape characters that no font has and control characters; line breaks become spaces."""
        return "".join(
            c if c == " " or (c.isprintable() and self._number(c) >= 0) else c.encode("unicode_escape").decode()
            for c in text.replace("\n", " ")
        )

    def width(self, text: str) -> float:
        """Return the width of a text in pixels, after `replace_missing`."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, colour: str) -> None:
        """Draw a text, after `replace_missing`, from the left end of its base line."""
        x, y = place
        for font, run in self._runs(text):
            pen.text((x, y), run, colour, font, anchor="ls")
            x += font.getlength(run)

    def _runs(self, text: str) -> Iterator[tuple[Any, str]]:
        for number, run in itertools.groupby(text, key=self._number):
            yield self._fonts[max(0, number)], "".join(run)

    def _find(self, character: str) -> int:
        if character == " ":
            return 0
        for number, font in enumerate(self._bare):
            glyph, missing = font.getmask(character), font.getmask(_MISSING)
            if (glyph.size, bytes(glyph)) != (missing.size, bytes(missing)):
                return number
        return -1
