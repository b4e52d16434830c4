"""Figures of a page as SVG, curves and heat maps over steps; and its images as ``data:`` addresses.

Drawn with the colours and the text of the page around them. Not with matplotlib, which takes 30 ms for each and half a
second to be imported: together more than a tenth of the evaluation of a small run. These take a millisecond.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from PIL import Image

from vqclip.errors import printable

PERCENT = "%"
COLOURS = 8
"""Curves that can be told apart in one figure."""
WIDTH, HEIGHT = 350, 215
"""Size in CSS pixels: about that at which a page shows it, so that its text is as large as the page's."""
CIVIDIS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
"""Colours of a heat map, from 0 to 1: matplotlib's cividis, which colour-blind people see as others do."""
MAX_SIDE = 512
"""Largest side of an image that is shown, in pixels: a small file can hold a huge image."""
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg"}
MAX_TEXT = 2000
"""Characters of a text; the rest is cut."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    label: str
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    """Values; those that are not finite are left out and counted below the figure."""
    low: Sequence[float] = ()
    """Lower ends of the intervals of all values; empty without any."""
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """A figure with its caption and legend, which are HTML, so that they wrap and are never cut."""

    title: str
    svg: Markup
    unit: str = ""
    legend: list[tuple[int, str]] = field(default_factory=list)
    """Number of the colour, label."""
    note: str = ""
    scale: tuple[str, str] | None = None
    """Labels of the ends of a heat map's colours."""


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    x_label: str = "step",
    logarithmic: bool = False,
    marks: bool = False,
    floor: float | None = None,
) -> Chart | None:
    """Draw curves over steps; None if no value is finite.

    Args:
        title: caption.
        curves: at most `COLOURS`; further ones are left out.
        unit: of the values; `PERCENT` shows rates in [0, 1] as percent.
        x_label: unit of the other axis.
        logarithmic: use a logarithmic scale; values that are not positive are left out.
        marks: draw a dot at each value.
        floor: a value that the axis contains; for percent always 0.
    """
    factor, floor = (100.0, 0.0) if unit == PERCENT else (1.0, floor)
    shown = {}
    for number, curve in enumerate(curves[:COLOURS]):
        kept = [
            (x, y * factor) for x, y in zip(curve.x, curve.y, strict=True) if _is_shown(y, logarithmic) and x < 1e15
        ]
        if kept:
            shown[number] = kept
    if not shown:
        return None
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    bands = {
        number: [(x, low * factor, high * factor) for x, low, high in zip(curve.x, curve.low, curve.high, strict=True)]
        for number, curve in enumerate(curves)
        if number in shown and curve.low and not logarithmic
    }
    ys += [end for band in bands.values() for _, *ends in band for end in ends]
    low, high = min(ys), max(ys)
    if floor is not None and not logarithmic:
        low, high = min(low, floor * factor), max(high, floor * factor)
    plot = _Axes((min(xs), max(xs)), (low, high), logarithmic=logarithmic)
    plot.x_axis(ticks(min(xs), max(xs), whole=True), x_label)
    for value in log_ticks(low, high) if logarithmic else ticks(low, high, 4):
        plot.add('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>', plot.left, plot.y(value), plot.right)
        plot.text(plot.left - 7, plot.y(value) + 4, compact(value), "end")
    for number, points in shown.items():
        if band := bands.get(number):
            ends = [(x, start) for x, start, _ in band] + [(x, end) for x, _, end in reversed(band)]
            plot.add('<path class="band c{}" d="{}Z"/>', number, plot.path(ends))
        plot.add('<path class="line c{}" d="{}"/>', number, plot.path(points))
        for x, y in points if marks or len(points) == 1 else ():
            plot.add('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"/>', number, plot.x(x), plot.y(y))
    lost = sum(not _is_shown(y, logarithmic) for curve in curves[:COLOURS] for y in curve.y)
    reason = "are not finite or not positive" if logarithmic else "are not finite"
    note = f"{lost:,} values {reason} and are left out." if lost else ""
    legend = [(number, curves[number].label) for number in shown] if len(curves) > 1 else []
    description = f"{title}: from {compact(min(ys))} to {compact(max(ys))}{f' {unit}' if unit else ''}"
    return Chart(title, plot.svg(description), unit, legend, note)


def heat_map(
    title: str, rows: Sequence[str], steps: Sequence[int], values: Sequence[Sequence[float]], scale: tuple[str, str]
) -> Chart | None:
    """Draw a value in [0, 1] of each row at each step as a colour; None without any.

    Args:
        title: caption.
        rows: their names, from the top.
        steps: of the columns.
        values: rows × columns; NaN stays empty.
        scale: labels of 0 and 1.
    """
    if not rows or not steps:
        return None
    plot = _Axes((steps[0], steps[-1]), (len(rows), 0.0), height=min(420.0, max(150.0, 60.0 + 11.0 * len(rows))))
    table, anchors = np.asarray(values, dtype=np.float64), [[*bytes.fromhex(each[1:])] for each in CIVIDIS]
    place = np.nan_to_num(np.clip(table, 0.0, 1.0)) * (len(CIVIDIS) - 1)
    colours = [np.interp(place, range(len(CIVIDIS)), channel) for channel in zip(*anchors, strict=True)]
    pixels = np.stack([*colours, 255.0 * ~np.isnan(table)], axis=-1).round().astype(np.uint8)
    plot.add(
        '<image class="map-colours" href="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '
        'preserveAspectRatio="none"/>',
        png_uri(Image.fromarray(pixels, "RGBA")),
        *(plot.left, plot.top, plot.right - plot.left, plot.bottom - plot.top),
    )
    plot.x_axis(ticks(steps[0], steps[-1], whole=True), "step", grid=False)
    every = math.ceil(len(rows) / 16)
    for number in range(0, len(rows), every):
        name = rows[number] if len(rows[number]) <= 7 else f"{rows[number][:6]}…"  # the whole is shown on pointing
        plot.add(
            '<text class="name" x="{:.1f}" y="{:.1f}" text-anchor="end">{}<title>{}</title></text>',
            *(plot.left - 7, plot.y(number + 0.5) + 4, name, rows[number]),
        )
    return Chart(title, plot.svg(f"{title}, by step"), scale=scale)


def _is_shown(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and abs(value) < 1e30 and (value > 1e-30 or not logarithmic)


class _Axes:
    """A pair of axes.

    Args:
        x: ends of the horizontal axis.
        y: ends of the vertical axis, its lower end first; of the first above the second, it points downwards.
        height: in CSS pixels.
        logarithmic: use a logarithmic vertical axis.
    """

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], *, height: float = HEIGHT, logarithmic: bool = False
    ):
        self.height, self._logarithmic = height, logarithmic
        self.left, self.right, self.top, self.bottom = 48, WIDTH - 16, 8, height - 38
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
                self.add('<path class="grid" d="M{:.1f} {:.1f}V{:.1f}"/>', place, self.top, self.bottom)
            self.text(place, self.bottom + 15, compact(value), "middle")
        self.text((self.left + self.right) / 2, self.bottom + 31, label, "middle")

    def path(self, points: Iterable[tuple[float, float]]) -> Markup:
        """Return the line through points as a path; it is numbers alone, and never cut as text is."""
        return Markup("M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points))

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        """Write a text at a place in pixels."""
        self.add('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>', x, y, anchor, text)

    def add(self, template: str, *values: object) -> None:
        """Add an element; values are escaped."""
        fit = [plain(each, 300) if type(each) is str else each for each in values]
        self._parts.append(Markup(template).format(*fit))

    def svg(self, description: str) -> Markup:
        """Return the figure, with a text for those who cannot see it."""
        head = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">').format(
            WIDTH, self.height, plain(description, 300)
        )
        return head + Markup("").join(self._parts) + Markup("</svg>")


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


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most five powers of ten between two positive numbers, or round ones if there is at most one power."""
    powers = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return powers[:: math.ceil(len(powers) / 5)] if len(powers) > 1 else ticks(low, high)


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


def plain(text: object, most: int = MAX_TEXT) -> str:
    """Return a text with invisible characters made visible, and cut if it is long. It may still contain markup."""
    text = str(text)
    return printable(text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)")


def image_uri(content: bytes | None) -> Markup | None:
    """Return the address of a PNG or JPEG image; None for anything else, and for a large one."""
    if not content:
        return None
    try:
        with Image.open(io.BytesIO(content), formats=tuple(_TYPES)) as image:
            kind, size = image.format, image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    if kind is None or kind not in _TYPES or max(size) > MAX_SIDE:  # MPO, several images, is opened as JPEG
        return None
    return _address(_TYPES[kind], content)


def png_uri(image: Image.Image) -> Markup:
    """Return the address of an image as PNG."""
    content = io.BytesIO()
    image.save(content, format="PNG", compress_level=1)
    return _address("image/png", content.getvalue())


def _address(kind: str, content: bytes) -> Markup:
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")
