"""Verdicts on steps: made on the device, read by the host a step later, so that no step waits for the device.

    skip = verdicts.judge(losses, gradient norm)   () bool on the device: the step must change nothing
    update(skip)                                   weights, moments, codebooks, averages; see `vqclip.train.skipping`
    ... the next step, up to its update ...
    verdicts.settle()                              record the event of the step before, or end the run

A verdict is made of numbers of the global batch, which are equal on every rank to the last bit: all ranks skip the same
steps, and read it at the same place. What needs the state of a step (a checkpoint, a report, an evaluation, the end)
settles first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.data import Batch
from vqclip.errors import NonFiniteError
from vqclip.train.guards import Event, Guards

__all__ = ["Verdicts"]


@dataclass(frozen=True)
class _Pending:
    """Verdict that the host has not read."""

    batch: Batch
    """Its step and samples."""
    names: list[str]
    numbers: HostCopy
    """Judged numbers, those of `Guards.judge`, and of fp16 whether the gradient overflowed, and the scales."""


class HostCopy:
    """Copy of a tensor on its way from the device to the host.

    Args:
        tensor: of one dimension.
    """

    def __init__(self, tensor: Tensor):
        self._event = None
        if tensor.is_cuda:
            tensor = tensor.to("cpu", non_blocking=True)  # page-locked
            self._event = torch.cuda.Event()
            self._event.record()
        self._tensor = tensor

    def read(self) -> list[float]:
        """Return the numbers; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._tensor.tolist()
        return found


class Verdicts:
    """Verdicts on the steps of a run.

    Args:
        guards: checks of the numbers of every step.
        scaler: of the loss; in fp16 a gradient may overflow now and then, and its step is skipped.

    Attributes:
        overflows: steps of the run that were skipped because a gradient overflowed in fp16.
        events: reports of the guards since the list was last cleared, with the samples of their steps.
        batch: step and samples of the verdict that ended the run; None before.
    """

    def __init__(self, guards: Guards, scaler: torch.amp.GradScaler):
        self.guards, self.scaler = guards, scaler
        self.overflows = 0
        self.events: list[tuple[Event, Batch]] = []
        self.batch: Batch | None = None
        self._pending: _Pending | None = None

    def judge(self, losses: Mapping[str, Tensor], grad_norm: Tensor, batch: Batch) -> Tensor:
        """Return () bool on the device: whether the step must change nothing. Adapts the scale of the loss in fp16.

        Args:
            losses: () by name, ``total`` first.
            grad_norm: () of the gradient, no longer scaled.
            batch: of the step.
        """
        assert self._pending is None
        is_scaled = self.scaler.is_enabled()
        values = losses if is_scaled else {**losses, "gradient norm": grad_norm}
        numbers = torch.stack([value.detach().double() for value in values.values()])
        skip, facts = self.guards.judge(numbers)
        parts = [numbers, facts]
        if is_scaled:
            one, overflowed = torch.ones_like(numbers[0]), ~grad_norm.isfinite()
            before = self.scaler.scale(one)
            self.scaler.update()
            skip = skip | overflowed
            parts.append(torch.stack([overflowed.double(), before, self.scaler.scale(one)]))
        nothing = torch.empty(0)
        samples = dataclasses.replace(batch, images=nothing, texts=nothing, features={}, captions=())
        self._pending = _Pending(samples, list(values), HostCopy(torch.cat(parts)))
        return skip

    def settle(self) -> bool:
        """Read the verdict on the newest step, unless it was read before; return whether the step was skipped.

        Raises:
            NonFiniteError: the run must end; on every rank.
        """
        if self._pending is None:
            return False
        pending, self._pending = self._pending, None
        self.batch, step = pending.batch, pending.batch.step
        numbers, count = pending.numbers.read(), len(pending.names)
        values, facts, scaling = numbers[:count], numbers[count : count + 3], numbers[count + 3 :]
        event = self.guards.report(step, dict(zip(pending.names, values, strict=True)), facts)
        if event is not None:
            self.events.append((event, pending.batch))
        overflowed = bool(scaling) and self._count_overflow(step, *scaling)
        self.batch = None
        return overflowed or (event is not None and event.skip)

    def _count_overflow(self, step: int, overflowed: float, before: float, after: float) -> bool:
        self.overflows += int(overflowed)
        if after < 1:
            raise NonFiniteError(
                f"step {step}: the gradient is not finite even with the loss scaled by {before:g}, after "
                f"{self.overflows} skipped steps; use train.precision: bf16 or fp32"
            )
        return bool(overflowed)
