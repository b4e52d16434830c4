"""The report of a run, written whenever the run evaluates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from vqclip import dist
from vqclip.config import Config
from vqclip.evaluation import DetailsConfig, EvaluationOutcome, write_evaluations
from vqclip.report import write_report

logger = logging.getLogger(__name__)


class ReportConfig(Config):
    """Files for people to look at, made at every evaluation."""

    details: DetailsConfig = DetailsConfig()
    """Numbers of images in the details of an evaluation: hits and misses, code maps, accuracy against bits."""


def store_details(config: ReportConfig | None, run: Path, outcome: EvaluationOutcome, step: int) -> None:
    """Store an evaluation on rank 0, for the page; a failure is a warning and does not end the run.

    Args:
        config: settings; None: nothing is written.
        run: the run's folder.
        outcome: outcome of the evaluation, with details.
        step: steps of training of the evaluated weights.
    """
    if outcome.results:
        _attempt(config, "report", step, lambda: write_evaluations(run, step, outcome.results))


def write_page(config: ReportConfig | None, run: Path, step: int) -> None:
    """Write ``report.html`` on rank 0; a failure is a warning and does not end the run.

    Args:
        config: settings; None: nothing is written.
        run: the run's folder.
        step: steps of training done.
    """
    _attempt(config, "report.html", step, lambda: write_report(run))


def _attempt(config: ReportConfig | None, what: str, step: int, write: Callable[[], object]) -> None:
    if config is None or not dist.is_main():
        return
    try:
        write()
    except Exception as error:  # of any kind: a page is never worth a run
        told = f"{type(error).__name__}: {error}"
        logger.warning("%s: cannot be written after step %d; the run continues without it: %s", what, step, told)
