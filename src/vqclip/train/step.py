"""One training step: forward, statistics, losses, backward, clipping, the optimizer's step, the codebooks' update.

A batch too large for the memory goes through the model in `train.micro_batches`; see `vqclip.train.grad_cache`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config
from vqclip.data import Batch
from vqclip.errors import NonFiniteError, ReplayError
from vqclip.losses import Loss, Positives, pair_keys, weighted_total
from vqclip.model import CLIP, CLIPOutput
from vqclip.nn.precision import AUTOCAST_DTYPES, Precision, autocast
from vqclip.quantizers import Order, Stats, sync
from vqclip.seeds import derive_seed
from vqclip.train.grad_cache import backward_from_cached_grads, drift, drifting_module, joined
from vqclip.train.guards import Event, GuardConfig, Guards
from vqclip.train.optim import Schedule, clip_gradients, set_lr


class ComputeConfig(Config):
    """How a step is computed."""

    precision: Precision = "fp32"
    """bf16 and fp16 run the towers under autocast (fp16 with a gradient scaler); logits and quantizers stay in fp32.
    fp64 is for checking that processes agree."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    activation_checkpointing: bool = False
    """Recompute the towers' activations in the backward pass: less memory, about a third more compute."""
    micro_batches: int = Field(1, ge=1)
    """Parts in which a process runs its share of the batch, for the activations of one: the same gradient, with all the
    negatives of the global batch, for one forward more. Towers that draw random numbers draw them by part."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind for the log; tensors stay on their device until someone reads them."""

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
    """What was noteworthy; where it says ``skip``, nothing was applied."""


class TrainStep:
    """Holds what a step needs and runs one at a time.

    Every rank must call it with its part of the same global batch; parts may be of unequal size.

    Args:
        model: on its device, not wrapped.
        loss: contrastive or sigmoid loss over the global batch.
        optimizer: over the model's parameters.
        schedule: learning rate by step.
        compute: precision, compile, activation checkpointing.
        clip_norm: largest gradient norm, None for no clipping.
        seed: run seed; randomness inside the towers (dropout, stochastic depth) is keyed by (seed, step, rank,
            micro-batch), so that with it another world size is another trajectory (see `towers_draw`); that of the
            quantizers by (seed, modality, layer, step), the same on every rank.
        guards: look at the loss and at the gradient's norm before they are applied; by default, only finite ones are.
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
    ):
        if compute.activation_checkpointing:
            model.image.tower.set_grad_checkpointing()
            model.text.tower.set_grad_checkpointing()
        self.model, self.loss, self.optimizer, self.schedule = model, loss, optimizer, schedule
        self.device = model.logit_scale.device
        self.precision, self.clip_norm, self.seed = compute.precision, clip_norm, seed
        self.compiled = compute.compile
        self.parallel = dist.wrap_ddp(_compiled(model) if compute.compile else model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=compute.precision == "fp16")
        for name, quantizer in model.quantizers().items():
            quantizer.set_seed(derive_seed(seed, "quantizer", name))
        self.guards = guards or GuardConfig(spikes=None).build()
        self.micro_batches = compute.micro_batches
        self._replays = False
        """Whether a second pass was seen to repeat the first."""
        self.skipped = 0
        """Steps of the run that the gradient scaler skipped, because a gradient overflowed in fp16."""

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Run step number ``step`` (from 0) on this rank's part of its global batch.

        Raises:
            NonFiniteError: loss or gradient is NaN or infinite (in fp16 at any scale of the loss) and the guards do not
                skip such steps; on every rank alike, and the step has not touched the weights.
            ReplayError: with micro-batches, two forwards of the same samples differ; on every rank alike, before the
                weights are touched.
        """
        lr = self.schedule(step)
        set_lr(self.optimizer, lr)

        self.optimizer.zero_grad(set_to_none=True)
        share = _RankBatch.of(batch, self.model, self.loss.positives)
        differentiate = self._in_one_pass if self.micro_batches == 1 else self._in_two_passes
        terms, stats, scale, embedded = differentiate(share, step)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.model.parameters(), self.clip_norm)
        # fp16 expects a gradient to overflow now and then: its scaler skips that step.
        looked_at = terms if self.scaler.is_enabled() else terms | {"gradient norm": grad_norm}
        event = self.guards.look(step, _read(looked_at))
        stats = {name: each.detach() for name, each in stats.items()}
        if event is None or not event.skip:
            self._apply(stats)
        if self.scaler.is_enabled():
            self._update_scaler(step)
        return StepResult(terms, grad_norm, scale, lr, stats, embedded, event)

    def _apply(self, stats: dict[str, Stats]) -> None:
        """Change weights and codes."""
        self.scaler.step(self.optimizer)
        self.model.clamp_temperature()
        for name, quantizer in self.model.quantizers().items():
            quantizer.update(stats[name])
        if self.guards.collapse:
            self.guards.collapse.count(stats)

    def broadcast_local_codebooks(self) -> None:
        """Give every rank rank 0's codes where each has its own, as there is room for one in a checkpoint.

        A collective, where there are such.
        """
        for quantizer in self.model.quantizers().values():
            if quantizer.rank_local:
                state = {name: tensor.clone() for name, tensor in quantizer.state_dict().items()}
                quantizer.load_state_dict({name: dist.broadcast_(tensor) for name, tensor in state.items()})

    def _update_scaler(self, step: int) -> None:
        before = self.scaler.get_scale()
        self.scaler.update()
        after = self.scaler.get_scale()
        self.skipped += after < before
        if after < 1:
            raise NonFiniteError(
                f"step {step}: the gradient is not finite even with the loss scaled by {before:g}, after "
                f"{self.skipped} skipped steps; use train.precision: bf16 or fp32"
            )

    def _in_one_pass(self, share: _RankBatch, step: int) -> _Differentiated:
        return self._backward(self._forward(share, step, 0), share)

    def _in_two_passes(self, share: _RankBatch, step: int) -> _Differentiated:
        bounds = [len(share) * number // self.micro_batches for number in range(self.micro_batches + 1)]
        rows = [slice(*ends) for ends in itertools.pairwise(bounds)]
        parts = [share.part(each) for each in rows]
        whole = joined(self.model, self._looked_at(parts, step))
        differentiated = self._backward(whole, share)
        drifts = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else dist.no_sync(self.parallel):
                out = self._forward(part, step, number)
                with dist.named_errors("averaging the gradients"):
                    backward_from_cached_grads(out, whole, rows[number])
            if not self._replays:
                drifts.append(drift(out, whole, rows[number]))
        if not self._replays:
            self._require_replay(drifts, parts, step)
        return differentiated

    def _looked_at(self, parts: list[_RankBatch], step: int) -> Iterator[CLIPOutput]:
        """The first pass."""
        for number, part in enumerate(parts):
            with torch.no_grad():
                out = self._forward(part, step, number)
            yield out

    def _forward(self, share: _RankBatch, step: int, micro_batch: int, model: nn.Module | None = None) -> CLIPOutput:
        """Run the model, by default as it trains, on samples of this rank; equal arguments draw equal numbers."""
        torch.manual_seed(derive_seed(self.seed, "towers", step, dist.rank(), micro_batch))
        if self.compiled:  # captions differ in length: a graph for any
            torch._dynamo.maybe_mark_dynamic(share.tokens, 1)
        with autocast(self.device, self.precision):
            return (model or self.parallel)(share.images, share.tokens)

    def _backward(self, out: CLIPOutput, share: _RankBatch) -> _Differentiated:
        """From outputs to losses over the global batch and back."""
        embeddings = {"image": out.image.embedding.detach(), "text": out.text.embedding.detach()}
        sums = {name: each.double().sum(dim=0) for name, each in embeddings.items()}
        sums["count"] = torch.full((), len(share), device=self.device)
        image_stats, text_stats, embedded = sync([out.image.stats, out.text.stats, Stats(sums)], share.order)
        stats = {"image": image_stats, "text": text_stats}
        terms = self._losses(out, stats, share.keys)
        with dist.named_errors("averaging the gradients"):
            self.scaler.scale(terms["total"]).backward()
        return _Differentiated(
            {name: term.detach() for name, term in terms.items()}, stats, out.scale.detach(), embedded.detach()
        )

    def _require_replay(self, drifts: list[float], parts: list[_RankBatch], step: int) -> None:
        """Look once, on every rank, whether the second pass repeated the first."""
        half = self.precision in AUTOCAST_DTYPES
        worst = max(range(len(parts)), key=drifts.__getitem__)
        moved = drifts[worst] > (3e-2 if half else 1e-3)  # a code may flip where kernels round otherwise
        # Codes hide small differences in what comes before them, so the modules are always looked at.
        restless = drifting_module(
            self.model, lambda: self._forward(parts[worst], step, worst, self.model), 1e-2 if half else 1e-4
        )
        named = "none" if restless is None else f"model.{restless}"
        found = f"embeddings moved by {drifts[worst]:.2g} on average, the first module with other outputs: {named}"
        reports = dist.gather_json(found if moved or restless is not None else None)
        if guilty := [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]:
            raise ReplayError(
                f"train.micro_batches: the second pass of step {step} does not repeat the first, so the gradient would "
                f"be wrong. On {guilty[0]}. A module may draw random numbers from torch's generators alone and must "
                "not change its state in forward; replace it, or set train.micro_batches to 1"
            )
        self._replays = True

    def _losses(self, out: CLIPOutput, stats: dict[str, Stats], keys: Tensor | None) -> dict[str, Tensor]:
        """Unweighted terms by name, and their weighted ``total``."""
        terms = {self.loss.name: self.loss(out.image.embedding, out.text.embedding, out.scale, out.bias, keys)}
        weights = {self.loss.name: 1.0}
        for modality, quantizer in self.model.quantizers().items():
            for name, term in quantizer.losses(stats[modality]).items():
                terms[f"{modality}/{name}"] = term
                weights[f"{modality}/{name}"] = quantizer.loss_weights[name]
        return {"total": weighted_total(terms, weights), **terms}


class _Differentiated(NamedTuple):
    """A step between backward and the optimizer's."""

    terms: dict[str, Tensor]
    """Name → unweighted loss term and their weighted ``total``, over the global batch."""
    stats: dict[str, Stats]
    """``image`` and ``text``, over the global batch."""
    scale: Tensor
    """() factor of the logits."""
    embedded: Stats
    """As in `StepResult`."""


@dataclass(frozen=True)
class _RankBatch:
    """This rank's part of the global batch, on its device."""

    images: Tensor
    tokens: Tensor
    order: Order
    keys: Tensor | None

    @staticmethod
    def of(batch: Batch, model: CLIP, positives: Positives | None) -> _RankBatch:
        device = model.logit_scale.device
        images, tokens, places, sample_ids = (
            tensor.to(device, non_blocking=True)
            for tensor in (batch.images, batch.texts, batch.places, batch.sample_ids)
        )
        keys = pair_keys(positives, sample_ids, tokens)  # of all columns: ranks leave out different ones
        needed = model.text.needed_tokens(batch.texts)
        return _RankBatch(images, tokens[:, :needed], Order(places, batch.global_size), keys)

    def part(self, rows: slice) -> _RankBatch:
        """Some of its samples."""
        keys = None if self.keys is None else self.keys[rows]
        order = Order(self.order.places[rows], self.order.size)
        return _RankBatch(self.images[rows], self.tokens[rows], order, keys)

    def __len__(self) -> int:
        return len(self.images)


@torch.no_grad()
def towers_draw(model: CLIP) -> bool:
    """Whether the towers of ``model``, in training mode, draw random numbers: dropout, stochastic depth and the like.

    Tried out, as such modules have many names and libraries. The generators are left as they were.
    """
    device = model.logit_scale.device
    image, text = model.image.tower, model.text.tower
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = _generator_states(device)
        image(torch.zeros(1, 3, image.image_size, image.image_size, device=device))
        text(torch.zeros(1, text.num_tokens, dtype=torch.int64, device=device))
        return any(not old.equal(new) for old, new in zip(before, _generator_states(device), strict=True))


def _generator_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _compiled(model: nn.Module) -> nn.Module:
    # einops notes every new type of tensor that it meets, upon which torch compiles once more: let it meet them now.
    for tensor in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        rearrange(tensor, "a -> a")
    return torch.compile(model)  # type: ignore[return-value]


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """The numbers of single tensors; waits for the device."""
    return dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
