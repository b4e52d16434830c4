"""What is looked at in every step before its gradient is applied, and what happens when a number has gone bad.

The numbers are those of the global batch, the same on every rank, so every rank comes to the same decision by itself.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import NonFiniteError
from vqclip.io.json_files import Strict
from vqclip.train.collapse import CollapseConfig

_SIGMA = 1.4826
"""A normal distribution's standard deviation, in median absolute deviations."""


class SpikeConfig(Config):
    """A loss that jumps."""

    window: int = Field(100, ge=10, le=10_000)
    """Steps before, whose losses say what is usual; nothing is judged before there are as many."""
    deviations: float = Field(10.0, gt=0)
    """A loss so many deviations above their median is a spike; the deviation is that of a normal distribution with
    their median absolute deviation, and at least a hundredth of the median."""
    skip: bool = False
    """Do not apply such a step; false: only note it."""


class GuardConfig(Config):
    """What to do when numbers go bad."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When loss or gradient is NaN or infinite: stop the run, or leave the step out and go on. Either way weights and
    codes are untouched, and the samples stand in `events.jsonl`."""
    max_skipped: int = Field(20, ge=1)
    """Steps of a run that may be left out; one more stops it."""
    spikes: SpikeConfig | None = SpikeConfig()
    """When a loss is far above the usual; null: do not look."""
    collapse: CollapseConfig | None = CollapseConfig()
    """When a codebook hardly uses its codes: a warning, with what to try; null: do not look."""

    def build(self) -> Guards:
        """Make the guards of a run from its beginning."""
        return Guards(self)


class Event(NamedTuple):
    """Something in a step that someone should know of."""

    kind: Literal["nonfinite", "spike"]
    reason: str
    """What was seen, and what would have been usual."""
    skip: bool
    """Whether the step must not be applied."""


class _State(Strict):
    skipped: Annotated[int, Field(ge=0, lt=2**53)]
    losses: list[float]
    collapse: dict[str, JsonValue] | None = None


class Guards:
    """Looks at the numbers of every step.

    Args:
        config: what to do.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.skipped = 0
        """Steps of the run that were left out."""
        self.collapse = config.collapse.build() if config.collapse else None
        """For whoever reports figures to look with."""
        self._losses: deque[float] = deque(maxlen=config.spikes.window if config.spikes else 0)

    def check(self, step: int, values: Mapping[str, float]) -> Event | None:
        """What is noteworthy about a step; ``values`` are numbers by name, ``total`` the loss.

        Raises:
            NonFiniteError: a number is not finite, or more steps were left out than may be.
        """
        bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value))
        event = Event("nonfinite", bad, skip=True) if bad else self._spike(values["total"])
        if event is None or not event.skip:
            return event
        if bad and self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: {bad}; the step was not applied. Lower optim.lr, lengthen optim.warmup_steps, or use "
                "train.precision: bf16 or fp32; guards.on_nonfinite: skip leaves such steps out"
            )
        self.skipped += 1
        if self.skipped > self.config.max_skipped:
            raise NonFiniteError(
                f"step {step}: {event.reason}; it was not applied, nor were {self.config.max_skipped} others, and more "
                "may not be left out (guards.max_skipped); events.jsonl names the samples. Lower optim.lr, or look at "
                "the data"
            )
        return event

    def _spike(self, loss: float) -> Event | None:
        spikes, usual = self.config.spikes, list(self._losses)
        self._losses.append(loss)
        if spikes is None or len(usual) < spikes.window:
            return None
        median = statistics.median(usual)
        spread = _SIGMA * statistics.median(abs(each - median) for each in usual)
        deviation = max(spread, abs(median) / 100)
        if loss <= median + spikes.deviations * deviation:
            return None
        reason = f"loss {loss:.4g}, where {median:.4g} ± {deviation:.2g} is usual (the last {spikes.window} steps)"
        return Event("spike", reason, spikes.skip)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-able."""
        collapse = self.collapse.state_dict() if self.collapse else None
        return {"skipped": self.skipped, "losses": list(self._losses), "collapse": collapse}

    def tensors(self) -> dict[str, Tensor]:
        """Return the part of the state that is tensors."""
        return self.collapse.tensors() if self.collapse else {}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Continue from what `state_dict` and `tensors` gave.

        Raises:
            ValueError: they could not have given this.
        """
        saved = _State.model_validate(state)
        self.skipped = saved.skipped
        self._losses.clear()
        self._losses.extend(saved.losses)
        # Absent where nobody looked, or in a checkpoint of an older version.
        if self.collapse and saved.collapse:
            self.collapse.load_state_dict(saved.collapse, tensors or {})
