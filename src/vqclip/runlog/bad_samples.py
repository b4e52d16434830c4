"""Bad samples of a run: the first in ``bad_samples.jsonl``, and the number of all of them by kind."""

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
"""Length of the file; a sample that cannot be read comes back in every epoch."""


class BadSamples:
    """The bad samples of the whole run, and the lengths of its captions, over all ranks.

    Args:
        data: what this rank reads.
        before: counts of the steps before, as in `saved`.
        lines: where to write them down; None on all ranks but one.
    """

    def __init__(self, data: TrainData, before: Mapping[str, Mapping[str, int]], lines: JsonLines | None):
        self.counts = Counter(before.get("replaced", {}))
        """Kind → how often such a sample was replaced, as of the last `collect`."""
        self.lengths = CaptionLengths({int(length): n for length, n in before.get("caption_lengths", {}).items()})
        """The captions shown, as of the last `collect`."""
        self.last: deque[str] = deque(maxlen=5)
        """What was wrong with the last of them; the same on every rank after a `collect`."""
        self._data, self._lines = data, lines

    def collect(self) -> int:
        """Write down and count what was replaced since the last time; returns the run's total. A collective."""
        parts = dist.gather_json([self._mine(), list(self._data.take_lengths().items())])
        self._take([bad for found, _ in parts for bad in found])
        for _, lengths in parts:
            self.lengths.update(dict(lengths))
        return self.counts.total()

    def saved(self) -> dict[str, dict[str, int]]:
        """Return the counts for a checkpoint: bad samples by kind, captions by length."""
        lengths = {str(length): n for length, n in sorted(self.lengths.items())}
        return {"replaced": dict(self.counts), "caption_lengths": lengths}

    def write_own(self) -> None:
        """Write down what this rank has replaced, without waiting for the others: for a run that ends."""
        self._take(self._mine())

    def _mine(self) -> list[dict[str, Any]]:
        return [{"step": step + 1, **bad._asdict()} for step, bad in self._data.take_replaced()]

    def _take(self, found: list[dict[str, Any]]) -> None:
        # A sample may be bad in its own place and in another's: the order must not depend on the ranks.
        for bad in sorted(found, key=lambda each: (each["step"], each["sample_id"], each["substitute_id"])):
            self.last.append(bad["reason"])
            number = self.counts.total()
            self.counts[bad["kind"]] += 1
            if self._lines is not None and number < MOST_LINES:
                self._lines.write(bad.pop("step"), bad)
            elif self._lines is not None and number == MOST_LINES:
                logger.warning("%s: full with %d lines; more bad samples are only counted", self._lines.path, number)

    def figures(self) -> dict[str, float]:
        """For the log: the total, and the number of each kind that there was."""
        kinds = {f"data/replaced/{kind.replace(' ', '_')}": float(n) for kind, n in sorted(self.counts.items())}
        return {"data/replaced": float(self.counts.total()), **kinds}
