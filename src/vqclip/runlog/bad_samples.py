"""Bad samples of a run: a record of each in ``bad_samples.jsonl``, and their number by kind."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from vqclip import dist
from vqclip.data import TrainData
from vqclip.runlog.lines import JsonLines
from vqclip.towers import CaptionLengths

logger = logging.getLogger(__name__)

MOST_LINES = 10_000
"""Maximum number of lines of the file; a sample that cannot be read returns in every epoch."""


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
