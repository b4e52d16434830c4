"""JSON Lines files about the steps of a run."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vqclip.data import mask_credentials
from vqclip.io.files import name_file_in_errors

logger = logging.getLogger(__name__)


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

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``{"step": step, **values}`` and flush it to the system.

        Args:
            step: steps done; not less than in the line before.
            values: JSON values, without a key ``step``.
        """
        self.check(step)
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

    def check(self, step: int) -> None:
        """Require that steps never decrease."""
        assert step >= self._last_step, f"a line of step {step} after one of step {self._last_step}"

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
