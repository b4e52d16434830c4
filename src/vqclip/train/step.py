"""One training step.

    out    = forward(batch)                 towers, projections, quantizers; no collective
    stats  = statistics(out)                sums over all ranks, from one exchange
    losses = losses(out, stats)             contrastive loss and the quantizers' losses, over the global batch
    backward(losses["total"])               DDP averages the gradients over ranks
    clip()                                  limit the gradient norm
    check(losses, gradient norm)            stop or skip the step if a number is not finite
    update(stats)                           optimizer step; codebooks follow their statistics; moving averages

With `train.micro_batches`, forward and backward run in microbatches; see `vqclip.train.grad_cache`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config
from vqclip.data import Batch
from vqclip.errors import NonFiniteError, ReplayError
from vqclip.losses import Loss, weighted_total
from vqclip.model import CLIP, CLIPOutput
from vqclip.nn.precision import AUTOCAST_DTYPES, Precision, autocast
from vqclip.quantizers import Stats, sync
from vqclip.seeds import derive_seed
from vqclip.train.bottleneck import BottleneckConfig
from vqclip.train.distillation import Distillation
from vqclip.train.distillation.features import separate_sums
from vqclip.train.ema import Ema, EmaConfig
from vqclip.train.grad_cache import backward_from_cached_grads, first_drifting_module, join_outputs, mean_drift
from vqclip.train.guards import Event, GuardConfig, Guards
from vqclip.train.optim import Schedule, clip_gradients, set_lr
from vqclip.train.rank_batch import RankBatch, make_rank_batch


class ComputeConfig(Config):
    """Precision, compilation and memory of a step."""

    precision: Precision = "fp32"
    """bf16 and fp16 run the towers under autocast (fp16 with a gradient scaler); logits and quantizers stay in fp32.
    fp64 is for checking that processes agree."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    activation_checkpointing: bool = False
    """Recompute the towers' activations in the backward pass: less memory, about a third more compute."""
    micro_batches: int = Field(1, ge=1)
    """Microbatches in which a process runs its part of the batch. Memory holds the activations of one microbatch. The
    gradient is the same, with all negatives of the global batch, for one more forward pass. Towers that draw random
    numbers draw them for each microbatch."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step; tensors stay on their device until they are read."""

    terms: dict[str, Tensor]
    """Name → unweighted loss term, and ``total``: the weighted sum; over the global batch."""
    grad_norm: Tensor
    """() norm of the whole gradient before clipping."""
    scale: Tensor
    """() factor of the logits in this step."""
    lr: float
    """Learning rate of this step."""
    stats: dict[str, Stats]
    """``image`` and ``text``: the quantizers' statistics over the global batch."""
    embedded: Stats
    """Sum of the embeddings of ``image`` and ``text``, and their ``count``, over the global batch."""
    event: Event | None
    """Report of the guards, if any; if its ``skip`` is True, weights and codebooks are unchanged."""


class TrainStep:
    """One training step at a time: forward, statistics, losses, backward, clip, update.

    Every rank must call it with its part of the same global batch; parts may be of unequal size.

    Args:
        model: on its device, not wrapped.
        loss: contrastive or sigmoid loss over the global batch.
        optimizer: over the model's parameters.
        schedule: learning rate by step.
        compute: precision, compilation, activation checkpointing, microbatches.
        clip_norm: largest gradient norm, None for no clipping.
        seed: run seed. Random numbers inside the towers (dropout, stochastic depth) depend on (seed, step, rank,
            microbatch), so towers that draw any train differently on another number of ranks (see `towers_draw`).
            Those of the quantizers depend on (seed, modality, layer, step) and are the same on every rank.
        guards: check the losses and the gradient norm before the update; by default they only have to be finite.
        ema: moving average of the weights; None for none.
        bottleneck: schedule by which the embedding begins with continuous vectors; None: codes from the first step.
        distillation: further terms of the loss, which follow teachers.
    """

    def __init__(
        self,
        model: CLIP,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        compute: ComputeConfig,
        clip_norm: float | None,
        seed: int,
        guards: Guards | None = None,
        ema: EmaConfig | None = None,
        bottleneck: BottleneckConfig | None = None,
        distillation: Distillation | None = None,
    ):
        self.towers = (model.image.tower, model.text.tower)
        for tower in self.towers:
            if compute.activation_checkpointing and not tower.is_frozen:
                tower.set_grad_checkpointing()
            tower.move_to_step(0)
        self.model, self.loss, self.optimizer, self.schedule = model, loss, optimizer, schedule
        self.distillation = distillation
        self.student = model if distillation is None else distillation.wrap(model)
        """The model, or a module around it without weights of its own, which also compares features."""
        self.device = model.logit_scale.device
        self.precision, self.clip_norm, self.seed = compute.precision, clip_norm, seed
        self.compiled = compute.compile
        self.parallel = self._wrap()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=compute.precision == "fp16")
        for name, quantizer in model.quantizers().items():
            quantizer.set_seed(derive_seed(seed, "quantizer", name))
        self.guards = guards or GuardConfig(spikes=None).build()
        self.ema = None if ema is None else Ema(ema, model)
        self.bottleneck = bottleneck
        self.micro_batches = compute.micro_batches
        self._replay_checked = False
        """Whether the second pass over the microbatches was compared with the first."""
        self.skipped = 0
        """Steps of the run that the gradient scaler skipped, because a gradient overflowed in fp16."""

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Run step number ``step`` (from 0) on this rank's part of its global batch.

        Raises:
            NonFiniteError: loss or gradient is NaN or infinite (in fp16 at any scale of the loss) and the guards do not
                skip such steps; on every rank, with unchanged weights.
            ReplayError: with microbatches, two forwards of the same samples differ; on every rank, with unchanged
                weights.
        """
        lr = self.schedule(step)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        self.move_to_step(step)
        local = make_rank_batch(batch, self.model, self.loss.positives, self.precision)

        out = self._forward(local, step)
        stats, followed, embedded = self._statistics(out, local)
        losses = self._losses(out, stats, local.keys, self._distill(out, followed, local, step))
        self._backward(losses["total"], out, local, step)
        grad_norm = self._clip()
        event = self._check(losses, grad_norm, step)
        stats = {name: each.detach() for name, each in stats.items()}
        applied = event is None or not event.skip
        if applied:
            self._update(stats)
        if self.scaler.is_enabled():
            applied &= self._update_scaler(step)
        if applied and self.ema is not None:
            self.ema.update(step)
        terms = {name: term.detach() for name, term in losses.items()}
        return StepResult(terms, grad_norm, out.scale.detach(), lr, stats, embedded.detach(), event)

    def move_to_step(self, step: int) -> None:
        """Freeze and unfreeze the towers as in step number ``step``; a collective where this changes anything."""
        if any([tower.move_to_step(step) for tower in self.towers]):
            dist.release_ddp(self.parallel)
            self.parallel = self._wrap()

    def changes_at(self, step: int) -> bool:
        """Return whether the computation changes with step number ``step``, so that it is compiled again."""
        steps: set[int | None] = {tower.first_step for tower in self.towers}
        steps.add(None if self.bottleneck is None else self.bottleneck.steps)
        steps |= set() if self.distillation is None else self.distillation.ends
        return step > 0 and step in steps

    def _wrap(self) -> nn.Module:
        """Return the model as it trains: compiled, and with gradients averaged over ranks."""
        return dist.wrap_ddp(_compile(self.student) if self.compiled else self.student)

    def _forward(self, local: RankBatch, step: int) -> CLIPOutput:
        """Return the outputs of this rank's samples; with microbatches, cached ones without a graph."""
        if self.micro_batches == 1:
            return self._run_model(local, step, 0)
        return join_outputs(self.model, self._first_pass(local, step))

    def _statistics(self, out: CLIPOutput, local: RankBatch) -> tuple[dict[str, Stats], Stats, Stats]:
        """Sum the quantizers' statistics, the terms on features and the embeddings over all ranks, in one exchange."""
        embeddings = {"image": out.image.embedding.detach(), "text": out.text.embedding.detach()}
        sums = {name: each.double().sum(dim=0) for name, each in embeddings.items()}
        sums["count"] = torch.full((), len(local), device=self.device)
        image, text, embedded = sync([out.image.stats, out.text.stats, Stats(sums)], local.order)
        return *separate_sums({"image": image, "text": text}), embedded

    def _distill(
        self, out: CLIPOutput, sums: Stats, local: RankBatch, step: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the terms that follow teachers, and their weights."""
        if self.distillation is None:
            return {}, {}
        with autocast(self.device, self.precision):
            return self.distillation.losses(out, sums, [part for _, part in self._microbatches(local)], step)

    def _losses(
        self,
        out: CLIPOutput,
        stats: dict[str, Stats],
        keys: Tensor | None,
        further: tuple[dict[str, Tensor], dict[str, float]] = ({}, {}),
    ) -> dict[str, Tensor]:
        """Return the unweighted terms by name, and their weighted ``total``; ``further``: terms and weights."""
        terms = {self.loss.name: self.loss(out.image.embedding, out.text.embedding, out.scale, out.bias, keys)}
        weights = {self.loss.name: 1.0}
        for modality, quantizer in self.model.quantizers().items():
            for name, term in quantizer.losses(stats[modality]).items():
                terms[f"{modality}/{name}"] = term
                weights[f"{modality}/{name}"] = quantizer.loss_weights[name]
        terms, weights = terms | further[0], weights | further[1]
        return {"total": weighted_total(terms, weights), **terms}

    def _backward(self, total: Tensor, out: CLIPOutput, local: RankBatch, step: int) -> None:
        """Compute the gradient of the weights; with microbatches, by a second pass over them."""
        with dist.named_errors("averaging the gradients"):
            self.scaler.scale(total).backward()
        if self.micro_batches > 1:
            self._second_pass(out, local, step)

    def _clip(self) -> Tensor:
        """Limit the gradient's norm; return the norm before."""
        self.scaler.unscale_(self.optimizer)
        return clip_gradients(self.model.parameters(), self.clip_norm)

    def _check(self, losses: dict[str, Tensor], grad_norm: Tensor, step: int) -> Event | None:
        """Have the guards check the step; waits for the device, once."""
        # fp16 expects a gradient to overflow now and then: its scaler skips that step.
        values = losses if self.scaler.is_enabled() else losses | {"gradient norm": grad_norm}
        numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
        return self.guards.check(step, dict(zip(values, numbers, strict=True)))

    def _update(self, stats: dict[str, Stats]) -> None:
        """Update the weights and the codebooks."""
        self.scaler.step(self.optimizer)
        self.model.clamp_temperature()
        for name, quantizer in self.model.quantizers().items():
            quantizer.update(stats[name])
        if self.guards.collapse:
            self.guards.collapse.count(stats)

    def _update_scaler(self, step: int) -> bool:
        """Adapt the scale of the loss; return False if the gradient had overflowed and the step was skipped."""
        before = self.scaler.get_scale()
        self.scaler.update()
        after = self.scaler.get_scale()
        self.skipped += after < before
        if after < 1:
            raise NonFiniteError(
                f"step {step}: the gradient is not finite even with the loss scaled by {before:g}, after "
                f"{self.skipped} skipped steps; use train.precision: bf16 or fp32"
            )
        return after >= before

    def use_averages(self) -> AbstractContextManager[None]:
        """Give the model the moving average of its weights within the block; no effect without `train.ema`."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def broadcast_local_codebooks(self) -> None:
        """Copy rank 0's unsynchronised codebooks to all ranks: a checkpoint and an evaluation have one codebook.

        A collective if a quantizer has any.
        """
        for quantizer in self.model.quantizers().values():
            if quantizer.rank_local:
                broadcast_module(quantizer)

    def _run_model(self, local: RankBatch, step: int, part: int, model: nn.Module | None = None) -> CLIPOutput:
        """Run the model, by default as it trains, on samples of this rank; equal arguments draw equal numbers."""
        torch.manual_seed(derive_seed(self.seed, "towers", step, dist.rank(), part))
        if self.compiled:  # captions differ in length: one graph for all lengths
            torch._dynamo.maybe_mark_dynamic(local.tokens, 1)
        schedule = nullcontext() if self.bottleneck is None else self.bottleneck.at(step, self.model)
        with autocast(self.device, self.precision), schedule:
            further = () if self.distillation is None else self.distillation.targets(local, step)
            known = (local.features.get("image"), local.features.get("text"))
            return (model or self.parallel)(local.images, local.tokens, *known, *further)

    def _microbatches(self, local: RankBatch) -> list[tuple[slice, RankBatch]]:
        """Return the rows and the samples of each microbatch."""
        bounds = [len(local) * number // self.micro_batches for number in range(self.micro_batches + 1)]
        return [(rows, local.part(rows)) for rows in itertools.starmap(slice, itertools.pairwise(bounds))]

    def _first_pass(self, local: RankBatch, step: int) -> Iterator[CLIPOutput]:
        for number, (_, part) in enumerate(self._microbatches(local)):
            with torch.no_grad():
                out = self._run_model(part, step, number)
            yield out

    def _second_pass(self, cached: CLIPOutput, local: RankBatch, step: int) -> None:
        """Run every microbatch with a graph, and continue the backward of the cached outputs in it."""
        parts, drifts = self._microbatches(local), []
        for number, (rows, part) in enumerate(parts):
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else dist.no_sync(self.parallel):
                out = self._run_model(part, step, number)
                with dist.named_errors("averaging the gradients"):
                    backward_from_cached_grads(out, cached, rows)
            if not self._replay_checked:
                drifts.append(mean_drift(out, cached, rows))
        if not self._replay_checked:
            self._require_replay(drifts, [part for _, part in parts], step)

    def _require_replay(self, drifts: list[float], parts: list[RankBatch], step: int) -> None:
        """Check once, on every rank, that the second pass repeats the first."""
        half = self.precision in AUTOCAST_DTYPES
        worst = max(range(len(parts)), key=drifts.__getitem__)
        moved = drifts[worst] > (3e-2 if half else 1e-3)  # a code may flip where kernels round differently
        # Codes hide small differences in what comes before them, so the modules are always compared.
        drifting = first_drifting_module(
            self.model, lambda: self._run_model(parts[worst], step, worst, self.student), 1e-2 if half else 1e-4
        )
        named = "none" if drifting is None else f"model.{drifting}"
        found = f"embeddings moved by {drifts[worst]:.2g} on average, the first module with other outputs: {named}"
        reports = dist.gather_json(found if moved or drifting is not None else None)
        if guilty := [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]:
            raise ReplayError(
                f"train.micro_batches: the second pass of step {step} does not repeat the first, so the gradient would "
                f"be wrong. On {guilty[0]}. A module may draw random numbers from torch's generators alone and must "
                "not change its state in forward; replace it, or set train.micro_batches to 1"
            )
        self._replay_checked = True


def broadcast_module(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers of ``module`` to all ranks. A collective."""
    for tensor in module.state_dict().values():
        dist.broadcast_(tensor)
    module.load_state_dict(module.state_dict())  # so that hooks derive attributes from it


@torch.no_grad()
def towers_draw(model: CLIP) -> bool:
    """Return whether the towers of ``model`` draw random numbers when they train: dropout, stochastic depth.

    Runs the towers and compares the generators' states, as the modules that draw have many names. The generators are
    left unchanged.
    """
    device = model.logit_scale.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = _generator_states(device)
        for tower in (model.image.tower, model.text.tower):
            with tower.unfrozen():
                tower(tower.example())
        return any(not old.equal(new) for old, new in zip(before, _generator_states(device), strict=True))


def _generator_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _compile(model: nn.Module) -> nn.Module:
    # einops remembers each new type of tensor, and torch then compiles once more: show it both types now.
    for tensor in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        rearrange(tensor, "a -> a")
    return torch.compile(model)  # type: ignore[return-value]
