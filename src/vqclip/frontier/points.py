"""Points of accuracy against bits, and the table and files that show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vqclip.evaluation.tables import figure_title, percent, table


@dataclasses.dataclass(frozen=True)
class Point:
    """One figure of one task, codes only, with one prefix of the ids: the mean over the runs of a group."""

    task: str
    """Name of the task."""
    figure: str
    """Name of the figure, such as `top1`."""
    group: str
    """Name of the runs that differ only in their seed."""
    stages: int | None
    """Number of stages of an image's ids; None without codes."""
    codebooks: int | None
    """Number of codebooks of each stage; None without codes."""
    bits_per_image: float | None
    """Size of these ids of an image; None without codes."""
    bits_per_text: float | None
    """Mean size of the ids of a text that are compared with them; None without codes or without texts."""
    rate: float
    """Mean over the runs; without codes that of the continuous features."""
    low: float
    """Lower end of the 95 % interval over images of a single run; lowest rate of several runs."""
    high: float
    """Upper end of the interval; highest rate."""
    rates: list[float]
    """Rate of each run."""
    chance: float
    """Expectation for random embeddings."""
    main: bool
    """Whether the table and the plot contain the figure."""


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Accuracy against bits; ``print(frontier)`` shows a table."""

    points: list[Point]
    """Every figure of every prefix of every group; a group's prefixes by stages, by codebooks, and all ids last."""
    runs: dict[str, list[str]]
    """Group → the models that were evaluated."""

    def __str__(self) -> str:
        return "\n\n".join(self._table(task) for task in dict.fromkeys(point.task for point in self.points))

    def label(self, point: Point) -> str:
        """Return which ids a point has: ``2 of 4 stages``, ``8 of 16 codebooks``, ``all ids``, ``no codes``."""
        if point.stages is None:
            return "no codes"
        own = [each for each in self.points if each.group == point.group]
        parts = [
            f"{getattr(point, axis)} of {most} {axis}"
            for axis in ("stages", "codebooks")
            if (most := max(getattr(each, axis) for each in own)) > getattr(point, axis)
        ]
        return ", ".join(parts) or "all ids"

    def _table(self, task: str) -> str:
        points = [point for point in self.points if point.task == task and point.main]
        figures = list(dict.fromkeys(point.figure for point in points))
        rows: dict[tuple[str, ...], dict[str, Point]] = {}
        for point in points:
            bits = ["-" if each is None else f"{each:.0f}" for each in (point.bits_per_image, point.bits_per_text)]
            rows.setdefault((point.group, self.label(point), *bits), {})[point.figure] = point
        body = [(*row, *(_cell(each.get(figure)) for figure in figures)) for row, each in rows.items()]
        chances = {point.figure: f"{100 * point.chance:.2f}" for point in points}
        body.append(("chance", "", "", "", *(chances[figure] for figure in figures)))
        heads = (f"{task}, codes only, %", "ids", "bits/image", "bits/text", *map(figure_title, figures))
        return f"{table(heads, body, left=2)}\nIn brackets: {' and '.join(_spreads(self.runs))}"


def _cell(point: Point | None) -> str:
    return "-" if point is None else f"{percent(point.rate)} ({percent(point.low)}–{percent(point.high)})"


def _spreads(runs: dict[str, list[str]]) -> Iterator[str]:
    counts = {len(each) for each in runs.values()}
    if 1 in counts:
        yield "95 % intervals over the images of one run"
    if counts - {1}:
        yield "lowest and highest of several seeds"
