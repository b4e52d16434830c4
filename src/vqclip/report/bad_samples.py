"""What a run could not read: every bad sample in ``bad_samples.jsonl``, and their number by kind."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from vqclip import dist
from vqclip.data import TrainData
from vqclip.report.lines import Lines


class BadSamples:
    """The bad samples of the whole run, over all ranks.

    Args:
        data: what this rank reads.
        counts: kind → number in the steps before, as in `counts`.
        lines: where to write them down; None on all ranks but one.
    """

    def __init__(self, data: TrainData, counts: Mapping[str, int], lines: Lines | None):
        self.counts = Counter(counts)
        """Kind → how often such a sample was replaced, as of the last `collect`."""
        self.last: deque[str] = deque(maxlen=5)
        """What was wrong with the last of them; the same on every rank after a `collect`."""
        self._data, self._lines = data, lines

    def collect(self) -> int:
        """Write down and count what was replaced since the last time; returns the run's total. A collective."""
        self._take([bad for part in dist.gather_json(self._mine()) for bad in part])
        return self.counts.total()

    def write_own(self) -> None:
        """Write down what this rank has replaced, without waiting for the others: for a run that ends."""
        self._take(self._mine())

    def _mine(self) -> list[dict[str, Any]]:
        return [{"step": step + 1, **bad._asdict()} for step, bad in self._data.newly_replaced()]

    def _take(self, found: list[dict[str, Any]]) -> None:
        self.counts.update(bad["kind"] for bad in found)
        # A sample may be bad in its own place and in another's: the order must not depend on the ranks.
        for bad in sorted(found, key=lambda each: (each["step"], each["sample_id"], each["substitute_id"])):
            self.last.append(bad["reason"])
            if self._lines is not None:
                self._lines.write(bad.pop("step"), bad)

    def figures(self) -> dict[str, float]:
        """For the log: the total, and the number of each kind that there was."""
        kinds = {f"data/replaced/{kind.replace(' ', '_')}": float(n) for kind, n in sorted(self.counts.items())}
        return {"data/replaced": float(self.counts.total()), **kinds}
