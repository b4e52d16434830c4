"""Files that a run writes while it trains: metrics, bad samples, events, the best step, and why it was stopped."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vqclip import dist
from vqclip.checkpoint import checkpoint_name, checkpoints, step_of
from vqclip.data import Batch, TrainData
from vqclip.errors import CheckpointError
from vqclip.evaluation import Result, format_line, main_figures
from vqclip.io.atomic import write_text
from vqclip.runlog.health import Health
from vqclip.runlog.metrics import EVALUATION, JsonLines, merge_lines, read_metrics
from vqclip.runlog.trackers import Feed, RunFacts, TrackerConfigBase
from vqclip.towers import CaptionLengths

logger = logging.getLogger(__name__)

_BEST_FILE = "best.json"
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
        health: judge of the reports, without any; rank 0 adds those in ``metrics.jsonl``, and each further one.
        keep_best: metric by which a step is best, larger is better; None for none.
        best: best step so far, as stored in a checkpoint; ignored if of another metric, or if its checkpoint is gone.
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
        health: Health,
        keep_best: str | None,
        best: Mapping[str, Any] | None = None,
        trackers: Sequence[TrackerConfigBase] = (),
        facts: RunFacts | None = None,
    ):
        writes = dist.is_main()
        self.metrics = JsonLines(folder / "metrics.jsonl", start_step) if writes else None
        """None on all ranks but one."""
        self._files = [JsonLines(folder / f"{name}.jsonl", start_step) for name in ("bad_samples", "events") if writes]
        bad, events = self._files or (None, None)
        self.bad, self._events = BadSamples(data, bad_before, bad), events

        self._feed: Feed | None = None
        """None without trackers, and on all ranks but one."""

        def open_feed() -> None:
            assert self.metrics is not None
            assert facts is not None
            self._feed = Feed({each.kind: each.build() for each in trackers}, facts, self.metrics.path, start_step)

        if trackers:
            dist.run_on_main(open_feed)
        self.latest: dict[str, float] = {}
        """Newest value of every metric that this process has recorded; the same on every rank."""

        known = self.metrics.recorded if self.metrics else {}
        self.lacks_evaluation: bool = dist.broadcast_json(not any(name.startswith(EVALUATION) for name in known))
        """Whether ``metrics.jsonl`` has no evaluation after ``start_step``; the same on every rank."""

        self.health = health
        self._evaluations: dict[int, dict[str, float]] = {}
        """Step → metrics of its evaluations, without their prefix."""
        if self.metrics and self.metrics.path.exists():
            lines = read_metrics(self.metrics.path, skip_damaged=True)  # every line, however many there are
            for step, row, evaluated in merge_lines(lines):
                if row:
                    health.add(step, row)
                if evaluated:
                    self._evaluations[step] = evaluated
                    health.add_evaluation(step, evaluated)
        self._keep_best, self._folder = keep_best, folder
        is_valid = best and best["figure"] == keep_best and (not writes or (folder / _checkpoint(best)).is_dir())
        self.best: dict[str, Any] | None = dict(best) if best and is_valid else None
        """``step``, ``figure`` and ``value`` of the best step, for rank 0; None without one."""
        if keep_best is not None:
            self._write_best()
            self._update_best(start_step, known)  # the evaluation after a save is in no checkpoint yet

    def _update_best(self, step: int, figures: Mapping[str, Any]) -> None:
        """Compare an evaluation after ``step`` steps; the first of equal ones stays best, NaN never is."""
        value = float(figures.get(self._keep_best or "", math.nan))
        if value > (-math.inf if self.best is None else self.best["value"]):
            self.best = {"step": step, "figure": self._keep_best, "value": value}
            self._write_best()

    def _write_best(self) -> None:
        if self.metrics and self.best is None:
            (self._folder / _BEST_FILE).unlink(missing_ok=True)
        elif self.metrics and self.best is not None:
            body = self.best | {"checkpoint": _checkpoint(self.best).as_posix()}
            write_text(self._folder / _BEST_FILE, json.dumps(body, indent=2) + "\n")

    def record(self, done: int, figures: Mapping[str, float]) -> None:
        """Record metrics after ``done`` steps; on every rank."""
        self.latest.update(figures)
        if self.metrics and figures:
            written = self.metrics.write(done, figures)
            if self._feed and written:
                self._feed.write(done, written)

    def record_report(self, done: int, figures: Mapping[str, float]) -> None:
        """Record the metrics of the training after ``done`` steps, and warn if the run goes wrong; on every rank."""
        self.record(done, figures)
        self._warn(done, self.health.add(done, figures) if self.metrics else ())

    def _warn(self, done: int, warnings: Iterable[str]) -> None:
        for warning in warnings:
            logger.warning("step %d: %s", done, warning)
            if self._feed:
                self._feed.text(done, "warning", warning)

    def record_evaluation(self, done: int, rates: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation after ``done`` steps, if there are any; on every rank."""
        figures = {f"{EVALUATION}{name}": value for name, value in rates.items()}
        self.record(done, figures)
        self._warn(done, self.health.add_evaluation(done, rates) if self.metrics else ())
        self._evaluations[done] = dict(rates)
        self._update_best(done, figures)

    def report_evaluation(self, done: int, result: Result) -> None:
        """Tell the log how an evaluation went: its main figures beside chance, and whether it is the best so far."""
        before = {step: row for step, row in self._evaluations.items() if step < done}
        place = place_evaluation(result, before, self._keep_best)
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

    def flush(self, done: int) -> None:
        """Wait until all lines are on the disk; a checkpoint needs the lines of its ``done`` steps."""
        for file in (self.metrics, *self._files):
            if file is not None:
                file.flush()
        if self._feed:
            self._feed.flush(done)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:  # all of them, whatever happens to one
            for file in (self.metrics, *self._files):
                if file is not None:
                    stack.callback(file.close)
            if self._feed:
                self._feed.close(finished=error is None)


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


def _checkpoint(best: Mapping[str, Any]) -> Path:
    return Path("checkpoints", checkpoint_name(best["step"]))


def place_evaluation(result: Result, before: Mapping[int, Mapping[str, float]], metric: str | None) -> str:
    """Return the place of an evaluation by the mean of its main figures: ``best so far`` or ``best after step 40``.

    Args:
        result: the evaluation.
        before: step → metrics of the evaluations before it, without their prefix; without any the place is empty.
        metric: metric that decides alone for its task, such as that of ``train.keep_best``.
    """
    mode, figures = main_figures(result)
    now = result.scalars()
    alone = (metric or "").removeprefix(EVALUATION)
    names = [alone] if alone in now else [f"{result.name}/{mode}/{figure}" for figure in figures]
    rates = {step: sum(row[name] for name in names) for step, row in before.items() if row.keys() >= set(names)}
    if not rates:
        return ""
    best = max(rates, key=lambda step: (rates[step], -step))
    return "best so far" if sum(now[name] for name in names) > rates[best] else f"best after step {best}"


def read_best(folder: Path) -> int:
    """Read the best step of the run in ``folder``.

    Raises:
        CheckpointError: the run has none.
    """
    try:
        step = json.loads((folder / _BEST_FILE).read_text(encoding="utf-8"))["step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step: got {step!r}, expected an integer")
        return step
    except FileNotFoundError:
        raise CheckpointError(f"{folder / _BEST_FILE}: no such file; runs with train.keep_best write it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _BEST_FILE}: cannot be read ({error})") from error


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
