"""Results of an evaluation; as JSON, as CSV, with their details in a run's folder, and as tables of plain text."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, count_noun, encodable, printable
from vqclip.evaluation.details import Count, Details, Interval, Part
from vqclip.evaluation.encode import MODES, CodeUsage, Encoded, Mode
from vqclip.io.atomic import write_file, write_text
from vqclip.io.json_files import MAX_PLAIN_BYTES, read_plain

FOLDER = "report"
"""Name of their folder in a run's folder."""
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


@dataclasses.dataclass(frozen=True)
class PixelRow:
    """One way to store an image, and what comes back; figures over all images of the set."""

    method: str
    """Name, such as ``codes`` or ``WebP``."""
    bits_per_image: float | None
    """Mean size of a stored image; None where no code is stored."""
    within: float | None
    """Share of the files that are not larger than the codes; None for what is not a file."""
    figures: dict[str, float]
    """``psnr`` and ``psnr_of_mse`` in dB, ``ssim``, ``ms_ssim``, ``mae``; see `vqclip.pixels.metrics`."""
    intervals: dict[str, tuple[float, float]]
    """Figure → 95 % interval, a bootstrap over images."""


@dataclasses.dataclass(frozen=True)
class PixelResult:
    """Everything that pixel figures depend on beside the model, and the rows."""

    reference: str
    """The set of originals."""
    image_size: int
    """Height and width of originals and reconstructions, in pixels."""
    preprocessing: str
    """Crop and resampling of the originals."""
    rows: list[PixelRow]
    """All ids, fewer of them, none, and other methods at as many bytes."""
    distances: dict[str, float] = dataclasses.field(default_factory=dict)
    """Distances of the set of reconstructions from that of originals; the name of each says in which features."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of one task: rates in [0, 1]; of the quality of images also SSIM, and PSNR in dB."""

    name: str
    """Name of the task."""
    kind: str
    """Kind of the task, such as `zero_shot`."""
    figures: dict[str, dict[str, float] | None]
    """Mode (`continuous`, `quantized`, `codes_only`) → figure (`top1`, `i2t_r5`, ...) → rate; None: see `notes`. After
    them the modes of `vqclip.evaluation.Prefixes`."""
    chance: dict[str, float]
    """Figure → its expectation for random embeddings; the quality of images has none."""
    samples: Count
    """Number of images."""
    classes: Count | None
    """Number of classes; None for retrieval."""
    captions: Count
    """Number of texts: captions, or class prompts."""
    usage: dict[str, CodeUsage | None]
    """Modality (`image`, `text`) → use of its codebooks over the whole set; None if it has no codes."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Remarks for the reader, such as why a mode is missing."""
    details: Details | None = None
    """Further findings for a report; None on ranks other than 0, and if the evaluation was not asked for it.
    They are in no table."""
    pixels: PixelResult | None = None
    """Quality of reconstructed images against bits; None for other tasks."""
    intervals: dict[Mode, dict[str, Interval]] = dataclasses.field(default_factory=dict)
    """Mode → figure → 95 % confidence interval of rates; see `vqclip.evaluation.intervals`."""

    def scalars(self) -> dict[str, float]:
        """Return every rate under a name such as ``pairs/codes_only/i2t_r1``, for a log of metrics."""
        return {
            f"{self.name}/{mode}/{figure}": rate
            for mode, figures in self.figures.items()
            for figure, rate in (figures or {}).items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers."""
        body = dataclasses.asdict(dataclasses.replace(self, details=None))
        del body["details"]
        return body


def write_json(path: Path, results: Sequence[Result], about: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write results as a JSON list; each with the keys of ``about``, such as the model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = mask_credentials([{**result.to_json(), **about} for result in results])
    write_text(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, results: Sequence[Result], about: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write results as CSV: a row for each result, mode and figure, with the keys of ``about`` as further columns.

    Of reconstructed images there is also a row for each way to store an image, as the mode, and figure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    heads = ("name", "kind", "mode", "figure", "rate", "chance", "images", "classes", "captions", *about)
    rows = [
        (result.name, result.kind, mode, figure, rate, result.chance.get(figure, ""), result.samples)
        + ("" if result.classes is None else result.classes, result.captions, *about.values())
        for result in results
        for mode, figures in (*result.figures.items(), *_stored_images(result))
        for figure, rate in (figures or {}).items()
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *mask_credentials(rows)])
    write_text(path, text.getvalue())


def _stored_images(result: Result) -> list[tuple[str, dict[str, float]]]:
    rows = [] if result.pixels is None else result.pixels.rows
    bits = [{} if row.bits_per_image is None else {"bits_per_image": row.bits_per_image} for row in rows]
    return [(row.method, size | row.figures) for row, size in zip(rows, bits, strict=True)]


class StoredEvaluation(Part):
    """Content of a file: the result of one task."""

    step: int = Field(ge=0, lt=2**53)
    """Steps of training that the evaluated weights have."""
    result: Result
    """The result, with its details."""


def stored_files(run: Path) -> list[Path]:
    """Return the files of a run's folder in the order of the tasks, for `read_evaluation`."""
    return sorted((run / FOLDER).glob("[0-9]*.json"))


def read_evaluation(path: Path) -> StoredEvaluation:
    """Read a file that `write_evaluations` wrote.

    Raises:
        CheckpointError: it cannot be read, is too large, or contains unknown keys or values.
    """
    return read_plain(path, StoredEvaluation)


def write_evaluations(run: Path, step: int, results: Sequence[Result]) -> list[Path]:
    """Write results into a run's folder, and remove those of former evaluations. Each file is written atomically.

    Args:
        run: the folder.
        step: steps of training of the evaluated weights.
        results: one for each task.

    Returns:
        The files, as `stored_files` does.

    Raises:
        CheckpointError: a file would be too large to be read, or a figure is NaN.
        OSError: a file cannot be written.
    """
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    paths = []
    for number, result in enumerate(results):
        notes = [encodable(mask_credentials(note)) for note in result.notes]
        result = dataclasses.replace(result, name=encodable(result.name), notes=notes)
        content = StoredEvaluation(step=step, result=result).model_dump_json().encode()
        path = run / FOLDER / f"{number:02d}-{result.kind}.json"
        if len(content) > MAX_PLAIN_BYTES:
            raise CheckpointError(f"{path}: would have {len(content)} bytes; at most {MAX_PLAIN_BYTES} are read back")
        write_file(path, content)
        paths.append(path)
    for former in set(stored_files(run)) - set(paths):
        former.unlink(missing_ok=True)
    return paths


def common_modes(image: Encoded, text: Encoded | None = None) -> tuple[list[Mode], list[str]]:
    """Return the modes that the modalities have, and a note if one is missing."""
    sides = {"image": image} if text is None else {"image": image, "text": text}
    modes = [mode for mode in image.embeddings if all(mode in side.embeddings for side in sides.values())]
    lacking = [name for name, side in sides.items() if side.usage is None]
    if not lacking:
        return modes, []
    return modes, [f"no codes-only figures: the {' and the '.join(lacking)} quantizer has no codebook (Identity)"]


def fill_modes(found: Mapping[Mode, dict[str, float]]) -> dict[str, dict[str, float] | None]:
    """Return the figures of every mode, None for a missing one."""
    return {mode: found.get(mode) for mode in (*MODES, *found)}


def format_results(results: Sequence[Result]) -> str:
    """Return a table of the figures in percent and a table of the codes, with the notes below."""
    figures = [
        *_group_rows(
            (f"{result.name} ({describe_size(result)})", row) for result in results for row in _figure_rows(result)
        )
    ]
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
    told = []
    for chance, keys in itertools.groupby(figures, key=lambda key: percent(result.chance[key])):
        shown = [f"{figure_title(key)} {percent(figures[key])} %" for key in keys]
        told.append(f"{', '.join(shown)} (chance {chance} %)")
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


def describe_size(result: Result) -> str:
    """Return the number of images, and of classes or captions, in words."""
    captions = count_noun(result.captions, "caption")
    others = captions if result.classes is None else f"{result.classes:,} classes"
    return f"{count_noun(result.samples, 'image')}, {others}"


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
