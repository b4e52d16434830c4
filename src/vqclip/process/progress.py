"""Heartbeats of long work: they reset the hang timer, and they are the points at which a signal stops the work.

    for batch in batches:
        progress.heartbeat()
        ...

A listener may raise an error, so a heartbeat belongs where an error of one rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listeners: list[Callable[[], object]] = []


def heartbeat() -> None:
    """Call all listeners.

    Raises:
        StopRequested: a signal has asked for a stop.
    """
    for listener in _listeners:
        listener()


@contextlib.contextmanager
def report_to(listener: Callable[[], object]) -> Iterator[None]:
    """Make `heartbeat` call ``listener`` within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
