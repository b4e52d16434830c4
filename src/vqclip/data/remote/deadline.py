"""A time limit shared by several waits."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """Time limit of everything that one shard waits for.

    Args:
        total_s: seconds from now.
    """

    def __init__(self, total_s: float):
        self.total_s = total_s
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """Elapsed seconds."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Remaining seconds; at most 0 once the time is over."""
        return self.total_s - self.spent
