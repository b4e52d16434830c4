"""Metrics of a run in ``metrics.jsonl``, and other JSON Lines files about its steps."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from torch import Tensor
from typing_extensions import Self

from vqclip.data import mask_credentials
from vqclip.errors import DataError
from vqclip.io.files import name_file_in_errors

logger = logging.getLogger(__name__)

EVALUATION = "eval/"
"""Prefix of the metrics of evaluations."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Value = float | int | bool | str | Tensor | None


class JsonLines:
    """Writer of one such file, in one process.

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
        self._last_step = start_step
        self._file: BinaryIO | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append ``{"step": step, **values}``, flush it to the system, and return the values.

        Args:
            step: steps done; not less than in the line before.
            values: JSON values, without a key ``step``.
        """
        assert step >= self._last_step, f"a line of step {step} after one of step {self._last_step}"
        assert "step" not in values
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MetricsLog(JsonLines):
    """Writer of the metrics of a run, in one process.

    Values that the file already has for ``start_step`` are not written again, such as those of a finished run that is
    evaluated once more.

    Args:
        folder: of the run; made if necessary.
        start_step: steps done: 0 for a new run, the checkpoint's step on resume.
    """

    def __init__(self, folder: Path, *, start_step: int = 0) -> None:
        super().__init__(Path(folder) / "metrics.jsonl", start_step)
        self._start_step = start_step

    def write(self, step: int, values: Mapping[str, Value]) -> dict[str, Any]:
        """Append one line, and return its values. A step may have several lines (training, then evaluation).

        Reading a tensor waits for its device.

        Args:
            step: steps done; not less than in the line before.
            values: name to value; tensors have one element.
        """
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        if step == self._start_step == self._last_step:
            known, missing = self.recorded, object()
            plain = {name: value for name, value in plain.items() if known.get(name, missing) != to_json_value(value)}
            if not plain:
                return {}
        return super().write(step, plain)


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


def to_json_value(value: Any) -> Any:
    """Return the value as the file has it."""
    if isinstance(value, str):
        return mask_credentials(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None for a broken line (cut short, or without a step)."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


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
