"""The training loop: steps, and all that happens between them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from vqclip import dist
from vqclip.data import Batch, TrainData
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import DataError, NonFiniteError, StopRequested
from vqclip.evaluation import EvaluationOutcome, format_line, format_results, try_all
from vqclip.process.lock import RunLock
from vqclip.process.signals import StopSignals
from vqclip.process.watchdog import Watchdog
from vqclip.runlog.bar import ProgressBar
from vqclip.runlog.clock import Clock
from vqclip.runlog.console import print_and_log
from vqclip.runlog.records import Records
from vqclip.train.collapse import mean_cosine
from vqclip.train.config import TrainConfig
from vqclip.train.resume import Snapshots
from vqclip.train.step import StepResult, TrainStep

logger = logging.getLogger(__name__)


@dataclass
class Loop:
    """Trains a run from where it stands to its end, or until somebody asks it to stop."""

    config: TrainConfig
    data: TrainData
    step: TrainStep
    lock: RunLock
    snapshots: Snapshots
    records: Records
    stop: StopSignals
    watchdog: Watchdog
    clock: Clock = field(default_factory=Clock)
    """The time of the steps alone."""
    _told_of_cuts: bool = False

    def run(self, start: int) -> int:
        """Train from step ``start``; returns the number of steps done, fewer than asked for after a signal.

        When it returns, the last checkpoint is on the disk.

        Raises:
            VqclipError: for anything a user can mend; the message says how.
        """
        try:
            return self._run(start)
        except DataError:  # too many bad samples: what this rank knows is not lost
            self.records.bad.write_own()
            raise

    def evaluate(self, done: int) -> EvaluationOutcome:
        """Evaluate after ``done`` steps, all ranks together; what succeeds is recorded."""
        self.step.broadcast_local_codebooks()
        outcome = try_all(self.step.model, self.config.evaluation, precision=self.config.train.precision)
        figures = {key: value for result in outcome.results for key, value in result.scalars().items()}
        self.records.evaluated(done, figures)
        if done < self.config.train.steps:  # of the last one, a table is printed
            for result in outcome.results:
                logger.info("step %d: %s", done, format_line(result))
        return outcome

    def _run(self, start: int) -> int:
        settings, done = self.config.train, start
        self._make_up_for_an_evaluation(start)
        with (
            explain_worker_deaths(),
            ProgressBar(settings.steps, start, self.records.metrics is not None, self.config.run.name) as bar,
        ):
            self.watchdog.at(start, "waiting for the next batch", patient=True)
            for batch in self.clock.timed(self._batches(start)):
                self.watchdog.at(done, "in the next")
                result = self._noted(batch)
                done += 1
                self.clock.count(settings.batch_size)
                bar.advance()
                # Every rank stops after the same step.
                stopping, too_many = dist.any_rank_each([self.stop.requested, self.data.has_too_many_bad])
                if too_many:
                    self._tell_of_bad_samples()
                last = stopping or done == settings.steps
                reporting = last or done % settings.report_every == 0
                saving = last or done % settings.checkpoint_every == 0
                replaced = self.records.bad.collect() if reporting or saving else 0
                if reporting:
                    bar.show(self._report(done, result))
                    self._tell_of_cut_captions()
                if saving:  # before the evaluation, so that one that fails costs nothing
                    self._save(done)
                self.snapshots.look()
                if not last and settings.evaluate_every and done % settings.evaluate_every == 0:
                    stopping = self._evaluate_between(done, saved=saving)
                self._require_few_bad(replaced, done * settings.batch_size)
                if stopping:
                    break
                self.watchdog.at(done, "waiting for the next batch")
            self.watchdog.at(done, "saving", patient=True)
            self.snapshots.wait()
            coverage = self.data.coverage(done)
            logger.info("data: %s", coverage)
            bar.last_line(str(coverage))
        return done

    def _batches(self, start: int) -> Iterator[Batch]:
        pin = self.step.device.type == "cuda"
        return self.data.batches(start, self.config.train.steps, pin_memory=pin, judge=False)

    def _tell_of_bad_samples(self) -> None:
        """Write down and raise, on every rank alike, that one of them has met too many."""
        self.records.bad.collect()
        for rank, (replaced, seen) in enumerate(dist.gather_json([self.data.replaced, self.data.seen])):
            self._require_few_bad(replaced, seen, f" on rank {rank}" if dist.is_distributed() else "")

    def _tell_of_cut_captions(self) -> None:
        """Warn once of captions that are longer than the text tower takes."""
        length = self.step.model.text.num_tokens
        told = (
            None
            if self._told_of_cuts
            else self.records.bad.lengths.describe_cuts(length, "model.text.tower.context_length")
        )
        if told:
            logger.warning("captions: %s", told)
            self._told_of_cuts = True

    def _require_few_bad(self, replaced: int, seen: int, where: str = "") -> None:
        self.data.require_few_bad(replaced, seen, self.records.bad.last, where)

    def _noted(self, batch: Batch) -> StepResult:
        """Run a step; what is noteworthy about it, on every rank alike, is written down."""
        events = self.records.events
        try:
            result = self.step(batch, batch.step)
        except NonFiniteError as error:
            events.note("nonfinite", str(error), applied=False, batch=batch)
            self.snapshots.require_finite(batch.step)
            raise NonFiniteError(f"{error}. {self.snapshots.newest()}") from error
        if result.event is not None:
            events.note(result.event.kind, result.event.reason, not result.event.skip, batch)
            if result.event.kind == "nonfinite":  # with such weights no later step would be better
                self.snapshots.require_finite(batch.step)
        return result

    def _report(self, done: int, result: StepResult) -> dict[str, float]:
        """Write the line of metrics of a step, on the rank that writes; all look at it and hold the same state."""
        figures = self._figures(result, done) | self.records.bad.figures() | self.clock.lap()
        if self.records.metrics:
            self.records.metrics.write(done, figures)
        return figures

    def _figures(self, result: StepResult, done: int) -> dict[str, float]:
        """Return the metrics of a step, with codebook metrics over a window of tokens; warn if the run has died."""
        scaler, watch = self.step.scaler, self.step.guards.collapse
        figures = {f"loss/{name}": float(term) for name, term in result.terms.items()}
        figures |= {"temperature/scale": float(result.scale), "grad_norm": float(result.grad_norm), "lr": result.lr}
        if scaler.is_enabled():
            figures |= {"fp16/scale": scaler.get_scale(), "fp16/skipped_steps": float(self.step.skipped)}
        for modality, quantizer in self.step.model.quantizers().items():
            stats = watch.window(modality, result.stats[modality]) if watch else result.stats[modality]
            figures |= {f"{modality}/{name}": float(value) for name, value in quantizer.metrics(stats).items()}
            figures[f"{modality}/embedding_cosine"] = mean_cosine(result.embedded, modality)
        if watch and (done % self.config.train.report_every == 0 or done == self.config.train.steps):
            sizes = {name: each.codebook_sizes for name, each in self.step.model.quantizers().items()}
            warming_up = done <= self.config.optim.warmup_steps
            loss = math.nan if warming_up else figures[f"loss/{self.step.loss.name}"]
            chance = self.step.loss.chance(self.config.train.batch_size)
            for warning in watch.look(done, figures, sizes, loss, chance):
                if self.records.metrics:
                    logger.warning("step %d: %s", done, warning)
        return figures

    def _save(self, done: int) -> None:
        self.clock.pause()
        self.watchdog.at(done, "saving", patient=True)
        self.lock.take()
        self.records.bad.collect()  # a checkpoint vouches for all steps before it
        self.records.flush()
        self.step.broadcast_local_codebooks()
        self.snapshots.save(done, self.records.bad.saved(), self.records.best)

    def _evaluate_between(self, done: int, saved: bool) -> bool:
        """Evaluate in the course of the training; returns whether to stop."""
        self.clock.pause()
        self.watchdog.at(done, "evaluating", patient=True)
        self.snapshots.wait()
        try:
            require_success(self.evaluate(done))
        except StopRequested:  # the run that goes on makes up for it
            if not saved:
                self._save(done)
            return True
        return False

    def _make_up_for_an_evaluation(self, start: int) -> None:
        """Evaluate where the step from which the run goes on should have been, and was not."""
        settings = self.config.train
        due = settings.evaluate_every and start % settings.evaluate_every == 0 and 0 < start < settings.steps
        if due and self.config.evaluation and self.records.lacks_evaluation:
            self.watchdog.at(start, "evaluating", patient=True)
            require_success(self.evaluate(start))


def require_success(outcome: EvaluationOutcome) -> None:
    """Raise what failed in an evaluation, under the table of what did not."""
    if outcome.failure is None:
        return
    if outcome.results and dist.is_main():
        print_and_log(format_results(outcome.results))
    raise outcome.failure
