"""Callbacks: everything that happens between two training steps. See `Callback` for how to write one."""

from __future__ import annotations

from collections.abc import Sequence

from vqclip.train.callbacks.base import Callback, Training
from vqclip.train.callbacks.builtin import (
    CountBadSamples,
    Evaluate,
    Heartbeat,
    LimitBadSamples,
    RecordEvents,
    ReportMetrics,
    SaveCheckpoints,
    evaluate,
    require_success,
)

__all__ = ["Callback", "Training", "evaluate", "in_order", "require_success"]


def in_order(callbacks: Sequence[Callback] = ()) -> list[Callback]:
    """Return the built-in callbacks and the user's, in the order in which each hook is called."""
    return [
        RecordEvents(),  # first: an unusual step is on record whatever happens next
        CountBadSamples(),  # before the report and the checkpoint, which contain the counts
        ReportMetrics(),
        SaveCheckpoints(),  # before the evaluation: one that fails costs no step
        Evaluate(),
        LimitBadSamples(),  # after the checkpoint: a run can resume with a higher limit
        *callbacks,
        Heartbeat(),  # last: all of the above is part of the step
    ]
