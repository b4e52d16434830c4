"""Details of an evaluation as figures and images: hits and misses, classes, code maps, galleries, bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from vqclip.evaluation.details import Bits, ClassAccuracy, Codes, Confusion, Gallery, ShownImage
from vqclip.evaluation.tables import figure_title
from vqclip.report.charts import PERCENT, Chart, Curve, line_chart, table_chart
from vqclip.report.evaluations import MAX_FIGURES
from vqclip.report.images import draw_map, find_grid, png_uri
from vqclip.report.run_charts import MAX_CURVES

__all__ = ["MAX_FIGURES", "SHOWN_CLASSES", "bits_chart", "code_maps", "confusion_chart", "galleries", "worst_classes"]

MAX_MAPS = 8
"""Images with code maps."""
MAX_MAP_TOKENS = 4096
"""Tokens of an image with code maps."""
SHOWN_CLASSES = 12
"""Classes that are shown at once; the others are folded away."""


def code_maps(codes: Codes) -> list[tuple[ShownImage, list[Markup]]]:
    """Return images, and for each the address of a map of each codebook."""
    found = []
    for each in codes.maps[:MAX_MAPS]:
        tokens = each.ids[:MAX_MAP_TOKENS]
        rows, columns = codes.grid or find_grid(len(tokens))
        if rows * columns != len(tokens) or any(len(ids) != len(codes.codebooks) for ids in tokens):
            continue
        maps = [draw_map([ids[c] for ids in tokens], columns) for c in range(len(codes.codebooks))]
        found.append((each.image, [png_uri(image) for image in maps]))
    return found


def galleries(codes: Codes) -> list[tuple[str, list[Gallery]]]:
    """Return the names of codebooks, and for each its codes with patches."""
    found: dict[int, list[Gallery]] = {}
    for gallery in codes.galleries:
        if gallery.codebook < len(codes.codebooks) and gallery.patches:
            found.setdefault(gallery.codebook, []).append(gallery)
    return [(codes.codebooks[number].name, each) for number, each in found.items()]


def bits_chart(bits: Bits) -> Chart | None:
    """Draw accuracy against bits; figures that not every point has are left out."""
    if len(bits.points) < 2:
        return None
    names = [name for name in bits.points[0].figures if all(name in point.figures for point in bits.points)]
    curves = [bits_curve(figure_title(name), bits, name) for name in names[:MAX_CURVES]]
    chart = line_chart("Accuracy against bits", curves, unit=PERCENT, x_label="bits an image", marks=True, floor=0.0)
    return None if chart is None else replace(chart, note=bits_note([bits]))


def bits_note(found: Sequence[Bits]) -> str:
    """Return the number of images that the points were measured on, which are fewer than in other figures."""
    images = " or ".join(f"{count:,}" for count in sorted({bits.images for bits in found}))
    return f"On {images} images, evenly spread over the set: rates differ from those of the whole set."


def bits_curve(label: str, bits: Bits, figure: str) -> Curve:
    """Return one figure of the points that have it, with intervals."""
    points = [point for point in bits.points if figure in point.figures]
    rates = [point.figures[figure] for point in points]
    ends = [point.intervals.get(figure, (rate, rate)) for point, rate in zip(points, rates, strict=True)]
    return Curve(label, [p.bits_per_image for p in points], rates, [low for low, _ in ends], [high for _, high in ends])


def confusion_chart(confusion: Confusion) -> Chart | None:
    """Draw the confusion matrix, each row as shares of its class."""
    size = len(confusion.classes)
    if size < 2 or len(confusion.counts) != size or any(len(row) != size for row in confusion.counts):
        return None
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion.counts]
    title = "Confusion of all classes" if confusion.complete else f"Confusion of the {size} most confused classes"
    names = [f"{name} {number}" for number, name in enumerate(confusion.classes, start=1)]
    return table_chart(title, names, shares, "predicted class, by its number", ("0 % of a class", "100 %"))


def worst_classes(classes: Sequence[ClassAccuracy]) -> list[ClassAccuracy]:
    """Return all classes, those with the lowest accuracy first."""
    modes = ("codes_only", "quantized", "continuous")
    return sorted(classes, key=lambda each: next((each.accuracy[mode] for mode in modes if mode in each.accuracy), 0.0))
