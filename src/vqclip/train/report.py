"""The report of a run, written whenever the run evaluates."""

from __future__ import annotations

import logging
from pathlib import Path

from vqclip import dist
from vqclip.config import Config
from vqclip.errors import VqclipError
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
    if config is None or not dist.is_main():
        return
    try:
        if outcome.results:
            write_evaluations(run, step, outcome.results)
    except (VqclipError, OSError) as error:
        logger.warning("report: cannot be written after step %d; the run continues without it: %s", step, error)


def write_page(config: ReportConfig | None, run: Path, step: int) -> None:
    """Write ``report.html`` on rank 0; a failure is a warning and does not end the run.

    Args:
        config: settings; None: nothing is written.
        run: the run's folder.
        step: steps of training done.
    """
    if config is None or not dist.is_main():
        return
    try:
        write_report(run)
    except Exception as error:  # of any kind: a page is never worth a run
        logger.warning(
            "report.html: cannot be written after step %d; the run continues without it: %s: %s",
            step,
            type(error).__name__,
            error,
        )
