"""Kinds of figures on a page: curves over steps, heat maps of codebooks, rates with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from vqclip.report.drawing import FAINT, SERIES, TEXT, draw

PERCENT = "%"


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    """Values; those that are not finite leave a gap and are counted below the figure."""
    low: Sequence[float] | None = None
    """Lower ends of intervals."""
    high: Sequence[float] | None = None


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
        curves: at most eight.
        unit: of the values; `PERCENT` shows rates in [0, 1] as percent.
        x_label: unit of the other axis.
        logarithmic: use a logarithmic scale; values that are not positive are left out.
        marks: draw a mark at each value.
        floor: a value that the axis contains.
    """
    factor = 100.0 if unit == PERCENT else 1.0
    shown: list[tuple[int, Curve, list[tuple[float, float]]]] = []
    lost = 0
    for number, curve in enumerate(curves[: len(SERIES)]):
        pairs = list(zip(curve.x, curve.y, strict=True))
        kept = [(x, y * factor) for x, y in pairs if math.isfinite(y) and abs(y) < 1e30 and (y > 0 or not logarithmic)]
        lost += len(pairs) - len(kept)
        if kept:
            shown.append((number, curve, kept))
    if not shown:
        return None

    def paint(axes):  # type: ignore[no-untyped-def]
        for number, curve, pairs in shown:
            x, y = [each for each, _ in pairs], [each for _, each in pairs]
            lonely = len(pairs) == 1 or marks
            axes.plot(x, y, color=SERIES[number], marker="o" if lonely else None, markersize=4)
            if curve.low is not None and curve.high is not None and len(curve.low) == len(pairs):
                low, high = [each * factor for each in curve.low], [each * factor for each in curve.high]
                axes.fill_between(x, low, high, color=SERIES[number], alpha=0.18, linewidth=0)
        if logarithmic:
            axes.set_yscale("log")
        elif floor is not None:
            axes.axhline(floor * factor, color="none")
        _finish(axes, x_label, logarithmic)

    values = [y for _, _, pairs in shown for _, y in pairs]
    description = f"{title}: from {compact(min(values))} to {compact(max(values))}{f' {unit}' if unit else ''}"
    legend = [(number, curve.label) for number, curve, _ in shown] if len(curves) > 1 else []
    note = (
        f"{lost:,} values are not finite{' or not positive' if logarithmic else ''} and are left out." if lost else ""
    )
    return Chart(title, draw(paint, description), unit, legend, note)


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
    import numpy as np

    table = np.clip(np.asarray(values, dtype=np.float64), 0.0, 1.0)
    last = steps[-1] if steps[-1] > steps[0] else steps[0] + 1
    height = min(420.0, max(150.0, 60.0 + 11.0 * len(rows)))

    def paint(axes):  # type: ignore[no-untyped-def]
        axes.imshow(
            table,
            cmap="cividis",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="none",
            extent=(steps[0], last, len(rows), 0),
        )
        axes.grid(False)
        every = max(1, math.ceil(len(rows) / 16))
        axes.set_yticks([number + 0.5 for number in range(0, len(rows), every)], [_cut(each) for each in rows[::every]])
        axes.tick_params(length=0)
        _finish(axes, "step", True)

    return Chart(title, draw(paint, f"{title}, by step", height=height), scale=scale)


def table_chart(
    title: str, names: Sequence[str], values: Sequence[Sequence[float]], x_label: str, scale: tuple[str, str]
) -> Chart:
    """Draw a square table of values in [0, 1] as colours; columns have the numbers of the rows, from 1.

    Args:
        title: caption.
        names: of the rows.
        values: rows × columns.
        x_label: label of the columns.
        scale: labels of 0 and 1.
    """
    import numpy as np

    size = len(names)
    side = max(150.0, min(13.0 * size, 400.0))

    def paint(axes):  # type: ignore[no-untyped-def]
        extent = (0.5, size + 0.5, size + 0.5, 0.5)
        table = np.asarray(values, dtype=np.float64)
        axes.imshow(table, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="none", extent=extent)
        axes.grid(False)
        axes.set_yticks(range(1, size + 1), [_cut(name, 26) for name in names], fontsize=9)
        _finish(axes, x_label, True)
        axes.margins(x=0)

    return Chart(title, draw(paint, title, width=480, height=side + 44, margins=(170, 14, 36, 6)), scale=scale)


def rate_chart(
    title: str,
    rows: Sequence[tuple[str, Sequence[float | None], Sequence[tuple[float, float] | None], float | None]],
    labels: Sequence[str],
) -> Chart | None:
    """Draw rates in [0, 1] as dots with 95 % intervals, and chance as a line across the row.

    Args:
        title: caption.
        rows: name, a rate for each label, an interval for each label, chance.
        labels: of the dots.
    """
    if not rows:
        return None
    height = 44.0 + 13.0 * len(rows) * max(2, len(labels))

    def paint(axes):  # type: ignore[no-untyped-def]
        for place, (_, rates, intervals, chance) in enumerate(rows):
            if chance is not None:
                axes.plot([100 * chance] * 2, [place - 0.42, place + 0.42], color=FAINT, linewidth=1.2, linestyle=":")
            for number, (rate, interval) in enumerate(zip(rates, intervals, strict=True)):
                y = place + (number - (len(labels) - 1) / 2) * 0.28
                if interval is not None:
                    axes.plot(
                        [100 * interval[0], 100 * interval[1]], [y, y], color=SERIES[number], linewidth=2.2, alpha=0.5
                    )
                if rate is not None:
                    axes.plot([100 * rate], [y], color=SERIES[number], marker="o", markersize=4.5, linestyle="none")
        axes.set_yticks(range(len(rows)), [_cut(row[0], 24) for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(-1.5, 101.5)
        axes.tick_params(length=0)
        axes.yaxis.set_tick_params(labelcolor=TEXT)
        _finish(axes, "% of the queries or images", True, limits=False)

    chart = draw(paint, title, height=height, margins=(142, 16, 36, 4))
    return Chart(title, chart, PERCENT, [*enumerate(labels)])


def compact(value: float) -> str:
    """Format a number for an axis: ``0.25``, ``1,500``, ``20k``, ``1.5M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _finish(axes, x_label: str, keeps_rows: bool, limits: bool = True) -> None:  # type: ignore[no-untyped-def]
    """Set few ticks with short labels, which cost most of the time of a small figure."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=limits, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if not keeps_rows:
        axes.yaxis.set_major_locator(MaxNLocator(4))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    if not keeps_rows or axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.tick_params(length=0, pad=5)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(x_label, fontsize=10)
    axes.margins(x=0.02)


def _cut(text: str, most: int = 8) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
