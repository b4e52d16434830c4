"""Points in long work at which it shows that it goes on, and at which it can be left.

    for batch in batches:
        progress.heartbeat()
        ...

A point stands where an error on one rank is raised on all of them, as a listener may raise one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listeners: list[Callable[[], object]] = []


def heartbeat() -> None:
    """Tell whoever listens that the work has come this far.

    Raises:
        StopRequested: a listener has been asked to stop.
    """
    for listener in _listeners:
        listener()


@contextlib.contextmanager
def report_to(listener: Callable[[], object]) -> Iterator[None]:
    """Within the block, `heartbeat` calls ``listener``."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
