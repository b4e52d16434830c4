"""Fewer stages of a residual quantizer: what a model is worth at every number of bits that it can spend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vqclip import dist
from vqclip.evaluation.results import Result
from vqclip.evaluation.suite import EvaluationConfig, evaluate
from vqclip.evaluation.tables import figure_title, percent, table
from vqclip.quantizers import at_depth, depth_of


def evaluate_depths(model: nn.Module, tasks: Sequence[EvaluationConfig], **options: Any) -> dict[int, list[Result]]:
    """`evaluate` with the first stage of every residual quantizer alone, with the first two, ... and with all.

    Args:
        model: as for `evaluate`. One without any `Residual` has depth 1.
        tasks: as for `evaluate`.
        options: those of `evaluate`.

    Returns:
        Number of stages → results. The codes-only figures are those of ids of that many stages, the continuous ones the
        same at all depths.

    Raises:
        DataError, NonFiniteError: as `evaluate`.
    """
    whole = dist.unwrap_ddp(model)
    found = {}
    for depth in range(1, depth_of(whole) + 1):
        with at_depth(whole, depth):
            found[depth] = evaluate(whole, tasks, **options)
    return found


def format_depths(results: Mapping[int, Sequence[Result]]) -> str:
    """One table: bits of an image and of a text against every codes-only figure, in percent."""
    rows = [row for depth, each in results.items() for result in each for row in _rows(depth, result)]
    rows.sort(key=lambda row: (row[0], row[1]))
    return table(("codes only, %", "", "stages", "bits/image", "bits/text", "rate", "chance"), rows, left=2)


def _rows(depth: int, result: Result) -> list[tuple[str, ...]]:
    figures = result.figures["codes_only"] or {}
    bits = [
        "-" if usage is None else f"{usage.bits_per_sample:.0f}"
        for usage in (result.usage["image"], result.usage["text"])
    ]
    return [
        (result.name, figure_title(name), str(depth), *bits, percent(rate), f"{100 * result.chance[name]:.2f}")
        for name, rate in figures.items()
    ]
