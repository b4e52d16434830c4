"""The last collectives of this process, for the report of a job that hangs."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_KEPT = 32


@dataclass(slots=True)
class Collective:
    """One that was entered."""

    number: int
    """Counts from 1; the same on every rank, as all call the same ones in the same order (in subgroups, they do not)."""
    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Of its tensors; of those that travel through DDP, none is known."""
    started: float
    """By `time.monotonic`."""
    finished: float | None = None
    """When it returned, which NCCL's do before they are done; None: not yet, or it failed."""

    def end(self) -> None:
        """It has returned."""
        self.finished = time.monotonic()


_recent: deque[Collective] = deque(maxlen=_KEPT)
_numbers = itertools.count(1)


def begin(name: str, arguments: Sequence[Any] = ()) -> Collective:
    """Take down that one is entered, with the shapes of the tensors among its arguments."""
    shapes = tuple(tuple(each.shape) for each in arguments if isinstance(each, Tensor))
    entry = Collective(next(_numbers), name, shapes, time.monotonic())
    _recent.append(entry)
    return entry


def recent_collectives() -> list[Collective]:
    """The last 32 collectives of this process, oldest first; compiled ones are not among them."""
    return list(_recent)
