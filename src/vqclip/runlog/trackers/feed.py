"""Feeding trackers: each step of ``metrics.jsonl`` once, whenever the process was killed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL.Image import Image

from vqclip.data import mask_credentials
from vqclip.errors import ConfigError
from vqclip.runlog.metrics import read_metrics
from vqclip.runlog.trackers.base import RunFacts, Tracker
from vqclip.runlog.trackers.view import view

logger = logging.getLogger(__name__)


class Feed:
    """Sends the lines of ``metrics.jsonl`` to trackers; on one rank.

    ``metrics.jsonl`` is what is true: after a resume it has each step once, and none after the checkpoint. A tracker
    says up to which step it has everything, and is sent the later ones from the file, before the run continues. All
    lines of a step are sent as one when a later step begins, so trackers are behind the file by one report. What a
    tracker does on resume is in the docstrings of its class; so are the prices.

    An error in a tracker is a warning, and the run continues without it. Only at the start of a new run it ends the
    run, before the first step.

    Args:
        trackers: by kind, closed.
        facts: the run.
        path: ``metrics.jsonl``, without the lines after ``resumed``.
        resumed: steps done.

    Raises:
        ConfigError: a tracker of a new run cannot start.
    """

    def __init__(self, trackers: Mapping[str, Tracker], facts: RunFacts, path: Path, resumed: int):
        self._trackers, self._resumed = dict(trackers), resumed
        self._row: dict[str, Any] = {}
        """Metrics of the newest step; it may get more."""
        self._images: dict[str, Image] = {}
        """Images of that step; sent with its metrics, which a tracker that only appends could not add to them."""
        self._step = -1
        try:
            self._has = {kind: self._start(kind, facts) for kind in trackers}
            if resumed and self._trackers:
                self._send_again(path)
        except BaseException:
            self.close(finished=False)
            raise

    def _start(self, kind: str, facts: RunFacts) -> int:
        try:
            return self._trackers[kind].start(facts, self._resumed)
        except Exception as error:  # another package may raise anything
            told = f"{kind} cannot start: {type(error).__name__}: {mask_credentials(str(error)).rstrip('.')}"
            if not self._resumed:
                raise ConfigError(
                    f"run.trackers: {told}. Correct its settings, or remove it from run.trackers"
                ) from error
            self._give_up(kind, told)
            return 0

    def _send_again(self, path: Path) -> None:
        first = min(self._has[kind] for kind in self._trackers)
        for row in read_metrics(path, skip_damaged=True) if path.exists() else ():
            if row["step"] > first:
                self.write(row["step"], row)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Take the values of a line of the file."""
        self.flush(step)
        self._step = step
        self._row |= row

    def flush(self, done: int) -> None:
        """Send the steps before ``done``, which are complete, and have them written; call it before a checkpoint."""
        if self._step < done:
            self._send_row(self._trackers)
        if not self._row:
            self._call("flush", lambda tracker: tracker.flush())

    def _send_row(self, kinds: Iterable[str]) -> None:
        step, row, images = self._step, self._row, self._images
        self._row, self._images = {}, {}
        if images:
            self._call("images", lambda tracker: tracker.images(step, images), self._lacking(step, kinds))
        if row:
            self._call("log", lambda tracker: tracker.log(step, *view(row)), self._lacking(step, kinds))

    def _lacking(self, step: int, kinds: Iterable[str]) -> list[str]:
        return [kind for kind in kinds if kind in self._trackers and step > self._has[kind]]

    def images(self, step: int, draw: Callable[[], Mapping[str, Image]]) -> None:
        """Take images of a step; they are drawn only if there are trackers."""
        try:
            images = draw() if self._trackers else {}
        except Exception as error:  # an image must not end a run
            logger.warning("step %d: no images for trackers: %s: %s", step, type(error).__name__, error)
            return
        self.write(step, {})
        self._images |= images

    def text(self, step: int, name: str, text: str) -> None:
        """Send a text, with credentials masked."""
        self._call("text", lambda tracker: tracker.text(step, name, mask_credentials(text)))

    def close(self, finished: bool) -> None:
        """Send what is left, and close; may be called twice.

        Args:
            finished: whether the run is at its end; otherwise a resumed run may evaluate its last step.
        """
        self._send_row([kind for kind, each in self._trackers.items() if finished or not each.appends_only])
        self._call("close", lambda tracker: tracker.close())
        self._trackers = {}

    def _call(self, name: str, call: Callable[[Tracker], object], kinds: Sequence[str] | None = None) -> None:
        for kind in list(self._trackers) if kinds is None else kinds:
            try:
                call(self._trackers[kind])
            except Exception as error:
                self._give_up(kind, f"{kind} failed ({name}: {type(error).__name__}: {mask_credentials(str(error))})")

    def _give_up(self, kind: str, told: str) -> None:
        del self._trackers[kind]
        logger.warning(
            "%s: the run continues without it; metrics.jsonl has everything, and a resumed run sends what it lacks",
            told,
        )

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(finished=error is None)
