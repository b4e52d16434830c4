"""A training step on tensors without memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from vqclip import dist
from vqclip.data import Batch
from vqclip.data.batch import share_sizes
from vqclip.data.features import TORCH_DTYPES
from vqclip.errors import ConfigError
from vqclip.model import ModelConfig
from vqclip.nn.device import planned_gpu
from vqclip.train.main import build_step, build_task
from vqclip.train.planning.trace import Trace
from vqclip.train.process_state import preserve_torch_state
from vqclip.train.rank_batch import RankBatch
from vqclip.train.step import TrainStep
from vqclip.train.tasks.base import Task
from vqclip.train.tasks.contrastive import ContrastiveTask
from vqclip.train.tasks.contrastive_config import TrainConfig
from vqclip.train.tasks.output import TaskOutput

__all__ = ["PlannedStep", "trace_step"]

CPU = torch.device("cpu")


def trace_step(config: TrainConfig, ranks: int, machine: int, memory: int | None = None) -> Trace:
    """Run one step of rank 0, which has as many samples as any rank, and return what it stored and exchanged.

    It is the last step of the run, after another one: all towers train, and codebooks are initialised.

    Args:
        config: of the run.
        ranks: number of processes.
        machine: processes of a machine.
        memory: of their GPUs in bytes; None for CPUs.

    Raises:
        ConfigError: hsdp with these machines, or a module that cannot be planned.
    """
    config, sizes = _without_values(config), share_sizes(config.train.batch_size, ranks)
    with dist.planned_ranks(ranks, machine), preserve_torch_state(CPU), planned_gpu(memory), _name_errors():
        with torch.device("meta"):
            outline = build_task(config, torch.device("meta"))
        with FakeTensorMode(allow_non_fake_inputs=True), Trace() as trace:
            step = build_step(config, _with_memory(outline), PlannedStep)
            assert isinstance(step, PlannedStep)
            step.start(trace)
            last = config.train.steps - 1
            step.make_state(config, last)
            trace.begin()
            with trace.part("batch"):
                batch = _batch(config, step, sizes, last)
            step(batch, last)
            trace.claim_state(step)
            return trace


_UNPLANNED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextmanager
def _name_errors() -> Iterator[None]:
    """Raise the errors of modules that need values as ConfigError."""
    try:
        yield
    except _UNPLANNED as error:
        raise ConfigError(
            f"model: a module of it cannot be planned, as it reads the values of a tensor or calls an operator that "
            f"cannot run without them: {error}"
        ) from error


def _without_values(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the same step without pretrained weights, k-means and files."""
    tree = _without_kmeans(config.model.model_dump())
    for modality in ("image", "text"):
        tree[modality]["tower"] |= getattr(config.model, modality).tower.random_weights
    if tree["towers"] is not None:
        tree["towers"] |= {"pretrained": None}
    ema = None if config.train.ema is None else config.train.ema.model_copy(update={"every": 1})
    train = config.train.model_copy(update={"compile": False, "ema": ema})
    return config.model_copy(update={"model": ModelConfig.model_validate(tree), "train": train})


def _without_kmeans(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {key: False if key == "kmeans" else _without_kmeans(value) for key, value in tree.items()}


def _with_memory(outline: Task[Any]) -> Task[Any]:
    """Return a copy of a task on `meta` with tensors on the CPU; shared ones stay shared."""
    assert isinstance(outline, ContrastiveTask)
    memo: dict[int, Any] = {}
    for each in outline.model.parameters():
        memo[id(each)] = nn.Parameter(torch.empty_like(each, device=CPU), each.requires_grad)
    for buffer in outline.model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=CPU)
    vocabulary = outline.model.text.preprocess  # large
    with _disable_current_modes():  # numbers that the host reads keep their values
        return copy.deepcopy(outline, memo | {id(vocabulary): vocabulary})


def _batch(config: TrainConfig, step: PlannedStep, sizes: tuple[int, ...], number: int) -> Batch:
    """Make rank 0's part of a global batch whose captions fill the context."""
    task, rows = step.task, sizes[0]
    assert isinstance(task, ContrastiveTask)
    features: dict[str, Tensor] = {}
    for modality in config.cached_modalities:
        tokenizer = task.tokenizers[modality]
        with torch.no_grad():
            shape = tokenizer.tower_features(tokenizer.tower.example()).shape[1:]
        assert config.data.feature_cache is not None
        features[modality] = torch.empty(rows, *shape, dtype=TORCH_DTYPES[config.data.feature_cache.dtype])
    side = 0 if "image" in features else task.image_size
    images = torch.empty(rows, 3, side, side, dtype=torch.uint8)
    texts = torch.empty(rows, task.context_length, dtype=torch.int64)
    ids, labels, places = (torch.empty(rows, dtype=torch.int64) for _ in range(3))
    return Batch(number, 0, images, texts, ids, labels, places, sum(sizes), sizes, features=features)


class PlannedStep(TrainStep[RankBatch]):
    """A step whose tensors have no values: nothing is read, and only a few of many equal microbatches run.

    In the first pass over microbatches, one of each size runs, and its exchanges count for all of that size
    (`Trace.repeats`). In the second pass three of the largest size run: the first, which makes the gradients; one that
    adds to them, whose exchanges count for all but the first and the last; and the last, which averages them.
    """

    trace: Trace
    _place: int | None = None
    """Time at which the newest microbatch of the second pass began; None outside that pass."""

    def start(self, trace: Trace) -> None:
        """Count memory and exchanges of the following steps."""
        assert isinstance(self.task, ContrastiveTask)
        self.trace, self._replay_checked = trace, True
        self.task.model.text.needed_tokens = lambda tokens: tokens.shape[1]  # type: ignore[method-assign]
        for part in itertools.chain.from_iterable(each.parts() for each in self.task.quantizers().values()):
            part.set_turn(True)  # make the numbers that the host reads as constants of `FakeTensorMode`
        trace.watch(self)

    def make_state(self, config: TrainConfig, step: int) -> None:
        """Make what a former step leaves: moments and averages, and with shards the memory for whole weights."""
        self.move_to_step(step)
        if self.sharding is not None:
            self.micro_batches = 1
            self(_batch(config, self, (1,) * dist.world_size(), step), step)
            self.micro_batches = config.train.micro_batches
            return
        for group in self.optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.empty_like(each) if each.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(step, torch.tensor(False))

    def settle(self) -> None:
        """Read no verdict."""
        self.guards._pending = None

    def _first_pass(self, local: RankBatch, step: int) -> list[TaskOutput]:
        parts = [part for _, part in super()._microbatches(local)]
        sizes, outputs = [len(part) for part in parts], dict[int, TaskOutput]()
        with torch.no_grad():
            for part in parts:
                if (size := len(part)) in outputs:
                    continue
                self.trace.repeats = sizes.count(size)
                outputs[size] = self._run_model(part, step, 0)
            self.trace.repeats = 1
            return [_copy(outputs[size]) for size in sizes]

    def _second_pass(self, cached: TaskOutput, local: RankBatch, step: int) -> None:
        self._place = self.trace.place
        super()._second_pass(cached, local, step)
        self._place = None

    def _microbatches(self, local: RankBatch) -> list[tuple[slice, RankBatch]]:
        parts = super()._microbatches(local)
        if self._place is None or len(parts) <= 3:
            return parts
        rows, part = max(parts, key=lambda each: len(each[1]))
        return [(rows, part)] * 3

    def _run_model(self, local: RankBatch, step: int, part: int, model: nn.Module | None = None) -> TaskOutput:
        if self._place is not None:
            if part:  # what is left of the backward before
                self.trace.claim_since(self._place, "gradients")
            self.trace.repeats = self.micro_batches - 2 if part == 1 and self.micro_batches > 3 else 1
            self._place = self.trace.place
        return super()._run_model(local, step, part, model)


def _copy(out: TaskOutput) -> TaskOutput:
    rows, stats = tree_map_only(Tensor, torch.clone, (dict(out.rows), dict(out.stats)))
    return TaskOutput(rows, stats, out.shared)
