"""Accuracy against bits of several models: prefixes of their ids, and seeds, as a table, a page and files.

    points = measure({"few": [(prefixes, results) of each seed], "many": [(prefixes, results)]})
    print(format_points(points))
    write_text(path, points_page(points))

Models of one group differ only in their seed; results are those of `vqclip.evaluation.evaluate` with `Prefixes`.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from vqclip.evaluation import Prefixes, Result, main_figures
from vqclip.evaluation.intervals import wilson
from vqclip.evaluation.results import figure_title, percent, table
from vqclip.report.page import render
from vqclip.report.plot import COLOURS, PERCENT, Curve, line_chart


@dataclasses.dataclass(frozen=True)
class Point:
    """One figure of one task, codes only, with one prefix of the ids: the mean over the models of a group."""

    task: str
    """Name of the task."""
    figure: str
    """Name of the figure, such as `top1`."""
    group: str
    """Name of the models that differ only in their seed."""
    ids: str
    """``2 of 4 stages``, ``8 of 16 codebooks``, ``all ids``, or ``no codes``: the continuous figure."""
    bits_per_image: float | None
    """Size of these ids of an image; None without codes."""
    bits_per_text: float | None
    """Mean size of the ids of a text that are compared with them; None without codes or without texts."""
    rate: float
    """Mean over the models."""
    low: float
    """Lower end of the 95 % interval over images of a single model; lowest rate of several models."""
    high: float
    """Upper end of the interval; highest rate."""
    rates: list[float]
    """Rate of each model."""
    chance: float
    """Expectation for random embeddings."""
    main: bool
    """Whether table and plot contain the figure."""


def measure(groups: Mapping[str, Sequence[tuple[Prefixes, Sequence[Result]]]]) -> list[Point]:
    """Return every figure of every prefix of every group.

    Args:
        groups: name → prefixes and results of each model of the group; all models have the same tasks.
    """
    return [
        point
        for name, models in groups.items()
        for task in range(len(models[0][1]))
        for point in _points(name, [(prefixes, results[task]) for prefixes, results in models])
    ]


def _points(group: str, models: Sequence[tuple[Prefixes, Result]]) -> Iterator[Point]:
    """Yield the points of one task of a group; of models without codes those of the continuous figures."""
    prefixes, first = models[0]
    known = {mode: prefix for mode, prefix in prefixes.modes["image"].items() if first.figures.get(mode)}
    for mode in known or ("continuous",):
        ids, bits = "no codes", dict[str, list[float]]()
        if known:
            of = zip(known[mode], map(max, zip(*known.values(), strict=True)), ("stages", "codebooks"), strict=True)
            ids = ", ".join(f"{number} of {most} {word}" for number, most, word in of if number < most) or "all ids"
            each = {side: [p.bits(result, side, mode) for p, result in models] for side in ("image", "text")}
            bits = {side: found for side in each if (found := [size for size in each[side] if size is not None])}
        for figure, chance in first.chance.items():
            rates = [(result.figures[mode] or {})[figure] for _, result in models]
            low, high = min(rates), max(rates)
            if len(rates) == 1:
                low, high = first.intervals.get(mode, {}).get(figure) or wilson(rates[0], first.samples)
            yield Point(
                task=first.name,
                figure=figure,
                group=group,
                ids=ids,
                bits_per_image=fmean(bits["image"]) if "image" in bits else None,
                bits_per_text=fmean(bits["text"]) if "text" in bits else None,
                rate=fmean(rates),
                low=low,
                high=high,
                rates=rates,
                chance=chance,
                main=first.pixels is not None or figure in main_figures(first)[1],
            )


def format_points(points: Sequence[Point]) -> str:
    """Return a table of the main figures of each task, in percent."""
    return "\n\n".join(_table([each for each in points if each.task == task]) for task in _tasks(points))


def _tasks(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.task for point in points))


def _table(points: Sequence[Point]) -> str:
    shown = [point for point in points if point.main]
    figures = {point.figure: point.chance for point in shown}
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for point in shown:
        bits = ["-" if each is None else f"{each:.0f}" for each in (point.bits_per_image, point.bits_per_text)]
        cell = f"{percent(point.rate)} ({percent(point.low)}–{percent(point.high)})"
        rows.setdefault((point.group, point.ids, *bits), {})[point.figure] = cell
    body = [(*row, *(cells.get(figure, "-") for figure in figures)) for row, cells in rows.items()]
    body.append(("chance", "", "", "", *(f"{100 * chance:.2f}" for chance in figures.values())))
    heads = (f"{points[0].task}, codes only, %", "ids", "bits/image", "bits/text", *map(figure_title, figures))
    kinds = ("95 % intervals over the images of one model", "lowest and highest of several seeds")
    spreads = dict.fromkeys(kinds[len(each.rates) > 1] for each in points)
    return f"{table(heads, body, left=2)}\nIn brackets: {' and '.join(spreads)}"


def points_csv(points: Sequence[Point]) -> str:
    """Return a row for each point, with the names of its fields above."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Point)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(point) | {"rates": " ".join(map(str, point.rates))} for point in points)  # None: empty
    return text.getvalue()


def points_page(points: Sequence[Point]) -> str:
    """Return HTML with a figure for each main figure of each task: a line for each group, by stages or by codebooks.

    Models without codes and chance are horizontal lines. Of more than `COLOURS` lines the first are drawn.
    """
    charts = []
    main = [point for point in points if point.main]
    for task, figure in dict.fromkeys((point.task, point.figure) for point in main):
        own = [point for point in main if (point.task, point.figure) == (task, figure)]
        bits = [point.bits_per_image for point in own if point.bits_per_image is not None] or [0.0]
        ends, curves = [min(bits), max(bits)], [Curve("chance", [min(bits), max(bits)], [own[0].chance] * 2)]
        for group in dict.fromkeys(point.group for point in own):
            mine = [point for point in own if point.group == group]
            for word, ending in (("stages", ""), ("codebooks", ", by codebooks")):
                line = [each for each in mine if word in each.ids or each.ids == "all ids"]
                line.sort(key=lambda each: each.bits_per_image or 0.0)
                if len(line) > 1 or (line and not ending):
                    curves.append(_curve(group + ending, [each.bits_per_image or 0.0 for each in line], line))
            if mine[0].ids == "no codes":
                curves.append(_curve(f"{group} (no codes)", ends, [mine[0]] * 2))
        title = f"{task}: {figure_title(figure)}, codes only"
        charts.append(line_chart(title, curves[:COLOURS], unit=PERCENT, x_label="bits an image", marks=True))
    return render("frontier.html", title=", ".join(_tasks(points)), charts=charts)


def _curve(label: str, bits: Sequence[float], points: Sequence[Point]) -> Curve:
    return Curve(label, bits, *([getattr(each, key) for each in points] for key in ("rate", "low", "high")))
