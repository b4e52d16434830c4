"""Unusual steps of a run with their samples, in ``events.jsonl``."""

from __future__ import annotations

import logging

from vqclip import dist
from vqclip.data import Batch
from vqclip.runlog.lines import JsonLines

logger = logging.getLogger(__name__)


class Events:
    """Writer of events.

    Args:
        lines: the file; None on all ranks but one.
    """

    def __init__(self, lines: JsonLines | None):
        self._lines = lines

    def record(self, kind: str, reason: str, applied: bool, batch: Batch) -> None:
        """Record an event of one step, with the samples of its global batch. A collective.

        Args:
            kind: one word.
            reason: the observation, in words.
            applied: whether the step changed the weights.
            batch: this rank's part of the global batch.
        """
        parts = dist.gather_json([batch.places.tolist(), batch.sample_ids.tolist()])
        placed = sorted(pair for places, ids in parts for pair in zip(places, ids, strict=True))
        if self._lines is None:
            return
        logger.warning("step %d: %s: %s%s", batch.step, kind, reason, "" if applied else "; the step was skipped")
        event = {"event": kind, "reason": reason, "applied": applied, "sample_ids": [each for _, each in placed]}
        self._lines.write(batch.step + 1, event)
        self._lines.flush()
