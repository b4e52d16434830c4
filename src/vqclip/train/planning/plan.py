"""The plan of a training step, and the settings that make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from vqclip import dist
from vqclip.config import load_config
from vqclip.data.batch import share_sizes
from vqclip.errors import ConfigError
from vqclip.train.config import TaskConfig
from vqclip.train.main import require_samples
from vqclip.train.planning.step import trace_step
from vqclip.train.tasks.contrastive_config import TrainConfig

__all__ = ["Change", "Machines", "StepPlan", "advise", "plan_step"]


@dataclass(frozen=True)
class Machines:
    """Processes of a run, each with a GPU."""

    processes: int
    """W."""
    of_machine: int = 8
    """Processes of a machine."""
    memory: int | None = None
    """Bytes of a GPU; None: of a CPU, whose memory is not known."""


@dataclass(frozen=True)
class StepPlan:
    """Memory and exchanges of a process in a step: rank 0, which has as many samples as any other."""

    samples: int
    """Samples of the process."""
    parts: dict[str, int]
    """Name of a part (`vqclip.train.planning.PARTS`) → bytes at the time in which most memory is in use."""
    exchanges: dict[str, dist.Exchanged]
    """Name → calls and bytes of a step."""

    @cached_property
    def peak(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def plan_step(config: TaskConfig, machines: Machines) -> StepPlan:
    """Plan a step of a run without its data and without memory for its model.

    Raises:
        ConfigError: the batch is too small, or a run that cannot be planned: `task: pixels`, `model.image.pixels`,
            `distillation`, or a module that reads values of tensors.
    """
    checked = _require_plannable(config)
    require_samples(config.train, machines.processes)
    trace = trace_step(checked, machines.processes, machines.of_machine, machines.memory)
    samples = share_sizes(config.train.batch_size, machines.processes)[0]
    return StepPlan(samples, trace.peak(), trace.exchanges)


def _require_plannable(config: TaskConfig) -> TrainConfig:
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"task: got {config.task}, whose step cannot be planned; expected contrastive")
    for key, used in (("distillation", config.distillation), ("model.image.pixels", config.model.image.pixels)):
        if used:
            raise ConfigError(f"{key}: got one, and a step with it cannot be planned; plan the run without")
    return config


@dataclass(frozen=True)
class Change:
    """A setting to change, and the plan of a step with it and all changes before it."""

    overrides: tuple[str, ...]
    """``key=value`` each."""
    plan: StepPlan


def advise(config: TaskConfig, machines: Machines, plan: StepPlan, limit: int) -> Iterator[Change]:
    """Yield changes that together reduce the memory of a step, each planned, until it fits or none is left.

    They come in the order of what they cost: rounding (precision), exchanges (shards), time (activations, microbatches,
    ring), another result (no averages). Those that save less than a twentieth are left out.

    Args:
        config: of the run.
        machines: of the run.
        plan: of the run as it is.
        limit: bytes that a step may take.
    """
    for choice in _choices(config, machines, plan):
        for overrides in choice:
            if plan.peak <= limit:
                return
            try:
                changed = load_config(type(config), config, overrides)
                found = plan_step(changed, machines)
            except ConfigError:  # such as a tower that cannot recompute its activations
                break
            if found.peak > _WORTH * plan.peak:
                break
            config, plan = changed, found
            yield Change(overrides, plan)


_WORTH = 0.95
"""Largest share of the memory that a change may leave."""


def _choices(config: TaskConfig, machines: Machines, plan: StepPlan) -> Iterator[list[tuple[str, ...]]]:
    """Yield changes of one kind, weaker ones first."""
    train = config.train
    if train.precision in ("fp32", "fp64"):
        yield [("train.precision=bf16",)]
    if train.parallel != "fsdp" and machines.processes > 1:
        fits = ["train.compile=regional"] if train.compile is True else []
        fits += [] if train.bucket_mb is None else ["train.bucket_mb=null"]
        yield [("train.parallel=fsdp", *fits)]
    if train.activation_checkpointing is not True:  # a number or `operators` recomputes less
        yield [("train.activation_checkpointing=true",)]
    numbers = list[tuple[str, ...]]()
    least, number = train.batch_size // machines.processes, 2 * train.micro_batches
    while number <= least:
        numbers.append((f"train.micro_batches={number}",))
        number *= 2
    yield numbers
    if isinstance(config, TrainConfig) and config.loss.impl != "ring":
        yield [("loss.impl=ring",)]
    if train.ema is not None:
        yield [("train.ema=null",)]
