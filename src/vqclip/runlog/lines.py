"""Files of JSON objects about the steps of a run, one a line."""

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
    """Appends to one such file; for one process only, the caller decides which.

    On resume, what a killed run wrote about steps after ``start_step`` is dropped, so no step stands there twice. A
    line cut short by a crash is dropped too. A number that is not finite is written as the string ``"NaN"``,
    ``"Infinity"`` or ``"-Infinity"``, for JSON has no other way to say it; Python's ``float()`` reads these back.

    Args:
        path: The file, made with the first line; its folder is made if it is missing.
        start_step: Number of steps done: 0 for a new run, the checkpoint's step on resume.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.recorded = _drop_after(self.path, start_step)
        """What the file says about ``start_step`` itself, all its lines in one."""
        self._last_step = start_step
        self._file: BinaryIO | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``{"step": step, **values}`` and flush it to the system.

        Args:
            step: Number of steps done; at least that of the line before.
            values: What JSON can hold, without a key ``step``.
        """
        self.check(step)
        assert "step" not in values
        line = {"step": step, **{name: spelt(value) for name, value in values.items()}}
        if self._file is not None and not self.path.exists():
            logger.warning("%s: was deleted; a new one is begun with step %d", self.path, step)
            self.close()
        with name_file_in_errors(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        self._last_step = step

    def check(self, step: int) -> None:
        """Steps never go back."""
        assert step >= self._last_step, f"a line of step {step} after one of step {self._last_step}"

    def flush(self) -> None:
        """Wait until all lines are on the disk; to be called before a checkpoint, which vouches for its steps."""
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


def spelt(value: Any) -> Any:
    """The value as it stands in the file."""
    if isinstance(value, str):
        return mask_credentials(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None if the line is broken (cut short, no step)."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def _drop_after(path: Path, step: int) -> dict[str, Any]:
    """Cut lines of steps after `step`, and broken lines at the end, off the file at `path`; reads no others.

    Returns:
        What it says about `step`.
    """
    recorded: dict[str, Any] = {}
    if not path.exists() or not path.stat().st_size:
        return recorded
    later = broken = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = kept = len(text)
        while end:
            begin = text.rfind(b"\n", 0, end - 1) + 1
            entry = parsed(text[begin:end])
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
