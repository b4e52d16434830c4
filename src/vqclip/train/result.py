"""Outcome of a run, finished or stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vqclip.evaluation import Result
from vqclip.train.callbacks import Callback, Training
from vqclip.train.config import TaskConfig
from vqclip.train.summary import RunSummary, render

__all__ = ["RunResult", "WatchTraining"]


@dataclass(frozen=True)
class RunResult:
    """Outcome of `vqclip.train.run`, the same on every rank; ``print(result)`` shows the summary.

    result = run("configs/base.yaml", overrides=["run.name=mine"])
    result.metrics["loss/total"], result.results, result.tokenizer
    """

    config: TaskConfig
    """Configuration of the run."""
    step: int
    """Steps done; for a finished run those of the exported model."""
    metrics: dict[str, float]
    """Newest value of every metric that was recorded since `run` was called, by its name in ``metrics.jsonl``."""
    stopped: str | None
    """Signal, or reason given to `Training.request_stop`, that stopped the run before its end; None: it is finished."""
    summary: RunSummary | None
    """Sizes, speed and further figures of a finished run; None for a stopped one."""
    late_signal: str | None = None
    """Signal that a finished run received when nothing was left to stop, on any rank; None: there was none. A program
    that trains several runs stops after this one."""

    @property
    def finished(self) -> bool:
        """True if the run has reached its end, its evaluation and its export."""
        return self.summary is not None

    @property
    def folder(self) -> Path:
        """Folder of the run on this machine."""
        return self.config.run.path

    @property
    def tokenizer(self) -> Path | None:
        """Folder for `vqclip.load_tokenizer`; None for a stopped run."""
        return None if self.summary is None else Path(self.summary.tokenizer)

    @property
    def results(self) -> list[Result]:
        """Evaluations of the exported model; empty for a stopped run."""
        return [] if self.summary is None else self.summary.results

    def __str__(self) -> str:
        if self.summary is not None:
            place = "" if self.config.run.url is None else f"\n  stored at   {self.config.run.url}   (vqclip copy-run)"
            return f"{render(self.summary)}{place}"
        steps, how = self.config.train.steps, "run it again to resume from its newest checkpoint"
        return f"stopped after step {self.step} of {steps} ({self.stopped}); {how}"


class WatchTraining(Callback):
    """Steps done and metrics of a training, also when it is stopped."""

    def __init__(self) -> None:
        self._training: Training | None = None

    def on_train_start(self, training: Training) -> None:
        """Remember the training."""
        self._training = training

    @property
    def done(self) -> int | None:
        """Steps done; None if the training has not begun."""
        return None if self._training is None else self._training.done

    @property
    def metrics(self) -> dict[str, float]:
        """Newest metrics; empty if the training has not begun."""
        return {} if self._training is None else dict(self._training.metrics)
