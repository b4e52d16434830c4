"""Records, checkpoints, evaluations, the limit of bad samples and the heartbeat of every run."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vqclip import dist
from vqclip.errors import DataError, StopRequested
from vqclip.evaluation import DetailsConfig, EvaluationOutcome, format_results, try_all, write_evaluations
from vqclip.report import write_report
from vqclip.report.sheets import draw_sheets
from vqclip.runlog.console import print_and_log
from vqclip.train.callbacks.base import Callback, Training
from vqclip.train.ema import CURRENT
from vqclip.train.tasks.base import Task

logger = logging.getLogger(__name__)


class RecordEvents(Callback):
    """Write steps with a NaN, infinite or unusually large loss to ``events.jsonl``, with their samples."""

    def on_step_end(self, training: Training) -> None:
        """Record the events that the guards have reported since the step before."""
        events, training.step.guards.events = training.step.guards.events, []
        for event, batch in events:
            training.records.record_event(event.kind, event.reason, not event.skip, batch)
            if event.kind == "nonfinite":  # if the weights are not finite, no later step can be
                training.checkpointer.require_finite(batch.step)


class CountBadSamples(Callback):
    """Add up over all ranks which samples were replaced, whenever a report or a checkpoint needs the counts."""

    def on_step_end(self, training: Training) -> None:
        """Count; stop on every rank if one of them has met too many."""
        data, bad, settings = training.data, training.records.bad, training.config.train
        if training.met_too_many_bad:
            bad.collect()
            for rank, (replaced, seen) in enumerate(dist.gather_json([data.replaced, data.seen])):
                data.require_few_bad(replaced, seen, bad.last, f" on rank {rank}" if dist.is_distributed() else "")
        needed = training.is_due(settings.report_every) or training.is_due(settings.checkpoint_every)
        training.replaced = bad.collect() if needed else 0

    def on_error(self, training: Training, error: Exception) -> None:
        """Write the bad samples of this rank that are not written yet."""
        if isinstance(error, DataError):
            training.records.bad.write_own()


class SaveCheckpoints(Callback):
    """Save every ``train.checkpoint_every`` steps and after the last step."""

    def on_step_end(self, training: Training) -> None:
        """Save, if a checkpoint is due; raise what has gone wrong in the background."""
        if training.is_due(training.config.train.checkpoint_every) and not training.discarding:
            save(training)
        training.checkpointer.raise_if_failed()

    def on_train_end(self, training: Training) -> None:
        """Save the last step if it is not saved, and wait until the checkpoint is on the disk."""
        if training.saved != training.done and not training.discarding:
            save(training)
        training.watchdog.at(training.done, "saving", patient=True)
        training.checkpointer.wait()


class Evaluate(Callback):
    """Evaluate every ``train.evaluate_every`` steps; `vqclip.train.main` evaluates after the last step."""

    def on_train_start(self, training: Training) -> None:
        """Evaluate the resumed checkpoint, if the run was stopped before its evaluation."""
        settings, start = training.config.train, training.done
        due = settings.evaluate_every and start % settings.evaluate_every == 0 and 0 < start < settings.steps
        if due and training.config.evaluation and training.records.lacks_evaluation:
            training.watchdog.at(start, "evaluating", patient=True)
            require_success(evaluate(training))

    def on_step_end(self, training: Training) -> None:
        """Evaluate, if an evaluation is due; a signal in the middle of it stops the training."""
        settings, done = training.config.train, training.done
        if training.is_last or not settings.evaluate_every or done % settings.evaluate_every:
            return
        training.clock.pause()
        training.watchdog.at(done, "evaluating", patient=True)
        training.checkpointer.wait()
        try:
            require_success(evaluate(training))
        except StopRequested:  # the resumed run evaluates, see `on_train_start`
            training.stopping = True


class LimitBadSamples(Callback):
    """Stop when too many samples of the whole run were bad; after the checkpoint, so that no step is lost."""

    def on_step_end(self, training: Training) -> None:
        """Compare the count with ``data.max_bad_fraction``."""
        seen = training.done * training.config.train.batch_size
        training.data.require_few_bad(training.replaced, seen, training.records.bad.last)

    def on_train_end(self, training: Training) -> None:
        """Report how much of the data was seen."""
        logger.info("data: %s", training.data.coverage(training.done))


class StopOnRequest(Callback):
    """Stop after this step if a callback has asked for it; of several processes, the loop combines the requests."""

    def on_step_end(self, training: Training) -> None:
        """Read the requests of the only process."""
        if not training.stopping and not dist.is_distributed():
            training.stopping, training.discarding = training.requests


class Heartbeat(Callback):
    """Report the position to the watchdog, which ends a run that makes no progress."""

    def on_train_start(self, training: Training) -> None:
        """Allow the long limit: the data workers start."""
        training.watchdog.at(training.done, "waiting for the next batch", patient=True)

    def on_step_start(self, training: Training) -> None:
        """Report that a batch has arrived."""
        if training.step.changes_at(training.batch.step):
            training.watchdog.expect_compilation()
        training.watchdog.at(training.done, "in the next step")

    def on_step_end(self, training: Training) -> None:
        """Report that the step and all other callbacks are done."""
        training.watchdog.at(training.done, "waiting for the next batch")


def save(training: Training) -> None:
    """Save a checkpoint. A collective."""
    training.clock.pause()
    training.watchdog.at(training.done, "saving", patient=True)
    training.lock.acquire()
    training.records.bad.collect()  # a checkpoint contains the counts of all its steps
    training.records.flush(training.done)
    training.step.broadcast_local_codebooks()
    training.checkpointer.save(training.done, training.records.bad.counts_to_save(), training.records.best)
    training.saved = training.done


def evaluate(training: Training) -> EvaluationOutcome:
    """Run all evaluations of the configuration on all ranks together, and record their results. A collective.

    Returns:
        The outcome with the averaged weights if the run has `train.ema`, otherwise with the current ones.
    """
    ema, is_last = training.config.train.ema, training.done == training.config.train.steps
    training.step.broadcast_local_codebooks()
    with training.step.whole_task() as task:
        outcome = _try_all(training, task, details=True)
    current = _evaluate_current(training) if ema is not None and ema.evaluate == "both" else EvaluationOutcome([], None)
    results = [*outcome.results, *current.results]
    figures = {key: value for result in results for key, value in result.scalars().items()}
    training.records.record_evaluation(training.done, figures)
    for result in current.results if is_last else results:  # for the last step, a table is printed
        training.records.report_evaluation(training.done, result)
    for result in outcome.results:
        if result.details is not None:
            training.records.add_images(training.done, functools.partial(draw_sheets, result.name, result.details))
    report, folder = training.config.report, training.config.run.path
    store_details(report, folder, outcome, training.done)
    if not is_last:  # after the last step, the page is written with the summary
        write_page(report, folder, training.done)
    return EvaluationOutcome(outcome.results, outcome.failure or current.failure)


def _evaluate_current(training: Training) -> EvaluationOutcome:
    """Evaluate the current weights beside the averaged ones; the results have names of their own."""
    with training.step.whole_task(averaged=False) as task:
        outcome = _try_all(training, task)
    named = [dataclasses.replace(result, name=CURRENT + result.name) for result in outcome.results]
    return EvaluationOutcome(named, outcome.failure)


def _try_all(training: Training, task: Task[Any], *, details: bool = False) -> EvaluationOutcome:
    config = training.config
    amounts = config.report if details else None
    return try_all(task.evaluated, config.evaluation, precision=config.train.precision, details=amounts)


def store_details(config: DetailsConfig | None, run: Path, outcome: EvaluationOutcome, step: int) -> None:
    """Store an evaluation on rank 0, for the page; a failure is a warning and does not end the run.

    Args:
        config: settings; None: nothing is written.
        run: the run's folder.
        outcome: outcome of the evaluation, with details.
        step: steps of training of the evaluated weights.
    """
    if outcome.results:
        _attempt(config, "report", step, lambda: write_evaluations(run, step, outcome.results))


def write_page(config: DetailsConfig | None, run: Path, step: int) -> None:
    """Write ``report.html`` on rank 0; a failure is a warning and does not end the run.

    Args:
        config: settings; None: nothing is written.
        run: the run's folder.
        step: steps of training done.
    """
    _attempt(config, "report.html", step, lambda: write_report(run))


def _attempt(config: DetailsConfig | None, what: str, step: int, write: Callable[[], object]) -> None:
    if config is None or not dist.is_main():
        return
    try:
        write()
    except Exception as error:  # of any kind: a page is never worth a run
        told = f"{type(error).__name__}: {error}"
        logger.warning("%s: cannot be written after step %d; the run continues without it: %s", what, step, told)


def require_success(outcome: EvaluationOutcome) -> None:
    """Raise the failure of an evaluation, after printing the results of the others."""
    if outcome.failure is None:
        return
    if outcome.results and dist.is_main():
        print_and_log(format_results(outcome.results))
    raise outcome.failure
