"""The step at which an evaluation was best."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vqclip.checkpoint import checkpoint_name
from vqclip.errors import CheckpointError
from vqclip.files import write_text

PREFIX = "eval/"
"""How names of figures of evaluations begin in the metrics."""
_FILE = "best.json"


class Best:
    """Remembers the best step by one figure, of which more is better, and names it in a file.

    Args:
        metric: its name in ``metrics.jsonl``, such as ``eval/unseen pictures/codes_only/top1``.
        history: lines of the metrics of the run so far.
        folder: the run's, for ``best.json``; None on all ranks but one.
    """

    def __init__(self, metric: str, history: Iterable[Mapping[str, Any]] = (), folder: Path | None = None):
        self.metric, self._path = metric, None if folder is None else folder / _FILE
        self.step: int | None = None
        """None before the first evaluation."""
        self.value = -math.inf
        """The figure of that step."""
        for line in history:
            self._compare(line["step"], line)
        self._write()

    def see(self, step: int, figures: Mapping[str, float]) -> None:
        """Take note of an evaluation after ``step`` steps."""
        if self._compare(step, figures):
            self._write()

    def facts(self) -> dict[str, Any] | None:
        """``step``, ``figure`` and ``value``, JSON-able; None before the first evaluation."""
        return None if self.step is None else {"step": self.step, "figure": self.metric, "value": self.value}

    def _compare(self, step: int, figures: Mapping[str, Any]) -> bool:
        better = float(figures.get(self.metric, math.nan)) > self.value  # of equals, the first; NaN never
        if better:
            self.value, self.step = float(figures[self.metric]), step
        return better

    def _write(self) -> None:
        facts = self.facts()
        if self._path is not None and facts is not None:
            facts["checkpoint"] = f"checkpoints/{checkpoint_name(facts['step'])}"
            write_text(self._path, json.dumps(facts, indent=2) + "\n")
        elif self._path is not None:
            self._path.unlink(missing_ok=True)  # a crash may have lost that step


def read_best(folder: Path) -> int:
    """The best step of the run in ``folder``.

    Raises:
        CheckpointError: the run names none.
    """
    try:
        return int(json.loads((folder / _FILE).read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder / _FILE}: no such file; runs with train.keep_best write it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _FILE}: cannot be read ({error})") from error
