"""The step at which an evaluation was best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from vqclip.errors import ConfigError

PREFIX = "eval/"
"""How names of figures of evaluations begin in the metrics."""


class Best:
    """Remembers the best step by one figure, of which more is better.

    Args:
        metric: its name in ``metrics.jsonl``, such as ``eval/unseen pictures/codes_only/top1``.
        history: lines of the metrics of the run so far.
    """

    def __init__(self, metric: str, history: Iterable[Mapping[str, Any]] = ()):
        self.metric = metric
        self.step: int | None = None
        """None before the first evaluation."""
        self._value = -math.inf
        for line in history:
            if metric in line:
                self._compare(line["step"], float(line[metric]))

    def see(self, step: int, figures: Mapping[str, float]) -> None:
        """Take note of an evaluation after ``step`` steps.

        Raises:
            ConfigError: it has no such figure; the message names those it has.
        """
        if self.metric not in figures:
            raise ConfigError(f"train.keep_best: got {self.metric!r}; expected one of {', '.join(sorted(figures))}")
        self._compare(step, figures[self.metric])

    def _compare(self, step: int, value: float) -> None:
        if value > self._value:  # of equals, the first
            self._value, self.step = value, step
