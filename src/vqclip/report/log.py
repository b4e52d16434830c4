"""The metrics of a run: one JSON object a line in ``metrics.jsonl``, and TensorBoard.

A number that is not finite is written as the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, for JSON has no
other way to say it; Python's ``float()`` reads these back, and so does `read_metrics`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from torch import Tensor

from vqclip.errors import DataError
from vqclip.files import sync_folder

logger = logging.getLogger(__name__)

_FILE = "metrics.jsonl"
_BOARD = "tensorboard"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Value = float | int | bool | str | Tensor | None


class MetricsLog:
    """Writes the metrics of a run; for one process only, the caller decides which.

    On resume, what a killed run wrote about steps after ``start_step`` is dropped, so no step stands there twice. A
    line cut short by a crash is dropped too. What the file says already about ``start_step`` itself, such as the final
    evaluation of a finished run that is evaluated again, is not written a second time.

    Args:
        folder: The run's folder; made if it is missing.
        start_step: Number of steps done: 0 for a new run, the checkpoint's step on resume.
        tensorboard: Write event files into ``folder/tensorboard`` as well.
    """

    def __init__(self, folder: Path, *, start_step: int = 0, tensorboard: bool = True) -> None:
        self.path = Path(folder) / _FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recorded = _drop_after(self.path, start_step)
        self._start_step = self._last_step = start_step
        self._file: BinaryIO = self.path.open("ab")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

            # purge_step: TensorBoard hides what an earlier event file says about this step and later ones.
            self._board = SummaryWriter(str(self.path.parent / _BOARD), purge_step=start_step + 1)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Append one line, ``{"step": step, **values}``, and flush it.

        Numbers go to TensorBoard as well; text, booleans and None to the file only. Reading a tensor waits for its
        device. Several lines about one step (training, then evaluation) are possible; going back is not.

        Args:
            step: Number of steps done; at least that of the line before.
            values: Name to value; tensors have one element.
        """
        assert step >= self._last_step, f"metrics of step {step} after those of step {self._last_step}"
        assert "step" not in values
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        if step == self._start_step:
            missing = object()
            plain = {name: value for name, value in plain.items() if self._recorded.get(name, missing) != _spelt(value)}
            if not plain:
                return
        line = {"step": step, **{name: _spelt(value) for name, value in plain.items()}}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._last_step = step
        if self._board is not None:
            for name, value in plain.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Wait until all lines are on the disk; to be called before a checkpoint, which vouches for its steps."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._file.closed:
            return
        self.flush()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, with its not-finite numbers as floats again.

    Raises:
        DataError: A line is no JSON object with a step; the message gives its number.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            entry = _parsed(line)
            if entry is None:
                raise DataError(f"{path}:{number}: not a line of metrics: {line[:80]!r}")
            yield {name: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in entry.items()}


def _drop_after(path: Path, step: int) -> dict[str, Any]:
    """Rewrite the file at `path`, in one stroke, without lines of steps after `step` and without broken lines.

    Returns:
        What it says about `step`.
    """
    recorded: dict[str, Any] = {}
    if not path.exists():
        return recorded
    aside = path.with_name(f".tmp-{path.name}")
    later = broken = 0
    with path.open("rb") as source, aside.open("wb") as target:
        for line in source:
            entry = _parsed(line)
            if entry is None:
                broken += 1
            elif entry["step"] > step:
                later += 1
            else:
                target.write(line)
                if entry["step"] == step:
                    recorded |= entry
        target.flush()
        os.fsync(target.fileno())
    if later or broken:
        logger.warning("%s: dropped %d lines of steps after %d and %d broken ones", path, later, step, broken)
        os.replace(aside, path)
        sync_folder(path.parent)
    else:
        aside.unlink()
    return recorded


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None if the line is broken (cut short, no step)."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def _spelt(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
