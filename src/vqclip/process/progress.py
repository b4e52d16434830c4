"""Heartbeats of long work: they reset the hang timer, and they are the points at which a signal stops the work.

    for batch in batches:
        progress.heartbeat()
        ...

A listener may raise an error, so a heartbeat belongs where an error of one rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from vqclip import dist

_run = threading.local()
"""``listeners`` of the run in this thread; runs in other threads have their own."""


def heartbeat() -> None:
    """Call all listeners.

    Raises:
        StopRequested: a signal has asked for a stop.
    """
    for listener in getattr(_run, "listeners", ()):
        listener()


def in_rounds(work: Iterator[int], seconds: float) -> Iterator[int]:
    """Run the work of all ranks, which meet every few seconds; yield the sum of what it yields. A collective.

    An error of one rank, or its request to stop, is raised on all ranks.
    """
    finished = False
    try:
        while not finished:
            end, done, is_last = time.monotonic() + seconds, 0, True
            with dist.raise_on_all_ranks():
                heartbeat()
                for count in work:
                    heartbeat()
                    done += count
                    if time.monotonic() >= end:
                        is_last = False
                        break
            rounds = dist.gather_json([done, is_last])
            yield sum(count for count, _ in rounds)
            finished = all(each for _, each in rounds)
    finally:
        getattr(work, "close", lambda: None)()


@contextlib.contextmanager
def report_to(listener: Callable[[], object]) -> Iterator[None]:
    """Make `heartbeat` call ``listener`` within the block."""
    former = getattr(_run, "listeners", ())
    _run.listeners = (*former, listener)
    try:
        yield
    finally:
        _run.listeners = former
