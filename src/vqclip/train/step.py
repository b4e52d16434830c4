"""One training step.

    out    = forward(samples)               the task's rows and sums; no collective
    sums   = reduce(out)                    sums over all ranks, from one exchange
    losses = losses(out, sums)              terms of the task's loss, over the global batch
    backward(losses["total"])               the gradients are averaged over ranks
    norm   = clip()                         limit the gradient norm
    settle()                                read the verdict on the step before; it may end the run
    skip   = judge(losses, norm)            on the device: true if a number is not finite
    update(sums, skip)                      optimizer step; codebooks follow their statistics; moving averages

The host queues all of it on the device and waits for nothing; see `vqclip.train.guards`.

What is computed is the business of a task (`vqclip.train.tasks`), such as contrastive training. Several processes have
copies of the weights or shards of them (`vqclip.dist`).

With `train.micro_batches`, forward and backward run in microbatches; see `vqclip.train.grad_cache`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from vqclip import dist
from vqclip.config import FREE, Config
from vqclip.data import Batch
from vqclip.losses import weighted_total
from vqclip.nn.dropout import set_dropout_keys
from vqclip.nn.precision import AUTOCAST_DTYPES, Precision, autocast
from vqclip.quantizers import Stats
from vqclip.seeds import derive_seed
from vqclip.towers.blocks import Recomputed, recompute_blocks
from vqclip.train.ema import Ema, EmaConfig, replace_weights
from vqclip.train.grad_cache import backward_from_cached_grads, find_drift, join_outputs, require_replay
from vqclip.train.guards import GuardConfig, Guards
from vqclip.train.muon import Muon
from vqclip.train.optim import Schedule, set_lr
from vqclip.train.parallel import CompiledRegions, clip_gradients, prepare_compilation, shard
from vqclip.train.tasks.base import RankBatch, Task, TaskOutput


class ComputeConfig(Config):
    """Precision, compilation and memory of a step."""

    precision: Precision = "fp32"
    """bf16 and fp16 run the towers under autocast (fp16 with a gradient scaler); logits and quantizers stay in fp32.
    fp64 is for checking that processes agree."""
    compile: Annotated[bool | Literal["regional"], FREE] = False
    """`true`: compile the model with `torch.compile`. `regional`: compile the blocks of its towers that train, and its
    quantizers; equal blocks share their code, so it takes less time to compile, and works with `parallel: fsdp`."""
    activation_checkpointing: Annotated[Recomputed, FREE] = False
    """Activations that are recomputed in the backward pass: `true`, those of all blocks of the towers, for about a
    third more compute; a number N, those of every N-th block."""
    micro_batches: Annotated[int, FREE] = Field(1, ge=1)
    """Microbatches in which a process runs its part of the batch. Memory holds the activations of one microbatch. The
    gradient is the same, with all negatives of the global batch, for one more forward pass. Towers that draw random
    numbers draw them for each microbatch."""
    parallel: Annotated[Literal["ddp", "fsdp", "hsdp"], FREE] = "ddp"
    """Storage of the towers in several processes. `ddp`: each has all weights. `fsdp`: each has a part of every weight
    that trains, of its gradient and of its moments, and gathers one block at a time. `hsdp`: as `fsdp` among the
    processes of a machine; every machine has a whole copy. They differ in rounding alone; no effect in one process."""
    bucket_mb: Annotated[float | None, FREE] = Field(None, gt=0, le=4096)
    """With `parallel: ddp`, MiB of gradients that are averaged in one exchange while the backward runs: small
    exchanges start earlier, large ones use the network better. null: 1 in the first exchange, 25 in the others."""

    @model_validator(mode="after")
    def _parallel_fits(self) -> Self:
        if self.parallel != "ddp":
            if self.compile is True:
                raise ValueError(
                    f"got parallel {self.parallel!r} and compile true; expected compile regional or false, or ddp"
                )
            if self.precision == "fp16":
                raise ValueError(f"got parallel {self.parallel!r} and precision fp16; expected bf16, fp32, or ddp")
            if self.bucket_mb is not None:
                raise ValueError(
                    f"got parallel {self.parallel!r} and bucket_mb {self.bucket_mb:g}; expected bucket_mb null, or ddp"
                )
        return self


@dataclass(frozen=True)
class StepResult:
    """Result of a step; tensors stay on their device until they are read."""

    terms: dict[str, Tensor]
    """Name → unweighted loss term, and ``total``: the weighted sum; over the global batch."""
    grad_norm: Tensor
    """() norm of the whole gradient before clipping."""
    lr: float
    """Learning rate of this step."""
    stats: dict[str, Stats]
    """Name → sums over the global batch; those of quantizers, in contrastive training, as ``image`` and ``text``. Their
    `Stats.histograms` are of this rank's samples; `Stats.sync` is a collective that reduces them."""
    figures: dict[str, Tensor]
    """Further () figures of the task, named as in ``metrics.jsonl``, such as ``temperature/scale``."""


class TrainStep:
    """One training step at a time: forward, statistics, losses, backward, clip, update.

    Every rank must call it with its part of the same global batch; parts may be of unequal size.

    Args:
        task: model and losses; see `vqclip.train.tasks.base`.
        optimizer: over the model's parameters.
        schedule: learning rate by step.
        compute: precision, compilation, activation checkpointing, microbatches.
        clip_norm: largest gradient norm, None for no clipping.
        seed: run seed. Random numbers inside the towers (dropout, stochastic depth) depend on (seed, step, rank,
            microbatch), so towers that draw any train differently on another number of ranks (see `towers_draw`).
            Those of `KeyedDropout` depend on (seed, step, layer, place in the global batch) and those of the quantizers
            on (seed, modality, layer, step), on any number of ranks.
        guards: check the losses and the gradient norm before the update; by default they only have to be finite.
        ema: moving average of the weights; None for none.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        schedule: Schedule,
        compute: ComputeConfig,
        clip_norm: float | None,
        seed: int,
        guards: Guards | None = None,
        ema: EmaConfig | None = None,
    ):
        self.task, self.optimizer, self.schedule = task, optimizer, schedule
        training = [tower for tower in task.towers.values() if not tower.is_frozen]
        recompute_blocks(training, compute.activation_checkpointing)
        task.move_to_step(0)
        self.device = task.device
        self.precision, self.clip_norm, self.seed = compute.precision, clip_norm, seed
        self.micro_batches, self.compiled = compute.micro_batches, compute.compile is True
        regional = compute.compile == "regional"
        self.regions = CompiledRegions(training, task.quantizers().values()) if regional else None
        self.weights: dist.Replicas
        """Every weight as this rank has it: the whole, or its rows."""
        self.weights, self._whole = dist.Replicas(task.model), task
        if compute.parallel != "ddp":
            task.require_shardable(f"train.parallel: got {compute.parallel!r}")
            if dist.is_distributed():
                self.weights, self._whole = shard(task, optimizer, compute.parallel == "hsdp")
        if isinstance(optimizer, Muon):
            optimizer.weights = self.weights
        self._bucket_mb = compute.bucket_mb
        self.network = self._wrap()
        """`Task.student` as it trains: compiled, and with gradients averaged over ranks."""
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=compute.precision == "fp16")
        task.precision = compute.precision
        for name, quantizer in task.quantizers().items():  # keys of their random draws, equal on all ranks
            quantizer.set_seed(derive_seed(seed, "quantizer", name))
        self.guards = guards or Guards(GuardConfig(spikes=None))
        self.ema = None if ema is None else Ema(ema, self.weights.parameters)
        self._replay_checked = False
        """Whether the second pass over the microbatches was compared with the first."""

    @property
    def model(self) -> nn.Module:
        """The bare model of the task."""
        return self.task.model

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Run step number ``step`` (from 0) on this rank's part of its global batch.

        Raises:
            NonFiniteError: loss or gradient of the step before is NaN or infinite (in fp16 at any scale of the loss)
                and the guards do not skip such steps; on every rank, with the weights from before that step.
            ReplayError: with microbatches, two forwards of the same samples differ; on every rank, with unchanged
                weights.
        """
        lr = self.schedule(step)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        self.move_to_step(step)
        samples = self.task.local(batch)
        parts = self._microbatches(samples)

        with self._compiled_regions():
            out = self._forward(parts, step)
            sums = self.task.reduce(out, samples)
            terms, weights = self.task.losses(out, sums, parts, step)
            losses = {"total": weighted_total(terms, weights), **terms}
            self._backward(losses["total"], out, parts, step)
        set_dropout_keys(self.model, self.seed, step, None)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.task.clipped_apart(), self.weights, self.clip_norm)
        self.guards.settle()
        skip = self.guards.judge(losses, grad_norm, batch, self.scaler)
        sums = {name: each.detach() for name, each in sums.items()}
        self._update(sums, skip, step)
        detached = {name: term.detach() for name, term in losses.items()}
        return StepResult(detached, grad_norm, lr, sums, self.task.figures(out))

    def move_to_step(self, step: int) -> bool:
        """Change which parts train, as in step number ``step``; return whether this changes anything, a collective."""
        changes = self.task.move_to_step(step)
        if changes:  # wrapped for the parameters that train now
            self.optimizer.zero_grad(set_to_none=True)
            dist.release_ddp(self.network)
            self.network = self._wrap()
        return changes

    def _wrap(self) -> nn.Module:
        student: Any = self.task.student
        if self.compiled:
            prepare_compilation([student])
            student = torch.compile(student)
        return student if self.weights.shapes else dist.wrap_ddp(student, self._bucket_mb)  # shards gather themselves

    def _microbatches(self, samples: RankBatch) -> list[RankBatch]:
        """Return the samples of each microbatch."""
        if self.micro_batches == 1:
            return [samples]
        bounds = [len(samples) * number // self.micro_batches for number in range(self.micro_batches + 1)]
        return [samples.part(rows) for rows in itertools.starmap(slice, itertools.pairwise(bounds))]

    def _forward(self, parts: Sequence[RankBatch], step: int) -> TaskOutput:
        """Return the outputs of this rank's samples; with microbatches, cached ones without a graph."""
        if len(parts) == 1:
            return self._run_model(parts[0], step, 0)
        with torch.no_grad():
            cached = [self._run_model(part, step, number) for number, part in enumerate(parts)]
        return join_outputs(cached, self.task.shared())

    def _backward(self, total: Tensor, out: TaskOutput, parts: Sequence[RankBatch], step: int) -> None:
        """Compute the gradient of the weights; with microbatches, by a second pass over them."""
        with dist.named_errors("averaging the gradients"):
            self.scaler.scale(total).backward()
        if len(parts) > 1:
            self._second_pass(out, parts, step)
        self.weights.collect_gradients()

    def _second_pass(self, cached: TaskOutput, parts: Sequence[RankBatch], step: int) -> None:
        """Run every microbatch with a graph, and continue the backward of the cached outputs in it."""
        drifts, begin = [], 0
        for number, part in enumerate(parts):
            rows = slice(begin, begin + len(part))
            with nullcontext() if number == len(parts) - 1 else self.weights.no_sync(self.network):
                out = self._run_model(part, step, number)
                with dist.named_errors("averaging the gradients"):
                    backward_from_cached_grads(out, cached, rows)
            begin = rows.stop
            if not self._replay_checked:
                drifts.append(find_drift(out, cached, rows))
        if not self._replay_checked:
            with self._compiled_regions(False):
                require_replay(
                    self.model,
                    drifts,
                    lambda number: self._run_model(parts[number], step, number, self.task.student),
                    self.precision in AUTOCAST_DTYPES,
                    step,
                )
            self._replay_checked = True

    def _run_model(self, samples: RankBatch, step: int, part: int, model: nn.Module | None = None) -> TaskOutput:
        """Run the model, by default as it trains, on samples of this rank; equal arguments draw equal numbers."""
        torch.manual_seed(derive_seed(self.seed, "towers", step, dist.rank(), part))
        set_dropout_keys(self.model, self.seed, step, samples.order.places)
        if self.compiled:
            self.task.mark_dynamic(samples)
        gathers = dist.named_errors("gathering the weights") if self.weights.shapes else nullcontext()
        with autocast(self.device, self.precision), gathers:
            return self.task.run(model or self.network, samples, step)

    def _compiled_regions(self, compiled: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if self.regions is None else self.regions.applied(compiled)

    def _update(self, sums: dict[str, Stats], skip: Tensor, step: int) -> None:
        """Update weights, codebooks and moving averages, unless ``skip``, () bool on the device, is True."""
        step_optimizer(self.optimizer, skip)
        # To initialise a codebook, the host reads tokens anyway.
        if all(each.started for each in self.task.quantizers().values()) or not skip:
            with restored_if(skip, self.task.tensors_to_update()):
                self.task.update(sums)
        if self.guards.windows is not None:
            self.guards.windows.count(sums, skip)
        if self.ema is not None:
            self.ema.update(step, skip)

    @contextmanager
    def whole_task(self, averaged: bool = True) -> Iterator[Task]:
        """Return the task to evaluate and to export; weights in shards are gathered once. A collective then.

        Within the block no forward is a collective.

        Args:
            averaged: use the moving averages of the weights, if there are any (`train.ema`).
        """
        found = {name: each.detach() for name, each in self.weights.parameters.items() if name in self.weights.shapes}
        if self.ema is not None and averaged:
            found |= self.ema.averages
        whole = {name: self.weights.gather(name, rows) for name, rows in found.items()}
        with replace_weights(self._whole.model, whole):
            yield self._whole

    def broadcast_local_codebooks(self) -> None:
        """Copy rank 0's unsynchronised codebooks to all ranks: a checkpoint and an evaluation have one codebook.

        A collective if a quantizer has any.
        """
        for quantizer in self.task.quantizers().values():
            if quantizer.rank_local:
                broadcast_module(quantizer)


def step_optimizer(optimizer: Optimizer, skip: Tensor) -> None:
    """Run a step of the optimizer that changes neither weights nor moments nor counters where ``skip`` is True.

    Args:
        optimizer: of any kind. `Muon` and the fused kernel of AdamW take ``skip`` as a tensor; for others the host
            waits for it.
        skip: () bool on the device.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        if not skip:
            optimizer.step()
        return
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


@contextmanager
def restored_if(skip: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Undo what the block changes in tensors, in place, where ``skip``, () bool on the device, is True.

    Afterwards every bit is as before, and the host does not wait.
    """
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(skip, old, tensor))


def broadcast_module(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers of ``module`` to all ranks. A collective."""
    state = module.state_dict()
    for tensor in state.values():
        dist.broadcast_(tensor)
    module.load_state_dict(state)  # so that hooks derive attributes from it
