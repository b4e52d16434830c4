"""Files that a run writes while it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL.Image import Image

from vqclip import dist
from vqclip.data import TrainData
from vqclip.evaluation import Result, format_line
from vqclip.runlog.bad_samples import BadSamples
from vqclip.runlog.best import PREFIX, Best, Ranking
from vqclip.runlog.events import Events
from vqclip.runlog.lines import JsonLines
from vqclip.runlog.metrics import MetricsLog, read_evaluations
from vqclip.runlog.trackers import Feed, RunFacts, TrackerConfigBase

logger = logging.getLogger(__name__)


class Records:
    """Writer of ``metrics.jsonl``, ``bad_samples.jsonl``, ``events.jsonl`` and to trackers; rank 0 writes.

    Every rank has one. Making it is a collective.

    Args:
        folder: of the run.
        start_step: steps done.
        data: samples of this rank.
        bad_before: counts of the steps done, as `BadSamples.counts_to_save` returns them.
        keep_best: metric by which a step is best; None for none.
        best: best step so far, as stored in a checkpoint.
        trackers: trackers of the run.
        facts: what they show of the run; needed if there are any.

    Raises:
        ConfigError: a tracker of a new run cannot start.
    """

    def __init__(
        self,
        folder: Path,
        start_step: int,
        data: TrainData,
        bad_before: Mapping[str, Mapping[str, int]],
        keep_best: str | None,
        best: Mapping[str, Any] | None = None,
        trackers: Sequence[TrackerConfigBase] = (),
        facts: RunFacts | None = None,
    ):
        writes = dist.is_main()
        self.metrics = MetricsLog(folder, start_step=start_step) if writes else None
        """None on all ranks but one."""
        self._files = [JsonLines(folder / f"{name}.jsonl", start_step) for name in ("bad_samples", "events") if writes]
        bad, events = self._files or (None, None)
        self.bad, self.events = BadSamples(data, bad_before, bad), Events(events)

        self._feed: Feed | None = None
        """None without trackers, and on all ranks but one."""
        if trackers and facts is not None:
            dist.run_on_main(lambda: self._open_feed(trackers, facts, start_step))
        self.latest: dict[str, float] = {}
        """Newest value of every metric that this process has recorded; the same on every rank."""

        known = self.metrics.recorded if self.metrics else {}
        self.lacks_evaluation: bool = dist.broadcast_json(not any(name.startswith(PREFIX) for name in known))
        """Whether ``metrics.jsonl`` has no evaluation after ``start_step``; the same on every rank."""

        self._ranking = Ranking(keep_best, read_evaluations(self.metrics.path) if self.metrics else ())
        self._best: Best | None = None
        if keep_best is not None:
            self._best = Best(keep_best, best, folder if writes else None)
            self._best.update(start_step, known)  # the evaluation after a save is in no checkpoint yet

    def _open_feed(self, trackers: Sequence[TrackerConfigBase], facts: RunFacts, start_step: int) -> None:
        assert self.metrics is not None
        built = {each.kind: each.build() for each in trackers}
        self._feed = Feed(built, facts, self.metrics.path, start_step)

    @property
    def best(self) -> dict[str, Any] | None:
        """``step``, ``figure`` and ``value`` of the best step, for rank 0; None without one."""
        return None if self._best is None else self._best.to_json()

    def record(self, done: int, figures: Mapping[str, float]) -> None:
        """Record metrics after ``done`` steps; on every rank."""
        self.latest.update(figures)
        if self.metrics and figures:
            written = self.metrics.write(done, figures)
            if self._feed and written:
                self._feed.write(done, written)

    def record_evaluation(self, done: int, figures: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation after ``done`` steps, if there are any; on every rank."""
        figures = {f"{PREFIX}{name}": value for name, value in figures.items()}
        self.record(done, figures)
        if self._best and figures:
            self._best.update(done, figures)

    def report_evaluation(self, done: int, result: Result) -> None:
        """Tell the log how an evaluation went: its main figures beside chance, and whether it is the best so far."""
        place = self._ranking.place(done, result)
        logger.info("step %d: %s%s", done, format_line(result), place and f"; {place}")

    def add_images(self, done: int, draw: Callable[[], Mapping[str, Image]]) -> None:
        """Send images of the evaluation after ``done`` steps to the trackers; they are drawn only if there are any."""
        if self._feed:
            self._feed.images(done, draw)

    def warn(self, done: int, warning: str) -> None:
        """Tell the log and the trackers a warning about the run after ``done`` steps; on every rank."""
        if self.metrics:
            logger.warning("step %d: %s", done, warning)
        if self._feed:
            self._feed.text(done, "warning", warning)

    def flush(self, done: int) -> None:
        """Wait until all lines are on the disk; a checkpoint needs the lines of its ``done`` steps."""
        for file in (self.metrics, *self._files):
            if file is not None:
                file.flush()
        if self._feed:
            self._feed.flush(done)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # all of them, whatever happens to one
            for file in (self.metrics, *self._files):
                if file is not None:
                    stack.callback(_close, file)
            if self._feed:
                self._feed.close(finished=error is None)


def _close(file: MetricsLog | JsonLines) -> None:
    """Close a file; log its error as well, because only one error can be raised."""
    try:
        file.close()
    except OSError as error:
        logger.error("%s: may lack its last lines: %s", file.path, error)
        raise
