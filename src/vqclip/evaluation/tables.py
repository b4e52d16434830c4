"""Tables of results as plain text, with chance beside every figure."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from vqclip.errors import count_noun, printable
from vqclip.evaluation.encode import MODES, Mode
from vqclip.evaluation.results import PixelResult, Result

MODE_TITLES = {"continuous": "continuous", "quantized": "quantized", "codes_only": "codes only"}
_WIDE = 80
"""Columns of a table from which its heads are broken."""
_DIRECTIONS = {"i2t": "image to text", "t2i": "text to image"}
_PIXEL_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "psnr": ("PSNR (dB)", "{:.2f}".format),
    "psnr_of_mse": ("PSNR of the mean error (dB)", "{:.2f}".format),
    "ssim": ("SSIM", "{:.3f}".format),
    "ms_ssim": ("MS-SSIM", "{:.3f}".format),
    "mae": ("mean abs. error", "{:.4f}".format),
    "perceptual": ("perceptual distance", "{:.4f}".format),
    "lpips": ("LPIPS", "{:.4f}".format),
}
"""Figure → its title, and how it is written."""


def format_results(results: Sequence[Result]) -> str:
    """Return a table of the figures in percent and a table of the codes, with the notes below."""
    figures = [*_group_rows((_title(result), row) for result in results for row in _figure_rows(result))]
    parts = [table(("%", *MODE_TITLES.values(), "chance"), figures, left=1)] if figures else []
    parts += [_pixel_table(result, result.pixels) for result in results if result.pixels is not None]
    codes = [*_group_rows(dict.fromkeys((result.name, row) for result in results for row in _code_rows(result)))]
    if codes:
        heads = ("codes", "samples", "tokens", "used, %", "perplexity", "bits/token used", "bits/sample")
        parts.append(table(heads, codes, left=1))
    notes = dict.fromkeys(
        printable(f"{result.name}: {note}", one_line=True) for result in results for note in result.notes
    )
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def format_line(result: Result) -> str:
    """Return the main figures of a result in one line, as the ids alone give them if there are codes."""
    mode, figures = main_figures(result)
    title = f"{result.name} ({MODE_TITLES[mode]})"
    if result.pixels is not None:
        shown = [f"{key.upper()} {format_figure(key, value)}" for key, value in figures.items()]
        return printable(f"{title}: {', '.join(shown)}", one_line=True)
    chances = [f"chance {percent(result.chance[key])} %" for key in figures]
    shown = [f"{figure_title(key)} {percent(rate)} %" for key, rate in figures.items()]
    if len(set(chances)) == 1:
        return printable(f"{title}: {', '.join(shown)} ({chances[0]})", one_line=True)
    told = (f"{each} ({chance})" for each, chance in zip(shown, chances, strict=True))
    return printable(f"{title}: {', '.join(told)}", one_line=True)


def main_figures(result: Result) -> tuple[Mode, dict[str, float]]:
    """Return the last mode that a result has, and its figures, of several depths (R@1, R@5) the first.

    Of reconstructed images these are PSNR and SSIM.
    """
    mode = [mode for mode in MODES if result.figures[mode] is not None][-1]
    figures = result.figures[mode] or {}
    if result.pixels is not None:
        return mode, {figure: figures[figure] for figure in ("psnr", "ssim") if figure in figures}
    found: dict[str, tuple[str, float]] = {}
    for figure, rate in figures.items():
        found.setdefault(figure.rstrip("0123456789"), (figure, rate))
    return mode, dict(found.values())


def _figure_rows(result: Result) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for figure, chance in result.chance.items():
        found = [result.figures[mode] for mode in MODES]
        shown = ["-" if figures is None else percent(figures[figure]) for figures in found]
        rows.append((figure_title(figure), *shown, f"{100 * chance:.2f}"))
    return rows


def _pixel_table(result: Result, pixels: PixelResult) -> str:
    """Return the table of the ways to store an image, with what its figures depend on above it."""
    columns = [key for key in _PIXEL_FIGURES if any(key in row.figures for row in pixels.rows)]
    heads = ("stored as", "bits/image", *(_PIXEL_FIGURES[key][0] for key in columns))
    rows = []
    for row in pixels.rows:
        bits = "-" if row.bits_per_image is None else f"{row.bits_per_image:.0f}"
        fits = "" if row.within in (None, 1) else f" ({100 * row.within:.0f} % fit)" if row.within else " (too large)"
        cells = [_PIXEL_FIGURES[key][1](row.figures[key]) if key in row.figures else "-" for key in columns]
        rows.append((row.method + fits, bits, *cells))
    about = (
        f"{result.name}: {result.samples} images of {pixels.reference}, {pixels.image_size} px: {pixels.preprocessing}"
    )
    same = (result.figures["codes_only"] or {}).get("id_agreement")
    lines = [about, "", table(heads, rows, left=1)]
    if same is not None:
        lines += ["", f"ids that are the same after encoding the reconstruction again: {percent(same)} %"]
    lines += [f"{name}: {value:.4g}" for name, value in pixels.distances.items()]
    return "\n".join([printable(lines[0], one_line=True), *lines[1:]])


def _title(result: Result) -> str:
    captions = count_noun(result.captions or 0, "caption")
    others = captions if result.classes is None else f"{result.classes:,} classes"
    return f"{result.name} ({count_noun(result.samples, 'image')}, {others})"


def figure_title(figure: str) -> str:
    """Return a readable title: ``image to text R@5`` for ``i2t_r5``, ``top-1`` for ``top1``."""
    if figure in _PIXEL_FIGURES:
        return _PIXEL_FIGURES[figure][0]
    which, _, rest = figure.partition("_")
    if which in ("original", "reconstructed"):
        return f"{which}: {figure_title(rest)}"
    direction, _, depth = figure.partition("_r")
    if direction in _DIRECTIONS:
        return f"{_DIRECTIONS[direction]} R@{depth}"
    return re.sub(r"\btop(\d)", r"top-\1", figure.replace("_", " ")).replace("knn", "k-NN")


def _group_rows(pairs: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Yield rows below the title of each run of pairs that have the same."""
    for title, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield (title,)
        yield from (row for _, row in group)


def _code_rows(result: Result) -> Iterator[tuple[str, ...]]:
    for modality, usage in result.usage.items():
        if usage is None:
            continue
        many = len(usage.codebook_sizes)
        used, perplexity = sum(usage.usage) / many, sum(usage.perplexity) / many
        bits = f"{usage.bits_used_per_token:.2f} of {usage.bits_per_token:.2f}"
        cells = percent(used), f"{perplexity:.1f}", bits, f"{usage.bits_per_sample:.0f}"
        yield (modality, str(usage.samples), str(usage.tokens), *cells)


def format_figure(name: str, value: float) -> str:
    """Return a figure with its unit: ``97.5%``, ``21.70 dB`` for PSNR, ``0.912`` for SSIM.

    Args:
        name: name of the figure; names of task and mode may be before it, such as ``pixels/codes_only/psnr``.
        value: rates are in 0..1.
    """
    figure = name.rpartition("/")[2]
    if figure not in _PIXEL_FIGURES:
        return f"{value:.1%}"
    return _PIXEL_FIGURES[figure][1](value) + (" dB" if figure.startswith("psnr") else "")


def percent(rate: float) -> str:
    """Format a rate in percent: ``50.0`` for 0.5."""
    return f"{100 * rate:.1f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Format columns two spaces apart; the first ``left`` are aligned left, the others right.

    A row of one cell is the title of the rows below it, which are indented. The heads of a table that is wider than 80
    columns are broken between words.
    """
    indent = "  " if any(len(row) == 1 for row in rows) else ""
    head, *body = [[printable(cell, one_line=True) for cell in row] for row in (heads, *rows)]
    body = [row if len(row) == 1 else [indent + row[0], *row[1:]] for row in body]
    columns = [*zip(head, *(row for row in body if len(row) > 1), strict=True)]
    widths, broken = [max(map(len, column)) for column in columns], [[each] for each in head]
    if sum(widths) + 2 * (len(widths) - 1) > _WIDE:
        widths = [max(min(10, len(name)), *map(len, (*name.split(), *column))) for name, *column in columns]
        broken = [textwrap.wrap(name, width) or [""] for name, width in zip(head, widths, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    most = max(map(len, broken))
    titles = map(line, zip(*([""] * (most - len(each)) + each for each in broken), strict=True))
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*titles, rule, *(row[0] if len(row) == 1 else line(row) for row in body)])
