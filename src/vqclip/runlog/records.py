"""Files that a run writes while it trains."""

from __future__ import annotations

import json
import logging
import signal
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL.Image import Image

from vqclip import dist
from vqclip.checkpoint import checkpoints
from vqclip.checkpoint.folders import step_of
from vqclip.data import Batch, TrainData
from vqclip.evaluation import Result, format_line
from vqclip.io.atomic import write_text
from vqclip.runlog.best import Best, Ranking
from vqclip.runlog.curves import read_curves
from vqclip.runlog.metrics import EVALUATION, JsonLines, MetricsLog
from vqclip.runlog.trackers import Feed, RunFacts, TrackerConfigBase
from vqclip.towers import CaptionLengths

logger = logging.getLogger(__name__)

MOST_LINES = 10_000
"""Maximum number of lines of ``bad_samples.jsonl``; a sample that cannot be read returns in every epoch."""


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
        self.bad, self._events = BadSamples(data, bad_before, bad), events

        self._feed: Feed | None = None
        """None without trackers, and on all ranks but one."""
        if trackers and facts is not None:
            dist.run_on_main(lambda: self._open_feed(trackers, facts, start_step))
        self.latest: dict[str, float] = {}
        """Newest value of every metric that this process has recorded; the same on every rank."""

        known = self.metrics.recorded if self.metrics else {}
        self.lacks_evaluation: bool = dist.broadcast_json(not any(name.startswith(EVALUATION) for name in known))
        """Whether ``metrics.jsonl`` has no evaluation after ``start_step``; the same on every rank."""

        evaluations = read_curves(self.metrics.path).evaluations if self.metrics and self.metrics.path.exists() else {}
        self._ranking = Ranking(keep_best, evaluations)
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
        figures = {f"{EVALUATION}{name}": value for name, value in figures.items()}
        self.record(done, figures)
        if self._best and figures:
            self._best.update(done, figures)

    def report_evaluation(self, done: int, result: Result) -> None:
        """Tell the log how an evaluation went: its main figures beside chance, and whether it is the best so far."""
        place = self._ranking.place(done, result)
        logger.info("step %d: %s%s", done, format_line(result), place and f"; {place}")

    def record_event(self, kind: str, reason: str, applied: bool, batch: Batch) -> None:
        """Record an unusual step, with the samples of its global batch. A collective.

        Args:
            kind: one word.
            reason: the observation, in words.
            applied: whether the step changed the weights.
            batch: this rank's part of the global batch.
        """
        parts = dist.gather_json([batch.places.tolist(), batch.sample_ids.tolist()])
        placed = sorted(pair for places, ids in parts for pair in zip(places, ids, strict=True))
        if self._events is None:
            return
        logger.warning("step %d: %s: %s%s", batch.step, kind, reason, "" if applied else "; the step was skipped")
        event = {"event": kind, "reason": reason, "applied": applied, "sample_ids": [each for _, each in placed]}
        self._events.write(batch.step + 1, event)
        self._events.flush()

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


def _close(file: JsonLines) -> None:
    """Close a file; log its error as well, because only one error can be raised."""
    try:
        file.close()
    except OSError as error:
        logger.error("%s: may lack its last lines: %s", file.path, error)
        raise


class BadSamples:
    """Bad samples and caption lengths of the whole run, over all ranks.

    Args:
        data: what this rank reads.
        before: counts of the steps before a resume, as `counts_to_save` returns them.
        lines: file for their records; None on all ranks but one.
    """

    def __init__(self, data: TrainData, before: Mapping[str, Mapping[str, int]], lines: JsonLines | None):
        self.counts = Counter(before.get("replaced", {}))
        """Kind → number of replaced samples, as of the last `collect`."""
        self.lengths = CaptionLengths({int(length): n for length, n in before.get("caption_lengths", {}).items()})
        """Lengths of the captions shown, as of the last `collect`."""
        self.last: deque[str] = deque(maxlen=5)
        """Reasons of the last ones; the same on every rank after a `collect`."""
        self._data, self._lines = data, lines

    def collect(self) -> int:
        """Record and count the samples replaced since the last call; return the run's total. A collective."""
        parts = dist.gather_json([self._new_records(), list(self._data.take_lengths().items())])
        self._record([bad for found, _ in parts for bad in found])
        for _, lengths in parts:
            self.lengths.update(dict(lengths))
        return self.counts.total()

    def counts_to_save(self) -> dict[str, dict[str, int]]:
        """Return the counts for a checkpoint: ``replaced`` by kind, ``caption_lengths`` by length."""
        lengths = {str(length): n for length, n in sorted(self.lengths.items())}
        return {"replaced": dict(self.counts), "caption_lengths": lengths}

    def write_own(self) -> None:
        """Record the samples that this rank has replaced, without communication: for a run that ends with an error."""
        self._record(self._new_records())

    def _new_records(self) -> list[dict[str, Any]]:
        return [{"step": step + 1, **bad._asdict()} for step, bad in self._data.take_replaced()]

    def _record(self, found: list[dict[str, Any]]) -> None:
        # Sorted, because the order must not depend on the number of ranks.
        for bad in sorted(found, key=lambda each: (each["step"], each["sample_id"], each["substitute_id"])):
            self.last.append(bad["reason"])
            number = self.counts.total()
            self.counts[bad["kind"]] += 1
            if self._lines is not None and number < MOST_LINES:
                self._lines.write(bad.pop("step"), bad)
            elif self._lines is not None and number == MOST_LINES:
                logger.warning("%s: full with %d lines; more bad samples are only counted", self._lines.path, number)

    def figures(self) -> dict[str, float]:
        """Return the total and the number of each kind, as metrics."""
        kinds = {f"data/replaced/{kind.replace(' ', '_')}": float(n) for kind, n in sorted(self.counts.items())}
        return {"data/replaced": float(self.counts.total()), **kinds}


def write_stopped(folder: Path, steps: int, reason: str) -> int:
    """Write ``stopped.json`` after the last checkpoint, which tells a scheduler to resume; on one rank only.

    Args:
        folder: of the run.
        steps: of the whole run.
        reason: name of the signal, or the reason in words.

    Returns:
        Steps done: those of the newest checkpoint, from which the run resumes.
    """
    saved = checkpoints(folder / "checkpoints")
    done = step_of(saved[-1]) if saved else 0
    facts = {
        "step": done,
        "steps": steps,
        "signal": reason if reason in signal.Signals.__members__ else None,
        "reason": reason,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checkpoint": str(saved[-1].relative_to(folder)) if saved else None,
        "how_to_resume": "run the same command again: it resumes from the newest checkpoint",
    }
    write_text(folder / "stopped.json", json.dumps(facts, indent=2) + "\n")
    return done


def remove_stopped(folder: Path) -> None:
    """Remove ``stopped.json`` when the run resumes; call it on one rank only."""
    (folder / "stopped.json").unlink(missing_ok=True)
