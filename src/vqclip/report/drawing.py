"""SVG figures by matplotlib, for the light and the dark mode of a page.

Figures are drawn with stand-in colours, which become CSS variables in the SVG text. matplotlib's object-oriented
interface is used, with its own default settings: no window, no global figure, no setting of the user's.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT, FAINT, GRID = "#010001", "#010002", "#010003"
"""Stand-ins for the colours of text, of secondary text and of grid lines."""
SERIES = tuple(f"#0200{number:02x}" for number in range(8))
"""Stand-ins for the colours of curves: Okabe and Ito's, which colour-blind people can tell apart."""
WIDTH, HEIGHT = 350, 215
"""Size of a figure in CSS pixels: about that at which a page shows it, so that its text is as large as the page's."""

_VARIABLES = {TEXT: "--text", FAINT: "--faint", GRID: "--grid"} | {
    each: f"--series-{n}" for n, each in enumerate(SERIES)
}
_COLOUR = re.compile("|".join(_VARIABLES))
_IDS = re.compile(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|image)[^"]*"')
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vqclip",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "text.color": TEXT,
    "text.parse_math": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "lines.linewidth": 1.6,
    "figure.dpi": 72,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Set matplotlib's settings for the figures of a page, and restore the former ones."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def draw(
    paint: Callable[[Axes], object],
    description: str,
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
    margins: tuple[float, float, float, float] = (46, 14, 36, 8),
) -> Markup:
    """Return a figure with one pair of axes as SVG; call it within `drawing_settings`.

    Args:
        paint: draws into the axes.
        description: text for those who cannot see the figure.
        width: in CSS pixels.
        height: in CSS pixels.
        margins: left, right, bottom and top of the axes, in CSS pixels.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    FigureCanvasSVG(figure)
    left, right, bottom, top = margins
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height),
        facecolor="none",
    )
    paint(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=_NO_METADATA, transparent=True)
    return _for_page(text.getvalue(), description, width, height)


def _for_page(svg: str, description: str, width: float, height: float) -> Markup:
    """Return the SVG element alone, with CSS variables for colours and without what would reach beyond it."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*;?", "", body)
    body = _COLOUR.sub(lambda found: f"var({_VARIABLES[found[0]]})", _IDS.sub("", body))
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return Markup(f"{head}<title>{escape(description)}</title>{body}")
