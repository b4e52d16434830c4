"""Speed of a training loop: images per second, and the fraction of the time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass
class Clock:
    """Stopwatch for a loop: time between two reports, and the part of it spent waiting for the next item.

    The first item is not counted: it includes the start of workers and the warm-up.
    """

    samples: int = 0
    measured_s: float = 0.0
    waited_s: float = 0.0
    total_samples: int = 0
    total_s: float = 0.0
    total_waited_s: float = 0.0
    _since: float | None = field(default=None, repr=False)

    def time_waits(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``, and add up the time that the loop waits for them."""
        iterator = iter(items)
        while True:
            asked = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            if self._since is not None:
                self.waited_s += time.perf_counter() - asked
            yield item

    def count(self, samples: int) -> None:
        """Add the samples of one finished step."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self.samples += samples

    @property
    def runs(self) -> bool:
        """True if the time of the next step counts."""
        return self._since is not None

    def lap(self, exchanged_s: float) -> dict[str, float]:
        """Return figures since the last lap; empty without a step.

        Args:
            exchanged_s: seconds that the steps spent in collectives.

        Returns:
            ``images_per_second``, and the parts (0..1) of the time that are ``data_wait`` and ``exchange_wait``.
        """
        self._measure()
        if self.samples == 0:
            return {}
        elapsed = max(self.measured_s, 1e-9)
        figures = {"images_per_second": self.samples / elapsed, "data_wait": self.waited_s / elapsed}
        figures["exchange_wait"] = exchanged_s / elapsed
        self.total_samples += self.samples
        self.total_s += elapsed
        self.total_waited_s += self.waited_s
        self.samples, self.measured_s, self.waited_s = 0, 0.0, 0.0
        return figures

    def pause(self) -> None:
        """Stop the time until the end of the next step; call it before saving and evaluation."""
        self._measure()
        self._since = None

    def _measure(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self.measured_s += now - self._since
            self._since = now

    @property
    def overall(self) -> dict[str, float]:
        """Results of `lap` over all laps so far."""
        if self.total_s == 0:
            return {}
        return {
            "images_per_second": self.total_samples / self.total_s,
            "data_wait": self.total_waited_s / self.total_s,
        }
