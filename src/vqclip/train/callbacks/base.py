"""The base class of callbacks, and the running training that they receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from vqclip.data import Batch, TrainData
from vqclip.evaluation import EvaluationOutcome
from vqclip.process.lock import RunLock
from vqclip.process.signals import StopSignals
from vqclip.process.watchdog import Watchdog
from vqclip.runlog.bar import ProgressBar
from vqclip.runlog.records import Records
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.config import TaskConfig
from vqclip.train.speed import Clock
from vqclip.train.step import StepResult, TrainStep


@dataclass(repr=False, eq=False)
class Training:
    """A run in progress: its parts, and its position.

    The first group of fields is constant; the loop changes the second one.
    """

    config: TaskConfig
    data: TrainData
    step: TrainStep
    """Task, optimizer and schedule; ``training.step.model`` is the bare model."""
    lock: RunLock
    checkpointer: Checkpointer
    records: Records
    """The files that the run writes; rank 0 writes."""
    stop: StopSignals
    watchdog: Watchdog

    done: int
    """Steps done, those before a resume included. In `Callback.on_step_end` the step that just ended counts."""
    batch: Batch = field(init=False)
    """This rank's part of the current global batch."""
    result: StepResult = field(init=False)
    """Result of the last step: losses, gradient norm, statistics; the same on every rank."""
    stopping: bool = False
    """Whether this step is the last because of a signal or `request_stop`; the same on every rank."""
    ended: bool = False
    """Whether the training is over because of `train.patience`; the same on every rank."""
    outcome: EvaluationOutcome | None = None
    """Outcome of the evaluation that ended it; None if this process did not run it."""
    discarding: bool = False
    """Whether the run then stops without a checkpoint; the same on every rank."""
    discard_requested: bool = False
    """Whether this rank has asked for that."""
    saved: int = field(init=False)
    """Steps of the newest checkpoint; the same on every rank."""
    met_too_many_bad: bool = False
    """Whether a rank has replaced more bad samples than allowed; the same on every rank."""
    bar: ProgressBar = field(init=False)
    clock: Clock = field(default_factory=Clock)
    """Time of the steps alone."""

    def __post_init__(self) -> None:
        self.saved = self.done

    @property
    def metrics(self) -> dict[str, float]:
        """Newest value of every metric that is recorded, by its name in ``metrics.jsonl``; the same on every rank.

        Metrics of a step are recorded every ``train.report_every`` steps, those of evaluations as ``eval/...``.
        """
        return self.records.latest

    def request_stop(self, reason: str, *, checkpoint: bool = True) -> None:
        """Stop the run after the current step: on all ranks if one asks for it, and from any thread.

        With several processes, the run stops after the next step, so that no rank waits for the others' answers.

        Args:
            reason: reason in a few words, for the log and `RunResult.stopped`.
            checkpoint: save a checkpoint, from which the run can resume.
        """
        self.discard_requested |= not checkpoint
        self.stop.request(reason)

    @property
    def is_last(self) -> bool:
        """True after the last step of the training."""
        return self.stopping or self.ended or self.done == self.config.train.steps

    @property
    def needs_verdict(self) -> bool:
        """True if this step reads the device in any case: for a report, a checkpoint or an evaluation."""
        settings = self.config.train
        every = (settings.report_every, settings.checkpoint_every, settings.evaluate_every)
        return any(each and self.is_due(each) for each in every)

    def is_due(self, every: int) -> bool:
        """Return True every ``every`` steps and after the last step."""
        return self.is_last or self.done % every == 0


class Callback:
    """Base class of callbacks. Override the hooks that you need; every hook gets the running `Training`.

    Print the temperature every 100 steps:

        class PrintTemperature(Callback):
            def on_step_end(self, training):
                if training.done % 100 == 0 and dist.is_main():
                    print(training.done, float(training.result.figures["temperature/scale"]))

        vqclip.train.run(config, callbacks=[PrintTemperature()])

    Callbacks are called in a fixed order on every rank; `vqclip.train.callbacks.in_order` states it. Two rules hold for
    all of them:

    - *Collectives run in the same order on every rank.* A hook may call `vqclip.dist`, evaluate or run the model only
      where all ranks do the same: decide by values that are equal on all ranks, such as ``training.done``,
      ``training.result`` and the configuration, never by ``dist.is_main()``, the time or this rank's samples.
    - *An exception ends the run on all ranks.* The other ranks stop in their next collective with a
      `DistributedError`, at the latest after ``run.timeout_s``. The log names the callback.

    A hook that may take longer than ``run.step_timeout_s`` first calls ``training.watchdog.at(training.done, "what it
    does", patient=True)``; it then has ``run.timeout_s``. A hook that puts the model or one of its tokenizers in
    evaluation mode need not set it back.

    `Training.request_stop` ends the run after the current step (the next one, with several processes), such as a trial
    of a sweep that is not worth its time. A hook that reads a tensor of ``training.result`` waits for the device.

    Random numbers need a generator of their own, and a state that must survive a resume is the callback's to save:
    checkpoints contain none of it.
    """

    def on_train_start(self, training: Training) -> None:
        """Run before the first step, after a checkpoint has been restored."""

    def on_step_start(self, training: Training) -> None:
        """Run before a step; ``training.batch`` is its batch."""

    def on_step_end(self, training: Training) -> None:
        """Run after a step; ``training.result`` is its result."""

    def on_train_end(self, training: Training) -> None:
        """Run after the last step and before the final evaluation; also when stopped early, but not after an error."""

    def on_error(self, training: Training, error: Exception) -> None:
        """Run when an error ends the training, perhaps on this rank alone: call no collective."""
