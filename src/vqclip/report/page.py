"""Pages of runs, of a comparison, of reconstructions and of a search: one HTML file, no script, nothing fetched."""

from __future__ import annotations

import functools
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
from markupsafe import Markup

import vqclip
from vqclip.config.messages import show
from vqclip.errors import ConfigError, printable
from vqclip.evaluation.details import DIFFERENCE_GAIN, Item, clip_text, exact_thumbnail
from vqclip.evaluation.reconstructions import Reconstructions
from vqclip.evaluation.results import MODE_TITLES, describe_size
from vqclip.io.atomic import write_text
from vqclip.report import run_charts
from vqclip.report.plot import PERCENT, Curve, compact, image_uri, line_chart, plain
from vqclip.report.run_files import (
    MAX_FIGURES,
    RunFiles,
    describe_data,
    describe_progress,
    figure_rows,
    read_run,
)
from vqclip.report.verdict import judge
from vqclip.runlog.health import CODED

if TYPE_CHECKING:
    from vqclip.search.scan import Hit

REPORT_FILE = "report.html"
"""Name of the page in the folder of a run."""
LARGE = 112
"""Pixels from which on reconstructions are shown larger."""
SHOWN_ROWS = 12
"""Classes that are shown at once; the others are folded away."""
MAX_RUNS = 8
"""Runs in a comparison: as many as there are colours."""
MAX_DIFFERENCES = 60
IGNORED = ("run.name", "run.folder", "report")
"""Settings, or the beginnings of their names, that change no run."""
TELLING = {"kind", "path", "name", "levels", "bits", "codebooks", "codebook_size", "depth", "dim", "split"}
"""Settings that are shown of sections of different kinds."""
COMPARED = (
    ("Loss", "loss/total", "", False),
    ("Learning rate", "lr", "", False),
    ("Gradient norm", "grad_norm", "", True),
    ("Throughput", "images_per_second", "images/s", False),
    ("Image codes in use", "image/usage", PERCENT, False),
    ("Text codes in use", "text/usage", PERCENT, False),
    ("Bits used by an image token", "image/bits_used", "bits", False),
    ("Bits used by a text token", "text/bits_used", "bits", False),
)
"""Title, metric, unit, and whether the scale is logarithmic."""


def write_report(folder: Path | str, output: Path | str | None = None) -> Path:
    """Write the page of one run, and return its path.

    Args:
        folder: of the run.
        output: the page; None for ``report.html`` in the folder.

    Raises:
        ConfigError: it is not the folder of a run; or its ``report.html`` is a link, a folder or a pipe.
        OSError: the page cannot be written.
    """
    text, path = render_run(read_run(Path(folder))), Path(folder) / REPORT_FILE if output is None else Path(output)
    if output is None and (path.is_symlink() or (path.exists() and not path.is_file())):
        raise ConfigError(  # a stranger may have made it a link to another file
            f"{path}: is a link, a folder or a pipe; expected an ordinary file or none: remove it, or name another "
            "file (vqclip report --out FILE)"
        )
    write_text(path, text)
    return path


def write_comparison(folders: Sequence[Path | str], output: Path | str) -> Path:
    """Write a page that compares several runs, and return its path.

    Args:
        folders: of the runs, two to eight.
        output: the page.

    Raises:
        ConfigError: a folder is not that of a run, or there are too many.
        OSError: the page cannot be written.
    """
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"got {len(folders)} runs; a page compares at most {MAX_RUNS}")
    runs = [read_run(Path(folder)) for folder in folders]
    names = [run.name for run in runs]
    labels = [run.name if names.count(run.name) == 1 else f"{run.name} ({run.folder})" for run in runs]
    charts = [
        line_chart(
            title,
            [Curve(label, *run.curves.get(name)) for run, label in zip(runs, labels, strict=True)],
            unit=unit,
            logarithmic=logarithmic,
        )
        for title, name, unit, logarithmic in COMPARED
    ]
    rows = [{(each.name, row.title): row for each in run.results for row in figure_rows(each)} for run in runs]
    keys = [*dict.fromkeys(key for each in rows for key in each)][:100]
    text = render(
        "comparison.html",
        runs=[*zip(runs, labels, map(judge, runs), strict=True)],
        labels=labels,
        differences=differences(runs),
        most=MAX_DIFFERENCES,
        figures=[(*key, [each.get(key) for each in rows]) for key in keys],
        charts=[chart for chart in charts if chart is not None],
        command=shlex.join(["vqclip", "report", *map(str, folders), "--out", str(output)]),
    )
    write_text(Path(output), text)
    return Path(output)


def differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not equal in all runs, in the order of their first appearance: path and values."""
    flat = [dict(_flatten(run.config)) for run in runs]
    paths = [path for path in dict.fromkeys(path for each in flat for path in each) if not path.startswith(IGNORED)]
    kinds = [path for path in paths if path.endswith(".kind") and len({str(each.get(path)) for each in flat}) > 1]
    sections = tuple(path.removesuffix("kind") for path in kinds)  # of other settings, most of which mean little
    paths = [path for path in paths if not path.startswith(sections) or path.rpartition(".")[2] in TELLING]
    found = []
    for path in paths:
        values = [each.get(path, "–") for each in flat]
        if len({repr(value) for value in values}) > 1:
            found.append((path, [value[:200] if isinstance(value, str) else show(value) for value in values]))
    return found


def _flatten(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return dotted paths and values of nested mappings and lists; a list of plain values stays whole."""
    if isinstance(tree, dict) and tree:
        return [pair for key, value in tree.items() for pair in _flatten(value, f"{path}.{key}" if path else key)]
    if isinstance(tree, list) and any(isinstance(each, (dict, list)) for each in tree):
        return [pair for number, value in enumerate(tree) for pair in _flatten(value, f"{path}[{number}]")]
    return [(path, tree)]


def render_run(run: RunFiles) -> str:
    """Return the page of a run as HTML."""
    tasks, verdict = run.results, judge(run)
    charts = {
        "pixels": [(task, run_charts.pixel_chart(task)) for task in tasks if task.pixels],
        "training": run_charts.training_charts(run.curves),
        "evaluations": run_charts.evaluation_charts(run.curves),
        "codebooks": run_charts.codebook_charts(run.curves, verdict.codebooks),
    }
    coded = [(task.name, task.details.codes) for task in tasks if task.details is not None and task.details.codes]
    name, codes = coded[0] if coded else ("", ())  # one set of images shows enough
    codebooks = {
        modality: [(each, run.curves.latest.get(f"{each.name}/bits_used")) for each in found[: run_charts.MAX_ROWS]]
        for modality in CODED
        if (found := [each for each in verdict.codebooks if each.modality == modality])
    }
    processes = run.about.processes if run.about else 1
    start = "vqclip train" if processes == 1 else f"torchrun --standalone --nproc-per-node {processes} -m vqclip.train"
    folder, config = shlex.quote(str(run.folder)), shlex.quote(str(run.folder / "config.yaml"))
    commands = {
        "the same run under another name": f"{start} --config {config} {shlex.quote(f'run.name={run.name}-again')}",
        "resume it where it was stopped": f"{start} --config {config}",
        "evaluate it once more": f"vqclip evaluate {folder}",
        "write this page once more": f"vqclip report {folder}",
    }
    return render(
        "run.html",
        run=run,
        verdict=verdict,
        lines=[*(run.about.model if run.about else ()), describe_data(run), f"{describe_progress(run)} · {run.state}"],
        charts=charts,
        tasks=tasks,
        coded=name,
        codes=codes,
        codebooks=codebooks,
        commands=commands,
    )


def render(template: str, **values: Any) -> str:
    """Return a template of this package filled with values, which are escaped."""
    return _environment().get_template(template).render(version=vqclip.__version__, modes=MODE_TITLES, **values)


def reconstructions_page(title: str, found: Reconstructions, facts: Sequence[str], command: str, *, side: int) -> str:
    """Return HTML; all text is escaped.

    Args:
        title: heading.
        found: the images.
        facts: lines below the heading.
        command: command that makes the page again.
        side: side of the images in pixels.
    """
    points = sorted((bits, figures["psnr"]) for _, bits, figures in found.decodings)
    curves = [Curve("ids", [bits for bits, _ in points], [psnr for _, psnr in points])]
    if found.shown:  # WebP is the last of each, and of these images alone
        where = "" if len(found.groups) == 1 else ", images below"
        for label, place in (("all ids", -2), ("WebP", -1))[not where :]:
            bits, psnr = map(statistics.mean, zip(*(numbers[place] for numbers in found.shown), strict=True))
            curves.append(Curve(f"{label}{where}", [bits], [psnr]))
    chart = line_chart("PSNR against bits", curves, unit="dB", x_label="bits an image", marks=True)
    return render(
        "reconstructions.html",
        title=title,
        found=found,
        facts=facts,
        chart=chart if len(points) > 1 else None,
        with_ssim=all("ssim" in figures for _, _, figures in found.decodings),
        large=side >= LARGE,
        gain=DIFFERENCE_GAIN,
        command=command,
    )


def search_page(title: str, hits: Sequence[Hit], notes: str = "") -> str:
    """Return HTML with a grid of results, best first; images become thumbnails, all text is escaped.

    Names of files may contain bytes that are not UTF-8, and invisible characters: they are spelt out.
    """
    items = []
    for number, hit in enumerate(hits, start=1):
        name = clip_text(printable(hit.name, one_line=True))
        image = None if hit.picture is None else exact_thumbnail(hit.picture, 160)
        items.append(Item(image=image, name=name, text=name, note=f"{number}. cosine {hit.score:.3f}"))
    title, notes = (printable(each, one_line=True) for each in (title, notes))
    return render("search.html", title=title, notes=notes, hits=items)


@functools.cache
def _environment() -> Environment:
    """Return the templates; values are escaped, and invisible characters in them spelt out."""
    templates = Environment(
        loader=PackageLoader("vqclip.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {
        "MAX_FIGURES": MAX_FIGURES,
        "SHOWN_ROWS": SHOWN_ROWS,
        "rows": figure_rows,
        "size": lambda result: describe_size(result) if result.samples else "",
    }
    templates.filters |= {
        "image": image_uri,
        "percent": lambda rate: "–" if rate is None else f"{100 * rate:.1f}",
        "compact": compact,
        "commas": "{:,.0f}".format,
        "plain": plain,
    }
    return templates


def _finalize(value: Any) -> Any:
    """Make invisible characters of a text visible, and cut a long one; numbers and markup of our own stay."""
    return value if value is None or isinstance(value, (Markup, Undefined, int, float)) else plain(value)
