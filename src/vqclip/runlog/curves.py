"""Curves of a run from ``metrics.jsonl``, in bounded time and memory however long the file is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vqclip.io.files import open_regular
from vqclip.runlog.metrics import EVALUATION, parse_line

POINTS = 300
"""Lines that are read of a long file, evenly spread over it."""
LAST_LINES = 20
"""Lines at its end that are read of it."""
SMALL_BYTES = 2 << 20
"""Size up to which every line is read."""
MAX_LINE = 1 << 18
"""Longer lines count as damaged."""
MAX_NAMES = 3000
"""Metrics of a line; one with more counts as damaged."""
MAX_SCAN = 1 << 30
"""Bytes at the end of the file that are searched for these lines: about a second."""
MAX_EVALUATIONS = 300
"""Evaluations that are read: the newest."""


@dataclass
class Curves:
    """Metrics by step, in the order of the steps."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → metrics of the training. Values may be NaN or infinite."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → metrics of an evaluation, without their prefix."""
    damaged: int = 0
    """Lines that could not be read."""
    thinned: bool = False
    """Whether only some lines of a long file were read."""

    @property
    def last_step(self) -> int:
        """Newest step with any metric; 0 without one."""
        return max([0, *list(self.steps)[-1:], *list(self.evaluations)[-1:]])

    @property
    def latest(self) -> dict[str, float]:
        """Newest metrics of the training; empty without any."""
        return next(reversed(self.steps.values()), {})

    def get(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric of the training."""
        found = [(step, values[name]) for step, values in self.steps.items() if name in values]
        return [step for step, _ in found], [value for _, value in found]

    def names(self) -> list[str]:
        """Return the metrics of the training in the order of their appearance."""
        return list(dict.fromkeys(name for values in self.steps.values() for name in values))

    def add(self, entry: dict[str, Any]) -> None:
        """Add a line; one of an earlier step means that the run was resumed, so former later steps are dropped."""
        step = entry["step"]
        for known in (self.steps, self.evaluations):
            while known and next(reversed(known)) > step:
                known.popitem()
        values = {name: number for name, value in entry.items() if (number := _number(value)) is not None}
        values.pop("step", None)
        evaluated = {name: value for name, value in values.items() if name.startswith(EVALUATION)}
        trained = {name: value for name, value in values.items() if name not in evaluated}
        if evaluated:
            rates = {name.removeprefix(EVALUATION): value for name, value in evaluated.items()}
            self.evaluations.setdefault(step, {}).update(rates)
        if trained:
            self.steps.setdefault(step, {}).update(trained)


def read_curves(path: Path) -> Curves:
    """Read a ``metrics.jsonl``, also while it is written; damaged and cut lines are counted and left out.

    Of a file of more than `SMALL_BYTES` only `POINTS` lines, the last ones, and the evaluations are read.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    curves = Curves()
    with open_regular(path) as file:
        size = file.seek(0, 2)
        curves.thinned = size > SMALL_BYTES
        lines = read_lines(file, max(0, size - MAX_SCAN), size)
        if size > MAX_SCAN:
            next(lines)  # it begins before this part of the file
        for line in _choose(lines, min(size, MAX_SCAN)) if curves.thinned else lines:
            entry = parse_line(line) if len(line) <= MAX_LINE else None
            if entry is None or not 0 <= entry["step"] < 2**53 or len(entry) > MAX_NAMES:
                curves.damaged += bool(line.strip()) and (line.endswith(b"\n") or len(line) > MAX_LINE)
            else:
                curves.add(entry)
    return curves


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def read_lines(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Yield the lines in a part of a file; of a long one its beginning, without an end of line."""
    file.seek(start)
    while (position := file.tell()) < end:
        line = file.readline(min(MAX_LINE + 1, end - position))
        yield line
        while line and len(line) > MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE + 1)


def _choose(lines: Iterable[bytes], size: int) -> list[bytes]:
    """Return some lines of a long file of ``size`` bytes, the newest evaluations, and the last lines, in order."""
    spread, position, due = dict[int, bytes](), 0, 0.0
    evaluations, last = (deque[tuple[int, bytes]](maxlen=most) for most in (MAX_EVALUATIONS, LAST_LINES))
    mark = f'"{EVALUATION}'.encode()
    for line in lines:
        if position >= due:
            spread[position], due = line, position + size / POINTS
        if mark in line:
            evaluations.append((position, line))
        last.append((position, line))
        position += len(line)
    chosen = spread | dict(evaluations) | dict(last)
    return [chosen[position] for position in sorted(chosen)]
