"""Checks of every step: NaN and infinity, loss spikes; and the watch for collapsed codebooks.

    skip, facts = guards.judge(numbers)      on the device, before the update
    event = guards.report(step, numbers)     on the host, a step later

The numbers are of the global batch and equal on every rank, so all ranks decide the same without communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import NonFiniteError
from vqclip.io.json_files import Strict
from vqclip.runlog.divergence import DivergenceConfig
from vqclip.train.collapse import HEALTHY, CollapseConfig

_SIGMA = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""


class SpikeConfig(Config):
    """Detection of loss spikes."""

    window: int = Field(100, ge=10, le=10_000)
    """Number of previous losses to compare with; no loss is checked before there are that many."""
    deviations: float = Field(10.0, gt=0)
    """A loss more than `deviations` above the median of the window is a spike. One deviation is the standard deviation
    of a normal distribution with the window's median absolute deviation, and at least a hundredth of the median."""
    skip: bool = False
    """Skip the step; false: only record it."""


class GuardConfig(Config):
    """Checks of every step, and reactions to them."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If loss or gradient is NaN or infinite: stop the run, or skip the step. In both cases weights and codebooks stay
    unchanged, and `events.jsonl` lists the samples."""
    max_skipped: int = Field(20, ge=1)
    """Maximum number of skipped steps of a run; one more stops it."""
    spikes: SpikeConfig | None = SpikeConfig()
    """Detection of losses far above the usual ones; null: none."""
    collapse: CollapseConfig | None = CollapseConfig()
    """Warning when a codebook uses few of its codes; null: none."""
    divergence: DivergenceConfig | None = DivergenceConfig()
    """Warning when the loss rises or the gradient explodes; null: none."""

    def build(self) -> Guards:
        """Make the guards of a new run."""
        return Guards(self)


def _median(values: Tensor) -> Tensor:
    ordered = values.sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


class Event(NamedTuple):
    """Report about an unusual step."""

    kind: Literal["nonfinite", "spike"]
    reason: str
    """Observed value, and the usual one."""
    skip: bool
    """Whether to skip the step."""


class _State(Strict):
    skipped: Annotated[int, Field(ge=0, lt=2**53)]
    losses: list[float]
    collapse: dict[str, JsonValue] | None
    divergence: dict[str, JsonValue] | None = None  # absent from checkpoints of former versions


class Guards:
    """Checks of the numbers of every step.

    Args:
        config: thresholds and reactions.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.skipped = 0
        """Number of skipped steps of the run."""
        self.collapse = config.collapse.build() if config.collapse else None
        """Watch for collapsed codebooks; the report calls it."""
        self.divergence = config.divergence.build() if config.divergence else None
        """Watch for a loss that rises; the report calls it, too."""
        window = config.spikes.window if config.spikes else 0
        self._losses = torch.full((window,), torch.inf, dtype=torch.float64)
        """Last losses, the newest one at the end; infinity before the first one. On the device, from its first step."""

    def judge(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Judge a step on its device; never waits for it.

        Args:
            numbers: ``(N,)`` float64, the loss first.

        Returns:
            () bool, whether the step must change nothing; ``(3,)`` float64, the usual loss, the deviation from it that
            is usual, and 1 for a spike.
        """
        bad, spikes = ~numbers.isfinite().all(), self.config.spikes
        if spikes is None:
            return bad, numbers.new_zeros(3)
        loss, losses = numbers[0], self._losses.to(numbers.device)
        median = _median(losses)
        deviation = torch.maximum(_SIGMA * _median((losses - median).abs()), median.abs() / 100)
        is_full = losses[0].isfinite()
        is_spike = is_full & ~bad & (loss > median + spikes.deviations * deviation)
        self._losses = torch.where(bad, losses, torch.cat((losses[1:], loss[None])))
        facts = torch.stack([median, deviation, is_spike.double()])
        return (bad | is_spike if spikes.skip else bad), facts

    def report(self, step: int, values: Mapping[str, float], facts: Sequence[float]) -> Event | None:
        """Return a report on a step if it is unusual, and count skipped ones.

        Args:
            step: number of the step, from 0.
            values: numbers of `judge` by name; ``total`` is the loss.
            facts: the second result of `judge`.

        Raises:
            NonFiniteError: a number is not finite and the run must stop, or too many steps were skipped.
        """
        bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value))
        event = Event("nonfinite", bad, skip=True) if bad else self._spike(values["total"], *facts)
        if event is None or not event.skip:
            return event
        if bad and self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: {bad}; the step was not applied. Lower optim.lr, lengthen optim.warmup_steps, or use "
                "train.precision: bf16 or fp32; guards.on_nonfinite: skip skips such steps"
            )
        self.skipped += 1
        if self.skipped > self.config.max_skipped:
            raise NonFiniteError(
                f"step {step}: {event.reason}; it was skipped, as were {self.config.max_skipped} others, the maximum "
                "(guards.max_skipped); events.jsonl lists the samples. Lower optim.lr, or inspect the data"
            )
        return event

    def _spike(self, loss: float, median: float, deviation: float, is_spike: float) -> Event | None:
        spikes = self.config.spikes
        if spikes is None or not is_spike:
            return None
        reason = f"loss {loss:.4g}, where {median:.4g} ± {deviation:.2g} is usual (the last {spikes.window} steps)"
        return Event("spike", reason, spikes.skip)

    def health(self) -> dict[str, Any]:
        """Return the verdict on the run as JSON values, as `CollapseWatch.health` does; empty without a watch."""
        if self.collapse is None and self.divergence is None:
            return {}
        found: dict[str, Any] = (
            self.collapse.health() if self.collapse else {"verdict": HEALTHY, "codebooks": [], "warnings": []}
        )
        rise = self.divergence.health() if self.divergence else {"verdict": "", "warnings": []}
        verdicts: list[str] = [] if found["verdict"] == HEALTHY else [found["verdict"]]
        if rise["verdict"]:
            verdicts.append(f"DIVERGED: {rise['verdict']}")
        warnings = sorted([*found["warnings"], *rise["warnings"]], key=lambda each: each["step"])
        return found | {"verdict": "; ".join(verdicts) or HEALTHY, "warnings": warnings}

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON part of the state; `tensors` is the other."""
        collapse = self.collapse.state_dict() if self.collapse else None
        divergence = self.divergence.state_dict() if self.divergence else None
        losses = [each for each in self._losses.tolist() if math.isfinite(each)]
        return {"skipped": self.skipped, "losses": losses, "collapse": collapse, "divergence": divergence}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state. A collective."""
        return self.collapse.tensors() if self.collapse else {}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Restore the results of `state_dict` and `tensors`.

        Raises:
            ValueError: they are not valid.
        """
        saved = _State.model_validate(state)
        self.skipped = saved.skipped
        window = len(self._losses)
        self._losses = torch.tensor([math.inf] * window + saved.losses, dtype=torch.float64)[len(saved.losses) :]
        if self.collapse and saved.collapse:  # None if guards.collapse was null
            self.collapse.load_state_dict(saved.collapse, tensors or {})
        if self.divergence and saved.divergence:
            self.divergence.load_state_dict(saved.divergence)
