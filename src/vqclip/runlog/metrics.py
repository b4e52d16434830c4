"""Metrics of a run in ``metrics.jsonl``, and other JSON Lines files about its steps.

`JsonLines` writes them. `read_metrics` yields every line; `read_curves` reads them by step in bounded time and memory,
however long the file is.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import mmap
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vqclip.data import mask_credentials
from vqclip.errors import DataError
from vqclip.io.files import name_file_in_errors, open_regular

logger = logging.getLogger(__name__)

EVALUATION = "eval/"
"""Prefix of the metrics of evaluations."""
POINTS = 300
"""Lines that `read_curves` reads of a long file, evenly spread over it."""
LAST_LINES = 120
"""Lines at its end that are read of it: as many as `vqclip.runlog.health` looks back."""
SMALL_BYTES = 2 << 20
"""Size up to which every line is read."""
MAX_LINE = 1 << 18
"""Longer lines of a long file count as damaged."""
MAX_NAMES = 3000
"""Metrics of a line of `read_curves`; one with more counts as damaged."""
MAX_SCAN = 1 << 30
"""Bytes at the end of the file that are searched for these lines: about a second."""
MAX_EVALUATIONS = 300
"""Evaluations that are read: the newest."""
_BLOCK = 1 << 20
"""Bytes that are searched at a time."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """Writer of a JSON Lines file about the steps of a run, in one process.

    On resume it removes the lines of a killed run about steps after ``start_step``, so that no step occurs twice, and a
    line cut short by a crash. Numbers that are not finite become the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, because JSON has no such numbers; Python's ``float()`` reads them.

    Args:
        path: the file, made with the first line; its folder is made if necessary.
        start_step: steps done: 0 for a new run, the checkpoint's step on resume.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.recorded = _drop_after(self.path, start_step)
        """Values in the file for ``start_step`` itself, all its lines merged."""
        self._start_step = self._last_step = start_step
        self._file: BinaryIO | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append ``{"step": step, **values}``, flush it to the system, and return the values.

        A step may have several lines (training, then evaluation). Values that the file already has for ``start_step``
        are left out, such as those of a finished run that is evaluated once more.

        Args:
            step: steps done; not less than in the line before.
            values: JSON values, without a key ``step``.
        """
        assert step >= self._last_step, f"a line of step {step} after one of step {self._last_step}"
        assert "step" not in values
        if step == self._start_step == self._last_step:
            known = {name: to_json_value(value) for name, value in self.recorded.items()}
            values = {name: v for name, v in values.items() if name not in known or known[name] != to_json_value(v)}
            if not values:
                return {}
        line = {"step": step, **{name: to_json_value(value) for name, value in values.items()}}
        if self._file is not None and not self.path.exists():
            logger.warning("%s: was deleted; a new file begins with step %d", self.path, step)
            self.close()
        with name_file_in_errors(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        self._last_step = step
        return dict(values)

    def flush(self) -> None:
        """Wait until all lines are on the disk; call it before a checkpoint is saved."""
        if self._file is not None:
            with name_file_in_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; may be called twice."""
        file, self._file = self._file, None
        if file is not None:
            with name_file_in_errors(self.path), file:
                file.flush()
                os.fsync(file.fileno())


def _drop_after(path: Path, step: int) -> dict[str, Any]:
    """Remove the lines of steps after `step`, and broken lines, from the end of a file; read no other lines.

    Returns:
        The values for `step`.
    """
    recorded: dict[str, Any] = {}
    if not path.exists() or not path.stat().st_size:
        return recorded
    later = broken = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = kept = len(text)
        while end:
            begin = text.rfind(b"\n", 0, end - 1) + 1
            entry = parse_line(text[begin:end])
            if entry is not None and entry["step"] < step:
                break
            if entry is not None and entry["step"] == step:
                recorded = entry | recorded
            elif end == kept:
                kept = begin
                later, broken = later + (entry is not None), broken + (entry is None)
            end = begin
        if later or broken:
            logger.warning("%s: dropped %d lines of steps after %d and %d broken ones", path, later, step, broken)
            os.truncate(file.fileno(), kept)
            os.fsync(file.fileno())
    return recorded


def to_json_value(value: Any) -> Any:
    """Return the value as the file has it."""
    if isinstance(value, str):
        return mask_credentials(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line, with numbers that are not finite as floats; None for a broken line.

    A line is broken if it was cut short, or has no step.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return None
    return {name: _NOT_FINITE.get(each, each) if isinstance(each, str) else each for name, each in entry.items()}


def read_metrics(path: Path, *, skip_damaged: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ``metrics.jsonl``, with numbers that are not finite as floats.

    Args:
        path: the file.
        skip_damaged: leave out lines that are not a JSON object with a step, each with a warning.

    Raises:
        DataError: a line is not a JSON object with a step; the message has its number.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            told = f"{path}:{number}: not a line of metrics: {line[:80]!r}"
            if (entry := parse_line(line)) is not None:
                yield entry
            elif skip_damaged:
                logger.warning("%s; it is left out", told)
            else:
                raise DataError(told)


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
        return max([0, *self.steps, *self.evaluations])

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


def read_curves(path: Path) -> Curves:
    """Read a ``metrics.jsonl``, also while it is written; damaged and cut lines are counted and left out.

    Of a file of more than `SMALL_BYTES` only `POINTS` lines, the last ones, and the evaluations are read.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    curves, entries = Curves(), list[dict[str, Any]]()
    with open_regular(path) as file:
        size = file.seek(0, 2)
        curves.thinned = size > SMALL_BYTES
        file.seek(0)
        for line in _choose(file, size) if curves.thinned else file:
            entry = parse_line(line)
            if entry is not None and 0 <= entry["step"] < 2**53 and len(entry) <= MAX_NAMES:
                entries.append(entry)
            else:
                curves.damaged += bool(line.strip()) and (line.endswith(b"\n") or len(line) == MAX_LINE)
    for step, trained, evaluated in merge_lines(entries):
        curves.steps |= {step: trained} if trained else {}
        curves.evaluations |= {step: evaluated} if evaluated else {}
    return curves


def merge_lines(entries: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float], dict[str, float]]]:
    """Yield each step with its numbers: those of the training, and those of an evaluation without their prefix."""
    for step, lines in itertools.groupby(entries, operator.itemgetter("step")):
        values: dict[str, float] = {}
        for name, value in (pair for line in lines for pair in line.items()):
            if name != "step" and not isinstance(value, bool) and isinstance(value, (int, float)):
                try:
                    values[name] = float(value)
                except OverflowError:
                    values[name] = math.inf if value > 0 else -math.inf
        evaluated = {name: value for name, value in values.items() if name.startswith(EVALUATION)}
        trained = {name: value for name, value in values.items() if name not in evaluated}
        yield step, trained, {name.removeprefix(EVALUATION): value for name, value in evaluated.items()}


def _choose(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield lines of a long file in order: some that are evenly spread, the newest evaluations, and the last ones.

    Of a line that is longer than `MAX_LINE`, a part of this length. The file is read and not mapped to memory: a run
    that resumes may cut it meanwhile.
    """
    first, mark = max(0, size - MAX_SCAN), f'"{EVALUATION}'.encode()

    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    def begin(place: int) -> int:
        """Return where the line of a place begins; of one that is too long, or cut, any place in it."""
        low = max(first, place - MAX_LINE)
        return low + read(low, place).rfind(b"\n") + 1

    def find_mark(end: int) -> int:
        """Return the last place before ``end`` with a mark; -1 without one."""
        while end > first:
            low = max(first, end - _BLOCK)
            if (found := read(low, end + len(mark) - 1).rfind(mark)) >= 0:
                return low + found
            end = low
        return -1

    chosen, end = {begin(first + number * (size - first) // POINTS) for number in range(POINTS)}, size
    for _ in range(LAST_LINES):
        end = begin(max(end - 1, first))
        chosen.add(end)
    end = size
    for _ in range(MAX_EVALUATIONS):
        if (place := find_mark(end)) < 0:
            break
        end = begin(place)
        chosen.add(end)
    for place in sorted(chosen):
        if place == 0 or read(place - 1, place) == b"\n":
            file.seek(place)
            yield file.readline(min(MAX_LINE, size - place))
