"""Code maps: the ids of one codebook over the tokens of an image, one colour a code.

Shapes: N tokens, C codebooks.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

from markupsafe import Markup

__all__ = ["code_colour", "code_map", "find_grid"]

_GOLDEN, _PLASTIC = 0.6180339887, 0.7548776662
"""Multiples of these, modulo 1, spread evenly: codes with near numbers get colours that differ."""


def code_colour(code: int) -> str:
    """Return the colour of a code as ``#rrggbb``: always the same one, distinct from those of the codes near it."""
    hue, shade = code * _GOLDEN % 1, code * _PLASTIC % 1
    red, green, blue = colorsys.hls_to_rgb(hue, 0.38 + 0.32 * shade, 0.45 + 0.4 * (code * _GOLDEN * _PLASTIC % 1))
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def find_grid(tokens: int) -> tuple[int, int]:
    """Return rows and columns of N tokens: a square where they fill one, else as nearly square as they divide.

    Towers have square images and number patches row by row. Tokens of a reduction have no place in the image.
    """
    rows = next(rows for rows in range(math.isqrt(max(1, tokens)), 0, -1) if tokens % rows == 0)
    return rows, max(1, tokens) // rows


def code_map(codes: Sequence[int], columns: int) -> Markup:
    """Draw the codes of one codebook, row by row, as SVG: a cell a token; pointing at it shows its code.

    The numbers are there too, as texts of class ``code``, for the page to show or to hide. An absent token (-1) has no
    cell.

    Args:
        codes: N codes.
        columns: columns of the grid.
    """
    cells = "".join(_cell(code, *divmod(place, columns)) for place, code in enumerate(codes) if code >= 0)
    rows = -(-len(codes) // columns)
    head = f'<svg viewBox="0 0 {10 * columns} {10 * rows}" preserveAspectRatio="none" class="code-map">'
    return Markup(f"{head}{cells}</svg>")


def _cell(code: int, row: int, column: int) -> str:
    x, y = 10 * column, 10 * row
    cell = f'<rect x="{x}" y="{y}" width="10" height="10" fill="{code_colour(code)}"/>'
    number = f'<text class="code" x="{x + 5}" y="{y + 6}" text-anchor="middle" font-size="3">{code}</text>'
    return f"<g><title>{code}</title>{cell}{number}</g>"
