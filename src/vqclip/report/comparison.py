"""Comparison of several runs: differences of their settings, figures, verdicts, and curves in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vqclip.config.messages import show
from vqclip.errors import ConfigError
from vqclip.evaluation import Result
from vqclip.report.model_words import describe_state
from vqclip.report.plot import PERCENT, Chart, Curve, line_chart
from vqclip.report.run_files import RunFiles, figure_rows, newest_results
from vqclip.report.verdict import Verdict, judge

MAX_RUNS = 8
"""Runs in a comparison: as many as there are colours."""
MAX_DIFFERENCES = 60
IGNORED = ("run.name", "run.folder", "report")
"""Settings, or the beginnings of their names, that change no run."""
TELLING = {"kind", "path", "name", "levels", "bits", "codebooks", "codebook_size", "depth", "dim", "split"}
"""Settings that are shown of sections of different kinds."""
CURVES = (
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


@dataclass
class ComparedRun:
    """One run of a comparison."""

    files: RunFiles
    label: str
    step: int
    """Step of its newest evaluation."""
    results: list[Result]
    verdict: Verdict
    state: str


def compare(runs: Sequence[RunFiles]) -> list[ComparedRun]:
    """Judge every run.

    Raises:
        ConfigError: there are more than `MAX_RUNS`.
    """
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"got {len(runs)} runs; a page compares at most {MAX_RUNS}")
    names, compared = [run.name for run in runs], []
    for run in runs:
        step, results = newest_results(run)
        label = run.name if names.count(run.name) == 1 else f"{run.name} ({run.folder})"
        compared.append(ComparedRun(run, label, step, results, judge(run, results), describe_state(run)))
    return compared


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


def figures(runs: Sequence[ComparedRun]) -> list[tuple[str, str, list[tuple[float | None, Any]], float | None]]:
    """Return task, figure, rate and interval of each run (codes only where there are codes), and chance."""
    known = [{(each.name, row.title): row for each in run.results for row in figure_rows(each)} for run in runs]
    found = []
    for name, title in list(dict.fromkeys(key for each in known for key in each))[:100]:
        rows = [each.get((name, title)) for each in known]
        chances = [row.chance for row in rows if row is not None and row.chance is not None]
        rates: list[tuple[float | None, Any]] = [
            (None, None) if row is None else (row.rates[mode := [*row.rates][-1]], row.intervals.get(mode))
            for row in rows
        ]
        found.append((name, title, rates, chances[0] if chances else None))
    return found


def comparison_charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Return the curves of all runs, a figure for each metric."""
    charts = [
        line_chart(
            title,
            [Curve(run.label, *run.files.curves.get(name)) for run in runs],
            unit=unit,
            logarithmic=logarithmic,
            floor=0.0 if unit == PERCENT else None,
        )
        for title, name, unit, logarithmic in CURVES
    ]
    return [chart for chart in charts if chart is not None]


def _flatten(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return dotted paths and values of nested mappings and lists; a list of plain values stays whole."""
    if isinstance(tree, dict) and tree:
        return [pair for key, value in tree.items() for pair in _flatten(value, f"{path}.{key}" if path else key)]
    if isinstance(tree, list) and any(isinstance(each, (dict, list)) for each in tree):
        return [pair for number, value in enumerate(tree) for pair in _flatten(value, f"{path}[{number}]")]
    return [(path, tree)]
