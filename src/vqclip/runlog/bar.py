"""Progress display: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType

from tqdm import tqdm

from vqclip.runlog.console import log_to_file

logger = logging.getLogger(__name__)

_BETWEEN_LINES_S = 5.0


class ProgressBar:
    """A tqdm bar over the steps of a run, with loss, images per second and data wait; or over samples.

    If stderr is not a terminal, it writes log lines: the first, the last, and others a few seconds apart. On a terminal
    these lines go to the log file only.

    Args:
        total: steps of the run.
        done: steps done before this process started.
        visible: True on one rank only.
        name: text before the bar.
        unit: name of what is counted.
    """

    def __init__(self, total: int, done: int, visible: bool, name: str, unit: str = "step"):
        self._total, self._done, self._visible, self._unit = total, done, visible, unit
        self._since, self._done_before = time.monotonic(), done
        self._next_line = self._since
        self._figures: Mapping[str, float] = {}
        self._on_terminal = visible and sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not self._on_terminal,
            desc=name,
            unit=unit,
            dynamic_ncols=True,
            smoothing=0.05,
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Advance by ``count`` steps or samples."""
        self._done += count
        self._bar.update(count)

    def show(self, figures: Mapping[str, float] | None = None) -> None:
        """Show the newest metrics behind the bar, or write a line if the last one is some seconds old."""
        self._figures = figures or {}
        self._bar.set_postfix_str(", ".join(f"{name}={value}" for name, value in self._texts().items()), refresh=False)
        now = time.monotonic()
        if self._visible and (now >= self._next_line or self._done >= self._total):
            self._next_line = now + _BETWEEN_LINES_S
            line = [f"{self._unit} {self._done}/{self._total}", *(f"{n} {v}" for n, v in self._texts().items())]
            if counted := self._done - self._done_before:
                left = (now - self._since) * (self._total - self._done) / counted
                line.append(f"left {tqdm.format_interval(left)}")
            (log_to_file if self._on_terminal else logger.info)(" ".join(line))

    def _texts(self) -> dict[str, str]:
        texts, figures = {}, self._figures
        if "loss/total" in figures:
            texts["loss"] = f"{figures['loss/total']:.3f}"
        if "images_per_second" in figures:
            texts["img/s"] = f"{figures['images_per_second']:.0f}"
            texts["data"] = f"{figures['data_wait']:.0%}"
        if "bytes" in figures:
            texts["size"] = f"{tqdm.format_sizeof(figures['bytes'], 'B')}"
        return texts

    def last_line(self, text: str) -> None:
        """Set the text behind the finished bar."""
        self._bar.set_postfix_str(text)
