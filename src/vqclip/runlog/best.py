"""Records of the step with the best evaluation: one for checkpoints, one for the screen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vqclip.checkpoint import checkpoint_name
from vqclip.errors import CheckpointError
from vqclip.evaluation import Result, main_figures
from vqclip.io.atomic import write_text
from vqclip.runlog.metrics import EVALUATION

_FILE = "best.json"


class Best:
    """Best step of a run by one metric, larger is better; written to ``best.json``.

    Args:
        metric: name in ``metrics.jsonl``, such as ``eval/unseen images/codes_only/top1``.
        known: best step so far, as `to_json` returns it; ignored for another metric, or if its checkpoint is gone.
        folder: of the run; None on all ranks but one.
    """

    def __init__(self, metric: str, known: Mapping[str, Any] | None = None, folder: Path | None = None):
        self.metric, self._folder = metric, folder
        self.step: int | None = None
        """None before the first evaluation."""
        self.value = -math.inf
        """Value of the metric at that step."""
        if known and known["figure"] == metric and (folder is None or (folder / _checkpoint(known["step"])).is_dir()):
            self.step, self.value = known["step"], known["value"]
        self._write()

    def update(self, step: int, figures: Mapping[str, Any]) -> None:
        """Compare an evaluation after ``step`` steps; the first of equal ones stays best, NaN never is."""
        if float(figures.get(self.metric, math.nan)) > self.value:
            self.value, self.step = float(figures[self.metric]), step
            self._write()

    def to_json(self) -> dict[str, Any] | None:
        """Return ``step``, ``figure`` and ``value``; None before the first evaluation."""
        return None if self.step is None else {"step": self.step, "figure": self.metric, "value": self.value}

    def _write(self) -> None:
        best = self.to_json()
        if self._folder is not None and best is not None:
            text = json.dumps(best | {"checkpoint": _checkpoint(best["step"])}, indent=2)
            write_text(self._folder / _FILE, f"{text}\n")
        elif self._folder is not None:
            (self._folder / _FILE).unlink(missing_ok=True)


class Ranking:
    """Place of each evaluation among those before it, in words; by the mean of its main figures.

    Args:
        metric: metric that decides alone for its task, such as that of ``train.keep_best``.
        before: step → metrics of the evaluations so far, without their prefix.
    """

    def __init__(self, metric: str | None, before: Mapping[int, Mapping[str, float]]):
        self._metric = None if metric is None else metric.removeprefix(EVALUATION)
        self._before = [(step, dict(row)) for step, row in before.items()]

    def place(self, step: int, result: Result) -> str:
        """Return ``best so far`` or ``best after step 40``, and remember the result; empty for the first one."""
        mode, figures = main_figures(result)
        names = [f"{result.name}/{mode}/{figure}" for figure in figures]
        now = result.scalars()
        if self._metric in now:
            names = [self._metric]

        def rank(row: Mapping[str, float]) -> float:
            return sum(row[name] for name in names)

        earlier = [(rank(row), -at) for at, row in self._before if at < step and row.keys() >= set(names)]
        self._before.append((step, now))
        if not earlier:
            return ""
        value, at = max(earlier)
        return "best so far" if rank(now) > value else f"best after step {-at}"


def _checkpoint(step: int) -> str:
    return f"checkpoints/{checkpoint_name(step)}"


def read_best(folder: Path) -> int:
    """Read the best step of the run in ``folder``.

    Raises:
        CheckpointError: the run has none.
    """
    try:
        step = json.loads((folder / _FILE).read_text(encoding="utf-8"))["step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step: got {step!r}, expected an integer")
        return step
    except FileNotFoundError:
        raise CheckpointError(f"{folder / _FILE}: no such file; runs with train.keep_best write it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _FILE}: cannot be read ({error})") from error
