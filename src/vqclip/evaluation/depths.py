"""Evaluation with 1, 2, ... stages of a residual quantizer: accuracy at every number of bits."""

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
    """Run `evaluate` with the first stage of every residual quantizer, with the first two, ... and with all.

    Args:
        model: as for `evaluate`. A model without `Residual` has depth 1.
        tasks: as for `evaluate`.
        options: other arguments of `evaluate`.

    Returns:
        Number of stages → results. The codes-only figures use the ids of these stages; the continuous figures
        are equal at all depths.

    Raises:
        DataError, NonFiniteError: see `evaluate`.
    """
    whole = dist.unwrap_ddp(model)
    found = {}
    for depth in range(1, depth_of(whole) + 1):
        with at_depth(whole, depth):
            found[depth] = evaluate(whole, tasks, **options)
    return found


def format_depths(results: Mapping[int, Sequence[Result]]) -> str:
    """Return a table of the codes-only figures, in percent, by the bits of an image and of a text."""
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
