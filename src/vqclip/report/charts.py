"""Kinds of figures on a page: curves over steps, and heat maps of codebooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from vqclip.report.plot import Plot, compact, log_ticks, ticks

PERCENT = "%"
COLOURS = 8
"""Curves that can be told apart in one figure."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    """Values; those that are not finite are left out and counted below the figure."""
    low: Sequence[float] = ()
    """Lower ends of intervals; empty without any."""
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
        floor: a value that the axis contains.
    """
    factor = 100.0 if unit == PERCENT else 1.0
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
    bands = {number: _band(curves[number], factor) for number in shown if not logarithmic}
    ys += [end for band in bands.values() for _, *ends in band for end in ends]
    low, high = min(ys), max(ys)
    if floor is not None and not logarithmic:
        low, high = min(low, floor * factor), max(high, floor * factor)
    plot = Plot((min(xs), max(xs)), (low, high), logarithmic=logarithmic)
    plot.x_axis(ticks(min(xs), max(xs), whole=True), x_label)
    plot.y_axis(log_ticks(low, high) if logarithmic else ticks(low, high, 4))
    for number, points in shown.items():
        if bands.get(number):
            plot.band(bands[number], number)
        plot.line(points, number)
        if marks or len(points) == 1:
            plot.dots(points, number)
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
    plot = Plot((steps[0], steps[-1]), (len(rows), 0.0), height=min(420.0, max(150.0, 60.0 + 11.0 * len(rows))))
    plot.colours(np.asarray(values, dtype=np.float64))
    plot.x_axis(ticks(steps[0], steps[-1], whole=True), "step", grid=False)
    every = math.ceil(len(rows) / 16)
    plot.row_names(rows[::every], [number + 0.5 for number in range(0, len(rows), every)], 7)
    return Chart(title, plot.svg(f"{title}, by step"), scale=scale)


def _is_shown(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and abs(value) < 1e30 and (value > 1e-30 or not logarithmic)


def _band(curve: Curve, factor: float) -> list[tuple[float, float, float]]:
    """Return place and ends of the intervals of a curve; none if a value has none."""
    if len(curve.low) != len(curve.y) or len(curve.high) != len(curve.y):
        return []
    return [(x, low * factor, high * factor) for x, low, high in zip(curve.x, curve.low, curve.high, strict=True)]
