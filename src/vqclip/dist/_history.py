"""The most recent collectives of this process, for the report of a job that hangs."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
