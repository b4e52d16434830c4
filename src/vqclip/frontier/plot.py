"""Plot of accuracy against bits: a panel for each main figure of each task."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqclip.errors import ConfigError, printable
from vqclip.evaluation.tables import figure_title
from vqclip.frontier.points import Frontier, Point
from vqclip.io.atomic import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_STYLES = {"": "none", ", by stages": "-", ", by codebooks": "-."}
"""Style of a line by the end of its label."""


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib, which draws the plot, is not installed; without importing it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot of vqclip frontier needs matplotlib: pip install 'vqclip[frontier]'")


def draw(frontier: Frontier, path: Path) -> None:
    """Write the plot as the ``.svg`` or ``.png`` that the path names; equal points give equal bytes.

    The axis of bits is logarithmic. Lines join the prefixes of one group, by stages (solid) and by codebooks
    (dash-dotted); error bars are the intervals of the points, dotted lines chance, dashed lines models without codes.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    main = [point for point in frontier.points if point.main]
    panels = list(dict.fromkeys((point.task, point.figure) for point in main))
    columns = min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(5.5 * columns, 3.8 * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    for number, (task, name) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        own = [point for point in main if (point.task, point.figure) == (task, name)]
        handles |= _panel(axes, own, list(frontier.runs))
        axes.set_title(_plain(task), fontsize=10, parse_math=False)
        axes.set_ylabel(f"{figure_title(name)}, codes only, %", parse_math=False)
    legend = figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    kind, content = path.suffix.removeprefix("."), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "vqclip"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a name; a box takes its place
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    write_file(path, content.getvalue())


def _panel(axes: Axes, points: Sequence[Point], groups: Sequence[str]) -> dict[str, Any]:
    """Draw a panel; return the handles of the legend by their labels."""
    found: dict[str, Any] = {" chance": axes.axhline(100 * points[0].chance, color="0.4", linestyle=":")}
    for number, group in enumerate(groups):
        colour, label = f"C{number % 10}", f" {_plain(group)}"  # matplotlib hides labels that begin with _
        own = [point for point in points if point.group == group]
        for axis, line in _lines([point for point in own if point.bits_per_image]).items():
            bits, rates = [point.bits_per_image or 0 for point in line], [100 * point.rate for point in line]
            # Rounding may put the mean of equal rates beside them.
            below = [max(0.0, 100 * (point.rate - point.low)) for point in line]
            above = [max(0.0, 100 * (point.high - point.rate)) for point in line]
            found[label + axis] = axes.errorbar(
                bits, rates, [below, above], color=colour, linestyle=_STYLES[axis], marker="o", markersize=4,
                capsize=2, linewidth=1.3, elinewidth=0.8,
            )  # fmt: skip
        for point in own:
            if not point.bits_per_image:
                found[f"{label} (no codes)"] = axes.axhline(100 * point.rate, color=colour, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("bits per image")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return found


def _lines(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the prefixes by stages with all codebooks, and those by codebooks with all stages; or a single point."""
    if len(points) < 2:
        return {"": list(points)} if points else {}
    stages, codebooks = (max(getattr(point, axis) for point in points) for axis in ("stages", "codebooks"))
    lines = {
        ", by stages": [point for point in points if point.codebooks == codebooks],
        ", by codebooks": [point for point in points if point.stages == stages],
    }
    return {axis: line for axis, line in lines.items() if len(line) > 1}


def _plain(text: str) -> str:
    text = printable(text, one_line=True)
    return text if len(text) <= 60 else text[:59] + "…"
