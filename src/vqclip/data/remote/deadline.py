"""One limit of time for several waits."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """The moment at which all that a shard has to wait for must be over.

    Args:
        total_s: seconds from now.
    """

    def __init__(self, total_s: float):
        self.total_s = total_s
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds gone."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds to go; not above 0 once it is over."""
        return self.total_s - self.spent
