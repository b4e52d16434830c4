"""Reports, checkpoints, evaluations and the limit of bad samples of every run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import DataError, StopRequested, count_noun
from vqclip.evaluation import DetailsConfig, EvaluationOutcome, format_results, try_all, write_evaluations
from vqclip.quantizers import Stats, sync
from vqclip.report import write_report
from vqclip.runlog.console import print_and_log
from vqclip.train.callbacks.base import Callback, Training
from vqclip.train.ema import CURRENT
from vqclip.train.speed import SpeedMeter

logger = logging.getLogger(__name__)

_TOKENS = "tokens of the step"


def in_order(callbacks: Sequence[Callback] = ()) -> list[Callback]:
    """Return the built-in callbacks and the user's, in the order in which each hook is called."""
    return [
        ReportMetrics(),
        SaveCheckpoints(),  # before the evaluation: one that fails costs no step
        Evaluate(),
        LimitBadSamples(),  # after the checkpoint: a run can resume with a higher limit
        *callbacks,
    ]


class ReportMetrics(Callback):
    """Write a line of metrics and move the progress bar every ``train.report_every`` steps; warn in words.

    All ranks compute the metrics; rank 0 writes them, and judges the health of the run.
    """

    def on_train_start(self, training: Training) -> None:
        """Begin to measure."""
        self._speed = SpeedMeter(training.config.run.peak_tflops)
        self._warned_of_cut_captions = False

    def on_step_start(self, training: Training) -> None:
        """Count the FLOPs of the first step, and the time that timed steps spend in collectives."""
        self._speed.count(training.step, training.batch)
        dist.exchange_timer.runs = training.clock.runs

    def on_step_end(self, training: Training) -> None:
        """Report, if a report is due."""
        is_due = training.is_due(training.config.train.report_every)
        if is_due:
            training.records.bad.collect()
        dist.exchange_timer.runs = False
        if not is_due:
            return
        figures, tokens = _read_metrics(training)
        figures |= training.records.bad.figures()
        if lap := training.clock.lap(dist.exchange_timer.lap()):
            figures |= lap | self._speed.figures(
                lap["images_per_second"], tokens / training.config.train.batch_size, training.step.device
            )
        training.records.record_report(training.done, figures)
        training.bar.show(figures)
        length = training.step.task.context_length
        if length is not None and dist.is_main() and not self._warned_of_cut_captions:
            cut = training.records.bad.lengths.describe_cuts(length, "model.text.tower.context_length")
            if cut:
                logger.warning("captions: %s", cut)
                self._warned_of_cut_captions = True


def _read_metrics(training: Training) -> tuple[dict[str, float], float]:
    """Return the metrics of the last step, those of codebooks over a window of tokens, and its tokens. A collective."""
    step, result = training.step, training.result
    windows = step.guards.windows
    found: dict[str, float | Tensor] = {f"loss/{name}": term for name, term in result.terms.items()}
    found |= {**result.figures, "grad_norm": result.grad_norm, "lr": result.lr}
    if step.scaler.is_enabled():
        found |= {"fp16/scale": step.scaler.get_scale(), "fp16/skipped_steps": float(step.guards.overflows)}
    if windows is None:
        sums = dict(zip(result.stats, sync([*result.stats.values()]), strict=True))
    else:
        sums = windows.sums(result.stats)
    found |= step.task.metrics(sums, training.done - 1)
    found[_TOKENS] = sum(_count_tokens(result.stats[name]) for name in step.task.quantizers() if name in result.stats)
    tensors = {name: each.detach().double().reshape(()) for name, each in found.items() if isinstance(each, Tensor)}
    numbers = dict(zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True))  # read at once
    figures = {name: numbers[name] if isinstance(each, Tensor) else each for name, each in found.items()}
    return figures, figures.pop(_TOKENS)


def _count_tokens(stats: Stats) -> Tensor | float:
    """Return the () number of tokens that were quantized; stages and parts share them."""
    return next((each for name, each in stats.sums.items() if name.split("/")[-1] == "tokens"), 0.0)


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
    """Evaluate every ``train.evaluate_every`` steps; `vqclip.train.main` evaluates after the last step.

    The training ends if ``train.patience`` evaluations in a row found no new best. The best step is all that this
    needs, so a resumed run ends after the same step.
    """

    def on_train_start(self, training: Training) -> None:
        """Evaluate the resumed checkpoint, if the run was stopped before its evaluation."""
        settings, start = training.config.train, training.done
        due = settings.evaluate_every and start % settings.evaluate_every == 0 and 0 < start < settings.steps
        if due and training.config.evaluation and training.records.lacks_evaluation:
            training.watchdog.at(start, "evaluating", patient=True)
            self._evaluate(training)
        elif start < settings.steps:
            training.ended = _has_lost_patience(training)

    def on_step_end(self, training: Training) -> None:
        """Evaluate, if an evaluation is due; a signal in the middle of it stops the training."""
        settings, done = training.config.train, training.done
        if training.is_last or not settings.evaluate_every or done % settings.evaluate_every:
            return
        training.clock.pause()
        training.watchdog.at(done, "evaluating", patient=True)
        training.checkpointer.wait()
        try:
            self._evaluate(training)
        except StopRequested:  # the resumed run evaluates, see `on_train_start`
            training.stopping = True

    def _evaluate(self, training: Training) -> None:
        outcome = evaluate(training)
        require_success(outcome)
        if _has_lost_patience(training):
            training.ended, training.outcome = True, outcome


def _has_lost_patience(training: Training) -> bool:
    """Return whether ``train.patience`` evaluations found no new best, by the figures of rank 0. A collective."""
    settings = training.config.train
    if settings.patience is None or settings.evaluate_every is None:
        return False
    best = dist.broadcast_json(training.records.best)
    if best is None or training.done - best["step"] < settings.patience * settings.evaluate_every:
        return False
    text = "step %d: the training ends: %s was best after step %d, %d evaluations ago (train.patience)"
    if dist.is_main():
        logger.info(text, training.done, best["figure"], best["step"], settings.patience)
    return True


class LimitBadSamples(Callback):
    """Stop when too many samples of the whole run were bad; after the checkpoint, so that none is lost."""

    def on_step_end(self, training: Training) -> None:
        """Compare the newest counts with ``data.max_bad_fraction``; they are collected at once if a rank met too many.

        What one rank met does not decide: of many ranks one has many by chance.
        """
        bad = training.records.bad
        if training.met_too_many_bad:
            bad.collect()
        training.data.require_few_bad(bad.counts.total(), training.done * training.config.train.batch_size, bad.last)

    def on_error(self, training: Training, error: Exception) -> None:
        """Write the bad samples of this rank that are not written yet."""
        if isinstance(error, DataError):
            training.records.bad.write_own()

    def on_train_end(self, training: Training) -> None:
        """Report how much of the data was seen, and how often a bad sample was replaced."""
        bad = training.records.bad.counts.total()
        replaced = f"; {count_noun(bad, 'time')} a bad one was replaced (bad_samples.jsonl)" if bad else ""
        logger.info("data: %s%s", training.data.coverage(training.done), replaced)


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
    outcome, current = _evaluate_weights(training, averaged=True), EvaluationOutcome([], None)
    if ema is not None and ema.evaluate == "both":
        current = _evaluate_weights(training, averaged=False)
    results = [*outcome.results, *current.results]
    figures = {key: value for result in results for key, value in result.scalars().items()}
    training.records.record_evaluation(training.done, figures)
    for result in current.results if is_last else results:  # for the last step, a table is printed
        training.records.report_evaluation(training.done, result)
    report, folder = training.config.report, training.config.run.path
    write_pages(report, folder, training.done, outcome)
    return EvaluationOutcome(outcome.results, outcome.failure or current.failure)


def _evaluate_weights(training: Training, *, averaged: bool) -> EvaluationOutcome:
    """Evaluate the averaged weights if the run has them, with details; or the current ones, under other names."""
    config = training.config
    with training.step.whole_task(averaged=averaged) as task:
        details = config.report if averaged else None
        outcome = try_all(task.evaluated, config.evaluation, precision=config.train.precision, details=details)
    if averaged:
        return outcome
    named = [dataclasses.replace(result, name=CURRENT + result.name) for result in outcome.results]
    return EvaluationOutcome(named, outcome.failure)


def write_pages(config: DetailsConfig | None, run: Path, step: int, outcome: EvaluationOutcome | None = None) -> None:
    """Store an evaluation on rank 0, and write ``report.html``; a failure is a warning, not the run's end.

    Args:
        config: settings; None: no page is written.
        run: the run's folder.
        step: steps of training of the evaluated weights.
        outcome: outcome of the evaluation, with details; None if there is no new one.
    """
    if not dist.is_main():
        return
    try:
        if outcome is not None and outcome.results:
            write_evaluations(run, step, outcome.results)
        if config is not None:
            write_report(run)
    except Exception as error:  # of any kind: a page is never worth a run
        told = f"{type(error).__name__}: {error}"
        logger.warning("report.html: cannot be written after step %d; the run continues without it: %s", step, told)


def require_success(outcome: EvaluationOutcome) -> None:
    """Raise the failure of an evaluation, after printing the results of the others."""
    if outcome.failure is None:
        return
    if outcome.results and dist.is_main():
        print_and_log(format_results(outcome.results))
    raise outcome.failure
