"""Progress display: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from vqclip.runlog.console import log_to_file
from vqclip.runlog.health import CODED, read_codebooks

logger = logging.getLogger(__name__)

_BETWEEN_LINES_S = 5.0
_LONGEST_NAME = 8
_FORM = "{desc} {n_fmt}/{total_fmt} {bar} {remaining} left{postfix}"
"""Format of the line; its bar shrinks where the terminal is narrow. Six digits of steps fit into 80 columns."""


class ProgressBar:
    """A tqdm bar over the steps of a run, or over samples: done, time left, and the newest metrics.

    ``wait`` is the part of the time spent waiting for data. ``codes`` is of the codebook that uses the fewest codes:
    the part in use of those that evenly used codes would be.

    If stderr is not a terminal, it writes log lines: the first, the last, and others a few seconds apart, also between
    two reports. On a terminal these lines go to the log file only.

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
        self._next_line = self._since + _BETWEEN_LINES_S
        self._figures: Mapping[str, float] = {}
        self._is_first = True
        self._on_terminal = visible and sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not self._on_terminal,
            desc=name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}...",
            unit=unit,
            bar_format=_FORM,
            dynamic_ncols=True,
            smoothing=0.05,
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Advance by ``count`` steps or samples; write a line if the last one is some seconds old."""
        self._done += count
        self._bar.update(count)
        if time.monotonic() >= self._next_line:
            self._write_line()

    def show(self, figures: Mapping[str, float] | None = None) -> None:
        """Show the newest metrics behind the bar, or write a line if the last one is some seconds old."""
        self._figures = figures or {}
        self._bar.set_postfix_str(" ".join(self._texts()), refresh=False)
        if self._is_first or self._done >= self._total or time.monotonic() >= self._next_line:
            self._write_line()

    def _write_line(self) -> None:
        now, self._is_first = time.monotonic(), False
        self._next_line = now + _BETWEEN_LINES_S
        line = [f"{self._unit} {self._done}/{self._total}", *self._texts(long=True)]
        if counted := self._done - self._done_before:
            left = (now - self._since) * (self._total - self._done) / counted
            line.append(f"{tqdm.format_interval(left)} left")
        if self._visible:
            (log_to_file if self._on_terminal else logger.info)(", ".join(line))

    def _texts(self, long: bool = False) -> list[str]:
        """Return the metrics, in few words for the bar or in more for a line."""
        texts, figures = [], self._figures
        if "loss/total" in figures:
            texts.append(f"loss {figures['loss/total']:.3f}")
        if "images_per_second" in figures:
            wait = f"{figures['data_wait']:.0%}"
            texts.append(f"{figures['images_per_second']:.0f} img/s")
            texts.append(f"{wait} waiting" if long else f"wait {wait}")
        if codebooks := read_codebooks(figures, dict.fromkeys(CODED, 0)):
            least = min(codebooks, key=lambda each: each.share)
            share = f"{least.share:.0%}"
            which = f"{least.modality} {least.number}".rstrip()
            texts.append(f"codes {share} ({which})" if long else f"codes {share}")
        if "bytes" in figures:
            texts.append(f"size {tqdm.format_sizeof(figures['bytes'], 'B')}")
        return texts
