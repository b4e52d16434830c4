"""Figures of one run, from its curves and from the details of its evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vqclip.evaluation import Result
from vqclip.evaluation.pixels import CODES
from vqclip.evaluation.results import MODE_TITLES, figure_title
from vqclip.report.plot import PERCENT, Chart, Curve, heat_map, line_chart
from vqclip.report.run_files import MAX_FIGURES
from vqclip.runlog.health import CODED, Codebook
from vqclip.runlog.metrics import Curves

MAX_CURVES = 8
FEW_CODEBOOKS = 4
"""Codebooks up to which each has a curve; more are a heat map."""
MAX_ROWS = 256
"""Codebooks in a heat map: the first ones."""
_UNITS = {"psnr": "dB", "psnr_of_mse": "dB", "ssim": "SSIM"}
"""Units of figures other than rates."""


def training_charts(curves: Curves) -> tuple[list[Chart], list[Chart]]:
    """Return loss terms and gradient norm; then, for who asks, learning rate, throughput and waiting for data."""
    terms = [name for name in curves.names() if name.startswith("loss/")]
    losses = [name for name in terms if name != "loss/total"] or terms
    if len(losses) > 1 and "loss/total" in terms:
        losses = ["loss/total", *losses]
    groups = [losses[start : start + MAX_CURVES] for start in range(0, min(len(losses), 3 * MAX_CURVES), MAX_CURVES)]
    shown = [
        *(_lines("Loss (more terms)" if number else "Loss", curves, group) for number, group in enumerate(groups)),
        _lines("Gradient norm", curves, ["grad_norm"], logarithmic=True),
        _lines("Learning rate", curves, ["lr"], floor=0.0),
    ]
    folded = [
        _lines("Throughput", curves, ["images_per_second"], unit="images/s", floor=0.0),
        _lines("Waiting for data", curves, ["data_wait"], unit=PERCENT),
        _lines("Temperature", curves, ["temperature/scale"]),
    ]
    if any(curves.get("data/replaced")[1]):
        folded.append(_lines("Bad samples replaced", curves, ["data/replaced"], unit="samples", floor=0.0))
    return _not_empty(shown), _not_empty(folded)


def _not_empty(charts: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def codebook_charts(curves: Curves, codebooks: Sequence[Codebook]) -> tuple[list[Chart], list[Chart]]:
    """Return the usage of each modality and codebook; then, for who asks, perplexity, bits used and embeddings."""
    shown = [_lines("Codes in use", curves, [f"{each}/usage" for each in CODED], unit=PERCENT)]
    folded = [
        _lines("Perplexity", curves, [f"{each}/perplexity" for each in CODED], unit="codes", floor=0.0),
        _lines("Bits used by a token", curves, [f"{each}/bits_used" for each in CODED], unit="bits", floor=0.0),
        _lines("Mean cosine of embeddings", curves, [f"{each}/embedding_cosine" for each in CODED], floor=0.0),
    ]
    for modality in CODED:
        found = [each for each in codebooks if each.modality == modality][:MAX_ROWS]
        if len(found) < 2:
            continue
        bits = max(1e-9, math.log2(found[0].codes))
        for charts, title, metric, unit, full, top in (
            (shown, "Codes in use", "usage", PERCENT, 1.0, "100 %"),
            (folded, "Bits used", "bits_used", "bits", bits, f"{bits:.3g} bits"),
        ):
            names = [f"{each.name}/{metric}" for each in found]
            if len(found) <= FEW_CODEBOOKS:
                charts.append(_lines(f"{title}, {modality}", curves, names, unit=unit, floor=0.0))
            else:
                steps = curves.get(names[0])[0]
                rows = [[curves.steps[step].get(name, math.nan) / full for step in steps] for name in names]
                numbers = [each.number or each.name for each in found]
                charts.append(heat_map(f"{title}, {modality} codebooks", numbers, steps, rows, ("0", top)))
    return _not_empty(shown), _not_empty(folded)


def evaluation_charts(curves: Curves) -> list[Chart]:
    """Return a figure for each task: its rates over steps, codes only where there are codes."""
    found: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for step, values in curves.evaluations.items():
        for key, rate in values.items():
            name, mode, figure = ["", "", *key.rsplit("/", 2)][-3:]
            found.setdefault((name, mode), {}).setdefault(figure, []).append((step, rate))
    charts = []
    for name in list(dict.fromkeys(name for name, _ in found))[:12]:
        mode = "codes_only" if (name, "codes_only") in found else "quantized"
        series = found.get((name, mode), {})
        if max((len(each) for each in series.values()), default=0) < 2:
            continue
        by_unit: dict[str, list[Curve]] = {}
        for figure, pairs in series.items():
            curve = Curve(figure_title(figure), *map(list, zip(*pairs, strict=True)))
            others = by_unit.setdefault(_UNITS.get(figure, PERCENT), [])
            others += [curve] if all(curve.y != each.y for each in others) else []  # such as the mean of equal classes
        title = f"{name} ({MODE_TITLES[mode]})"
        charts += [line_chart(title, lines, unit=unit, marks=True) for unit, lines in by_unit.items()]
    return _not_empty(charts)


def pixel_chart(task: Result) -> Chart | None:
    """Return the PSNR of decoded ids and of codecs against bits; None for other tasks."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in task.pixels.rows[:MAX_FIGURES] if task.pixels else ():
        if row.bits_per_image and "psnr" in row.figures:
            kind = "ids" if row.method.startswith(CODES) else row.method
            found.setdefault(kind, []).append((row.bits_per_image, row.figures["psnr"]))
    curves = [Curve(kind, *map(list, zip(*sorted(points), strict=True))) for kind, points in found.items()]
    return line_chart(f"{task.name}: PSNR against bits", curves, unit="dB", x_label="bits an image", marks=True)


def _lines(title: str, curves: Curves, names: list[str], **options: Any) -> Chart | None:
    """Draw metrics over steps, those of loss terms and of codebooks without their common prefix or suffix."""
    labels = {name: name.rpartition("/")[0] if name.partition("/")[0] in CODED else name for name in names}
    found = [Curve(labels[name].removeprefix("loss/"), *curves.get(name)) for name in names]
    return line_chart(title, [curve for curve in found if curve.x], **options)
