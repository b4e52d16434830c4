"""Small figures as SVG, drawn with the colours and the text of the page around them.

Not drawn with matplotlib, which takes 30 ms for each and half a second to be imported: together more than a tenth of
the evaluation of a small run. These take a millisecond. Axes are linear or logarithmic; marks are lines, dots, bands
and images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from markupsafe import Markup
from PIL import Image

from vqclip.errors import printable
from vqclip.report.images import png_uri

WIDTH, HEIGHT = 350, 215
"""Size in CSS pixels: about that at which a page shows it, so that its text is as large as the page's."""
CIVIDIS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
"""Colours of a heat map, from 0 to 1: matplotlib's cividis, which colour-blind people see as others do."""

Margins = tuple[float, float, float, float]
MAX_TEXT = 2000
"""Characters of a text; the rest is cut."""


class Plot:
    """A pair of axes.

    Args:
        x: ends of the horizontal axis.
        y: ends of the vertical axis, its lower end first; of the first above the second, it points downwards.
        width: in CSS pixels.
        height: in CSS pixels.
        margins: left, right, bottom and top of the axes, in CSS pixels.
        logarithmic: use a logarithmic vertical axis.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        width: float = WIDTH,
        height: float = HEIGHT,
        margins: Margins = (48, 16, 38, 8),
        logarithmic: bool = False,
    ):
        self.width, self.height, self._logarithmic = width, height, logarithmic
        self.left, right, bottom, self.top = margins
        self.right, self.bottom = width - right, height - bottom
        self._x, self._y = _widen(*x), _widen(*(map(math.log, y) if logarithmic else y))
        self._parts: list[Markup] = []

    def x(self, value: float) -> float:
        """Return the place of a value on the horizontal axis, in pixels."""
        low, high = self._x
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the place of a value on the vertical axis, in pixels."""
        low, high = self._y
        value = math.log(value) if self._logarithmic else value
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def x_axis(self, values: Iterable[float], label: str, *, grid: bool = True) -> None:
        """Draw grid lines at values, their numbers, and a label."""
        for value in values:
            place = self.x(value)
            if grid:
                self._add('<path class="grid" d="M{:.1f} {:.1f}V{:.1f}"/>', place, self.top, self.bottom)
            self._text(place, self.bottom + 15, compact(value), "middle")
        self._text((self.left + self.right) / 2, self.bottom + 31, label, "middle")

    def y_axis(self, values: Iterable[float]) -> None:
        """Draw grid lines at values, and their numbers."""
        for value in values:
            self._add('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>', self.left, self.y(value), self.right)
            self._text(self.left - 7, self.y(value) + 4, compact(value), "end")

    def row_names(self, names: Sequence[str], places: Sequence[float], most: int) -> None:
        """Write names beside the vertical axis, each of at most so many characters; the whole is shown on pointing."""
        for name, place in zip(names, places, strict=True):
            shown = name if len(name) <= most else f"{name[: most - 1]}…"
            self._add(
                '<text class="name" x="{:.1f}" y="{:.1f}" text-anchor="end">{}<title>{}</title></text>',
                self.left - 7,
                self.y(place) + 4,
                shown,
                name,
            )

    def line(self, points: Iterable[tuple[float, float]], colour: int, style: str = "line") -> None:
        """Draw a line through points."""
        self._add('<path class="{} c{}" d="{}"/>', style, colour, self._path(points))

    def dots(self, points: Iterable[tuple[float, float]], colour: int) -> None:
        """Draw a dot at each point."""
        for x, y in points:
            self._add('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"/>', colour, self.x(x), self.y(y))

    def band(self, points: Sequence[tuple[float, float, float]], colour: int) -> None:
        """Fill the area between a low and a high value at each place."""
        ends = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
        self._add('<path class="band c{}" d="{}Z"/>', colour, self._path(ends))

    def colours(self, table: np.ndarray) -> None:
        """Fill the axes with a table of values in [0, 1] as colours, its first row at the top; NaN stays empty."""
        uri, size = png_uri(_colour_image(table)), (self.right - self.left, self.bottom - self.top)
        self._add(
            '<image class="map-colours" href="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '
            'preserveAspectRatio="none"/>',
            uri,
            self.left,
            self.top,
            *size,
        )

    def svg(self, description: str) -> Markup:
        """Return the figure, with a text for those who cannot see it."""
        head = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">').format(
            self.width, self.height, plain(description, 300)
        )
        return head + Markup("").join(self._parts) + Markup("</svg>")

    def _path(self, points: Iterable[tuple[float, float]]) -> Markup:
        """Return the line through points as a path; it is numbers alone, and never cut as text is."""
        return Markup("M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points))

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self._add('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>', x, y, anchor, text)

    def _add(self, template: str, *values: object) -> None:
        """Add an element; values are escaped."""
        fit = [plain(each, 300) if type(each) is str else each for each in values]
        self._parts.append(Markup(template).format(*fit))


def ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Return at most ``most`` round numbers between two others."""
    if not (high - low) / most > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = (step * factor for factor in (1, 2, 2.5, 5, 10, 20, 25, 50))
    fits = (each for each in steps if (high - low) / each <= most and not (whole and each % 1))
    step = next(fits, high - low)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between two positive ones for a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / most))
    decades = [10.0**power for power in range(first, last + 1, stride)]
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [factor * each for each in decades for factor in factors if low <= factor * each <= high]
        if len(found) >= 3:
            return found
    return ticks(low, high, most)


def compact(value: float) -> str:
    """Format a number for an axis: ``0.25``, ``1,500``, ``20k``, ``1.5M``."""
    for size, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / scale:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return ends that differ."""
    if low != high:
        return low, high
    by = abs(low) / 2 or 1.0
    return low - by, high + by


def _colour_image(table: np.ndarray) -> Image.Image:
    """Return an image with a pixel for each value; NaN is transparent."""
    anchors = np.array([list(bytes.fromhex(each[1:])) for each in CIVIDIS], dtype=np.float64)
    place = np.nan_to_num(np.clip(table, 0.0, 1.0)) * (len(CIVIDIS) - 1)
    colours = [np.interp(place, range(len(CIVIDIS)), anchors[:, channel]) for channel in range(3)]
    pixels = np.stack([*colours, 255.0 * ~np.isnan(table)], axis=-1)
    return Image.fromarray(pixels.round().astype(np.uint8), "RGBA")


def plain(text: object, most: int = MAX_TEXT) -> str:
    """Return a text with invisible characters made visible, and cut if it is long. It may still contain markup."""
    text = str(text)
    return printable(text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)")
