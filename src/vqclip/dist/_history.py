"""The most recent collectives of this process, for the report of a job that hangs; and the time spent in collectives."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LENGTH = 32


@dataclass(slots=True)
class Collective:
    """A collective that this process has started."""

    number: int
    """Counts from 1. Equal on all ranks, which call the same collectives in the same order."""
    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its tensors; empty for DDP, whose tensors are not known."""
    started: float
    """Time in seconds of `time.monotonic`."""
    finished: float | None = None
    """Time at which the call returned (with NCCL, before the work is done); None: not yet, or it failed."""

    def end(self) -> None:
        """Record that the call returned."""
        self.finished = time.monotonic()


_recent: deque[Collective] = deque(maxlen=_LENGTH)
_numbers = itertools.count(1)


def begin(name: str, arguments: Sequence[Any] = ()) -> Collective:
    """Record that a collective starts, with the shapes of the tensors among its arguments."""
    shapes = tuple(tuple(each.shape) for each in arguments if isinstance(each, Tensor))
    entry = Collective(next(_numbers), name, shapes, time.monotonic())
    _recent.append(entry)
    return entry


def recent_collectives() -> list[Collective]:
    """Return the last 32 collectives of this process, oldest first, without those in compiled code."""
    return list(_recent)


class ExchangeTimer:
    """Stopwatch for collectives: it counts the time in which this process is in one, while it runs.

    For tensors on a GPU that is the time of the stream that waits for the collective, of others the time of the host.
    """

    def __init__(self) -> None:
        self._runs = False
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """Begin to count."""
        self._runs = True

    def stop(self) -> None:
        """Count no more until the next `start`."""
        self._runs = False

    def lap(self) -> float:
        """Return the seconds counted since the last lap, those of a GPU as far as it has done its work."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def begin(self, arguments: Sequence[Any]) -> Callable[[], None]:
        """Note that a collective of the tensors among its arguments begins; return a function that notes its end."""
        if not self._runs:
            return lambda: None
        if any(isinstance(each, Tensor) and each.is_cuda for each in arguments):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()

            def end() -> None:
                last.record()
                self._pending.append((first, last))

            return end
        since = time.perf_counter()

        def end_on_host() -> None:
            self._seconds += time.perf_counter() - since

        return end_on_host


exchange_timer = ExchangeTimer()
"""Timer of this process."""
