"""Heartbeats of long work: they reset the hang timer, and they are the points at which a signal stops the work.

    for batch in batches:
        progress.heartbeat()
        ...

A listener may raise an error, so a heartbeat belongs where an error of one rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_run = threading.local()
"""``listeners`` of the run in this thread; runs in other threads have their own."""


def heartbeat() -> None:
    """Call all listeners.

    Raises:
        StopRequested: a signal has asked for a stop.
    """
    for listener in getattr(_run, "listeners", ()):
        listener()


@contextlib.contextmanager
def report_to(listener: Callable[[], object]) -> Iterator[None]:
    """Make `heartbeat` call ``listener`` within the block."""
    former = getattr(_run, "listeners", ())
    _run.listeners = (*former, listener)
    try:
        yield
    finally:
        _run.listeners = former
