"""The step at which an evaluation was best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vqclip.checkpoint import checkpoint_name
from vqclip.errors import CheckpointError
from vqclip.io.atomic import write_text

PREFIX = "eval/"
"""How names of figures of evaluations begin in the metrics."""
_FILE = "best.json"


class Best:
    """Remembers the best step by one figure, of which more is better, and names it in a file.

    Args:
        metric: its name in ``metrics.jsonl``, such as ``eval/unseen pictures/codes_only/top1``.
        known: the best step so far, as `facts` gives it; ignored if it is by another figure or its checkpoint is gone.
        folder: the run's, for ``best.json``; None on all ranks but one.
    """

    def __init__(self, metric: str, known: Mapping[str, Any] | None = None, folder: Path | None = None):
        self.metric, self._folder = metric, folder
        self.step: int | None = None
        """None before the first evaluation."""
        self.value = -math.inf
        """The figure of that step."""
        if known and known["figure"] == metric and (folder is None or (folder / _checkpoint(known["step"])).is_dir()):
            self.step, self.value = known["step"], known["value"]
        self._write()

    def update(self, step: int, figures: Mapping[str, Any]) -> None:
        """Compare an evaluation after ``step`` steps; of equal ones the first is best, and NaN never is."""
        if float(figures.get(self.metric, math.nan)) > self.value:
            self.value, self.step = float(figures[self.metric]), step
            self._write()

    def facts(self) -> dict[str, Any] | None:
        """``step``, ``figure`` and ``value``, JSON-able; None before the first evaluation."""
        return None if self.step is None else {"step": self.step, "figure": self.metric, "value": self.value}

    def _write(self) -> None:
        facts = self.facts()
        if self._folder is not None and facts is not None:
            text = json.dumps(facts | {"checkpoint": _checkpoint(facts["step"])}, indent=2)
            write_text(self._folder / _FILE, f"{text}\n")
        elif self._folder is not None:
            (self._folder / _FILE).unlink(missing_ok=True)


def _checkpoint(step: int) -> str:
    return f"checkpoints/{checkpoint_name(step)}"


def read_best(folder: Path) -> int:
    """The best step of the run in ``folder``.

    Raises:
        CheckpointError: the run names none.
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
