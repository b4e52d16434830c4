"""Checks of every step, NaN and infinity, loss spikes; and the counts of codes over the last steps.

    skip = guards.judge(losses, gradient norm, ...)   () bool on the device: the step must change nothing
    update(skip)                                      weights, moments, codebooks, averages; `vqclip.train.step`
    ... the next step, up to its update ...
    guards.settle()                                   record the event of the step before, or end the run

No step waits for the device: a verdict is made there, and the host reads it a step later. It is made of numbers of the
global batch, which are equal on every rank to the last bit: all ranks skip the same steps, and read it at the same
place. What needs the state of a step (a checkpoint, a report, an evaluation, the end) settles first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vqclip import dist
from vqclip.config import Config
from vqclip.data import Batch
from vqclip.errors import NonFiniteError
from vqclip.io.json_files import Strict
from vqclip.quantizers import Stats
from vqclip.runlog.health import CollapseConfig, DivergenceConfig

_SIGMA = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
TOKENS_PER_CODE = 4
"""Tokens for each code of a codebook in a full window of `CodeWindows`."""


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
    """Warning when the loss rises, the gradient explodes or the run overfits; null: none."""


@dataclass(frozen=True)
class Event:
    """Report about an unusual step."""

    kind: Literal["nonfinite", "spike"]
    reason: str
    """Observed value, and the usual one."""
    skip: bool
    """Whether the step was skipped."""
    batch: Batch
    """Its number and samples."""


@dataclass(frozen=True)
class _Pending:
    """Verdict that the host has not read."""

    batch: Batch
    names: list[str]
    numbers: Tensor
    """Judged numbers, facts of `Guards.judge_numbers`, whether the gradient overflowed in fp16, and the scales before
    and after; on their way to the host."""
    arrived: torch.cuda.Event | None
    """When they are there; None on the CPU."""


class _State(Strict):
    skipped: Annotated[int, Field(ge=0, lt=2**53)]
    overflows: Annotated[int, Field(ge=0, lt=2**53)]
    losses: list[float]


class Guards:
    """Checks of the numbers of every step.

    Args:
        config: thresholds and reactions.

    Attributes:
        skipped: number of skipped steps of the run.
        overflows: steps of the run that were skipped because a gradient overflowed in fp16.
        events: events since the list was last cleared.
        batch: step and samples of the verdict that ended the run; None before.
        windows: code counts for the report; None without `GuardConfig.collapse`.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.skipped = self.overflows = 0
        self.events: list[Event] = []
        self.batch: Batch | None = None
        self.windows = CodeWindows() if config.collapse else None
        self._pending: _Pending | None = None
        window = config.spikes.window if config.spikes else 0
        self._losses = torch.full((window,), torch.inf, dtype=torch.float64)
        """Last losses, the newest one at the end; infinity before the first one. On the device, from its first step."""

    def judge(
        self, losses: Mapping[str, Tensor], grad_norm: Tensor, batch: Batch, scaler: torch.amp.GradScaler
    ) -> Tensor:
        """Return () bool on the device: whether the step must change nothing.

        Args:
            losses: () by name, ``total`` first.
            grad_norm: () of the gradient, no longer scaled.
            batch: of the step.
            scaler: of the loss; adapted here. In fp16 a gradient may overflow now and then, and its step is skipped.
        """
        assert self._pending is None
        is_scaled = scaler.is_enabled()
        values = losses if is_scaled else {**losses, "gradient norm": grad_norm}
        numbers = torch.stack([value.detach().double() for value in values.values()])
        skip, facts = self.judge_numbers(numbers)
        one, overflowed = torch.ones_like(numbers[0]), ~grad_norm.isfinite() & is_scaled
        before = scaler.scale(one)
        scaler.update()
        skip = skip | overflowed
        scaling = torch.stack([overflowed.double(), before, scaler.scale(one)])  # without a scaler 0, 1 and 1
        found, arrived = torch.cat([numbers, facts, scaling]), None
        if found.is_cuda:
            found, arrived = found.to("cpu", non_blocking=True), torch.cuda.Event()  # to page-locked memory
            arrived.record()
        nothing = torch.empty(0)
        samples = dataclasses.replace(batch, images=nothing, texts=nothing, features={}, captions=())
        self._pending = _Pending(samples, list(values), found, arrived)
        return skip

    def judge_numbers(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Judge the numbers of a step on their device; never waits for it.

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

    def settle(self) -> None:
        """Read the verdict on the newest step, unless it was read before.

        Raises:
            NonFiniteError: on every rank: a number is not finite and the run must stop, or too many steps were skipped.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.batch, step, spikes = pending.batch, pending.batch.step, self.config.spikes
        if pending.arrived is not None:
            pending.arrived.synchronize()
        numbers, count = pending.numbers.tolist(), len(pending.names)
        values = dict(zip(pending.names, numbers[:count], strict=True))
        median, deviation, is_spike, overflowed, before, after = numbers[count:]

        event = None
        if bad := ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)):
            event = Event("nonfinite", bad, True, pending.batch)
        elif spikes is not None and is_spike:
            usual = f"{median:.4g} ± {deviation:.2g} is usual (the last {spikes.window} steps)"
            event = Event("spike", f"loss {values['total']:.4g}, where {usual}", spikes.skip, pending.batch)
        if bad and self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: {bad}; the step was not applied. Lower optim.lr, lengthen optim.warmup_steps, or use "
                "train.precision: bf16 or fp32; guards.on_nonfinite: skip skips such steps"
            )
        if event is not None:
            self.events.append(event)
            self.skipped += event.skip
            if self.skipped > self.config.max_skipped:
                raise NonFiniteError(
                    f"step {step}: {event.reason}; it was skipped, as were {self.config.max_skipped} others, the "
                    "maximum (guards.max_skipped); events.jsonl lists the samples. Lower optim.lr, or inspect the data"
                )
        self.overflows += bool(overflowed)
        if after < 1:
            raise NonFiniteError(
                f"step {step}: the gradient is not finite even with the loss scaled by {before:g}, after "
                f"{self.overflows} skipped steps; use train.precision: bf16 or fp32"
            )
        self.batch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON part of the state; `tensors` is the other."""
        losses = [each for each in self._losses.tolist() if math.isfinite(each)]
        return {"skipped": self.skipped, "overflows": self.overflows, "losses": losses}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state. A collective."""
        return self.windows.tensors() if self.windows else {}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Restore the results of `state_dict` and `tensors`.

        Raises:
            ValueError: they are not valid.
        """
        saved = _State.model_validate(state)
        self.skipped, self.overflows = saved.skipped, saved.overflows
        window = len(self._losses)
        self._losses = torch.tensor([math.inf] * window + saved.losses, dtype=torch.float64)[len(saved.losses) :]
        if self.windows:
            self.windows.load(tensors or {})


def _median(values: Tensor) -> Tensor:
    ordered = values.sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


class CodeWindows:
    """Code counts of each codebook over a window of the newest tokens, from which its usage is reported.

        every step:    count(stats)    add the codes of the step; no collective, no waiting for the device
        every report:  sums(stats)     the window, summed over ranks

    A window contains the last T to 2 T tokens of a codebook of K codes, T = ``TOKENS_PER_CODE`` K, plus those of a
    step. It has two parts; the older one is dropped when the newer one is full. Each rank counts a share of the global
    batch: its own codes, or on rank 0 those that are reduced already. The sum over ranks is the same for any number of
    processes. A window needs two int64 numbers per code.
    """

    def __init__(self) -> None:
        self._windows: dict[str, Tensor] = {}
        """``image/0/codes`` → ``(2, 1 + C K)`` int64: tokens of the global batch and this rank's share of the
        code counts, of the older and of the newer part."""

    def count(self, stats: Mapping[str, Stats], skip: Tensor) -> None:
        """Add the codes of a step.

        Args:
            stats: by modality, over the global batch; `Stats.histograms` of this rank.
            skip: () bool on the device, True for a step that does not count.
        """
        windows = {}
        for modality, name, tokens in _code_counts(stats):
            codes, is_mine = stats[modality][name], name in stats[modality].histograms or dist.is_main()
            new = torch.cat((stats[modality][tokens].view(1), codes.flatten() * is_mine))
            window = self._windows.get(f"{modality}/{name}")
            if window is None or window.shape[1] != len(new):  # another codebook, where the run allows it on resume
                window = new.new_zeros(2, len(new))
            older, newer = window.to(new.device)
            full = newer[0] >= TOKENS_PER_CODE * codes.shape[-1]
            parts = torch.where(full, newer, older), torch.where(full, new, newer + new)
            windows[f"{modality}/{name}"] = torch.where(skip, torch.stack((older, newer)), torch.stack(parts))
        self._windows = windows

    def sums(self, stats: Mapping[str, Stats]) -> dict[str, Stats]:
        """Return the newest statistics, with the codes and tokens of the window in place of their own. A collective.

        Args:
            stats: those of the newest `count`.
        """
        windows = _sum_over_ranks({name: each.sum(dim=0, keepdim=True) for name, each in self._windows.items()})
        found = {modality: dict(each) for modality, each in stats.items()}
        for modality, name, tokens in _code_counts(stats):
            count, codes = windows[f"{modality}/{name}"].flatten().tensor_split([1])
            found[modality] |= {tokens: count.squeeze(), name: codes.view_as(stats[modality][name])}
        return {modality: Stats(each, is_global=True) for modality, each in found.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state: the windows over all ranks. A collective."""
        return _sum_over_ranks(self._windows)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`, the same on every rank.

        Raises:
            ValueError: it is not valid.
        """
        for name, window in tensors.items():
            fits = window.dtype == torch.int64 and window.dim() == 2 and len(window) == 2 and window.numel() > 2
            if not fits or window.min() < 0 or window.max() > 2**53:
                raise ValueError(
                    f"{name}: got {window.dtype} {tuple(window.shape)}; expected counts, int64 (2, 1 + C K)"
                )
        # Rank 0 has the counts of all ranks until now.
        self._windows = {
            name: torch.cat((window[:, :1], window[:, 1:] * dist.is_main()), dim=1) for name, window in tensors.items()
        }


def _sum_over_ranks(windows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return windows ``(n, 1 + C K)`` with the code counts of all ranks, in one exchange."""
    if not windows:
        return {}
    counts = [each[:, 1:] for each in windows.values()]
    flat = dist.reduce_(torch.cat([each.flatten() for each in counts]))
    parts = zip(windows.items(), flat.split([each.numel() for each in counts]), strict=True)
    return {name: torch.cat((each[:, :1], part.view(len(each), -1)), dim=1) for (name, each), part in parts}


def _code_counts(stats: Mapping[str, Stats]) -> Iterator[tuple[str, str, str]]:
    """Yield modality, and the names of code counts over the global batch and of the number of their tokens."""
    for modality, each in stats.items():
        for name in each:
            place, slash, last = name.rpartition("/")
            if last == "codes":
                yield modality, name, f"{place}{slash}tokens"
