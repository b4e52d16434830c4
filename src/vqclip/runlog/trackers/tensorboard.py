"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vqclip.errors import encodable
from vqclip.runlog.trackers.feed import RunFacts, Tracker, TrackerConfigBase

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writer of ``<run>/tensorboard``.

    On resume TensorBoard hides what earlier files say about the checkpoint's step and later ones; those of the
    checkpoint's step are sent again. Files are flushed before each checkpoint, so nothing before it is missing.
    """

    def __init__(self) -> None:
        self._board: Any = None
        self._open = contextlib.ExitStack()

    def start(self, facts: RunFacts, resumed: int) -> int:
        """Open a new event file; everything before the checkpoint's step is there."""
        # Takes seconds to import.
        from torch.utils.tensorboard import SummaryWriter

        folder = facts.folder / FOLDER
        if encodable(str(folder)) != str(folder):  # a path that TensorBoard does not take
            descriptor = os.open(facts.folder, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, descriptor)
            folder = Path(f"/dev/fd/{descriptor}/{FOLDER}")
        self._board = SummaryWriter(str(folder), purge_step=resumed)
        self._board.add_text("configuration", textwrap.indent(facts.text, "    "), resumed)  # indented: as it is
        return resumed - 1

    def log(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Write scalars and histograms."""
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        for name, values in histograms.items():
            self._board.add_histogram(name, np.asarray(values, dtype=np.float64), step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, as it is."""
        self._board.add_text(name, textwrap.indent(text, "    "), step)

    def flush(self) -> None:
        """Wait until all is on the disk."""
        self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._board is not None:
            self._board.close()
        self._open.close()


class TensorBoardConfig(TrackerConfigBase):
    """Event files in the run's folder: ``tensorboard --logdir runs``."""

    kind: Literal["tensorboard"] = "tensorboard"
    """TensorBoard."""

    def build(self) -> TensorBoard:
        """Make the tracker."""
        return TensorBoard()
