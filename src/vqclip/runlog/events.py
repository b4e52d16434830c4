"""What was noteworthy in a run, in ``events.jsonl``: with the samples, so that someone can look at them."""

from __future__ import annotations

import logging

from vqclip import dist
from vqclip.data import Batch
from vqclip.runlog.lines import JsonLines

logger = logging.getLogger(__name__)


class Events:
    """Writes events down.

    Args:
        lines: where to; None on all ranks but one.
    """

    def __init__(self, lines: JsonLines | None):
        self._lines = lines

    def record(self, kind: str, reason: str, applied: bool, batch: Batch) -> None:
        """Write down what happened in the step of a global batch, of which ``batch`` is this rank's. A collective.

        Args:
            kind: in a word.
            reason: what was seen.
            applied: whether the step changed the weights.
            batch: its samples, over all ranks in the order of the global batch, are what the event is about.
        """
        parts = dist.gather_json([batch.places.tolist(), batch.sample_ids.tolist()])
        placed = sorted(pair for places, ids in parts for pair in zip(places, ids, strict=True))
        if self._lines is None:
            return
        logger.warning("step %d: %s: %s%s", batch.step, kind, reason, "" if applied else "; the step was left out")
        event = {"event": kind, "reason": reason, "applied": applied, "sample_ids": [each for _, each in placed]}
        self._lines.write(batch.step + 1, event)
        self._lines.flush()
