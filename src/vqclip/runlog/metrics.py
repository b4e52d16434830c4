"""Metrics of a run, in ``metrics.jsonl``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from vqclip.errors import DataError
from vqclip.runlog.lines import JsonLines, parse_line, to_json_value

logger = logging.getLogger(__name__)

_FILE = "metrics.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Value = float | int | bool | str | Tensor | None


class MetricsLog:
    """Writer of the metrics of a run, in one process.

    On resume it removes later steps (`JsonLines`). Values that the file already has for ``start_step`` are not written
    again, such as those of a finished run that is evaluated once more.

    Args:
        folder: of the run; made if necessary.
        start_step: steps done: 0 for a new run, the checkpoint's step on resume.
    """

    def __init__(self, folder: Path, *, start_step: int = 0) -> None:
        self._lines = JsonLines(Path(folder) / _FILE, start_step)
        self.path = self._lines.path
        self.recorded = self._lines.recorded
        """Values in the file for ``start_step`` itself, all its lines merged."""
        self._start_step = start_step

    def write(self, step: int, values: Mapping[str, Value]) -> dict[str, Any]:
        """Append one line, ``{"step": step, **values}``, and flush it; return its values.

        Reading a tensor waits for its device. A step may have several lines (training, then evaluation).

        Args:
            step: steps done; not less than in the line before.
            values: name to value; tensors have one element.
        """
        self._lines.check(step)
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        if step == self._start_step:
            missing = object()
            known = self._lines.recorded
            plain = {name: value for name, value in plain.items() if known.get(name, missing) != to_json_value(value)}
            if not plain:
                return {}
        self._lines.write(step, plain)
        return plain

    def flush(self) -> None:
        """Wait until all lines are on the disk; call it before a checkpoint is saved."""
        self._lines.flush()

    def close(self) -> None:
        """Flush and close; may be called twice."""
        self._lines.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
            entry = parse_line(line)
            if entry is None:
                told = f"{path}:{number}: not a line of metrics: {line[:80]!r}"
                if not skip_damaged:
                    raise DataError(told)
                logger.warning("%s; it is left out", told)
                continue
            yield {name: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in entry.items()}


def read_evaluations(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step and metrics of each line about an evaluation; fast, and nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if b' "eval/' in line and (entry := parse_line(line)) is not None:
                yield entry["step"], entry
