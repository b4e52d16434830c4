"""Gradient accumulation with all the negatives of the global batch (GradCache).

    cached = [forward(microbatch) without a graph for each microbatch]     first pass
    loss(cached).backward()                   gradients of the rows and of the statistics
    for each microbatch:                                                   second pass
        out = forward(microbatch)             the same outputs, now with a graph
        out.backward(gradients of the cached rows)

The cached outputs of a task are rows, such as embeddings, and statistics, such as those of quantizers, which are sums
and so add up over microbatches. The second pass must repeat the first: random draws are keyed by microbatch, and
quantizers change in `update` only, after both passes. After Gao et al. 2021,
https://arxiv.org/abs/2101.06983 (embeddings only).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.errors import ReplayError
from vqclip.quantizers import Stats
from vqclip.train.tasks.base import TaskOutput

__all__ = ["backward_from_cached_grads", "join_outputs", "mean_drift", "require_replay"]


def join_outputs(parts: Sequence[TaskOutput], shared: Mapping[str, Tensor]) -> TaskOutput:
    """Join the outputs of microbatches; each tensor but the shared ones is a leaf that collects its gradient.

    Args:
        parts: outputs without a graph; at least one.
        shared: with a graph, so that it enters the loss once.
    """
    rows = {name: torch.cat([part.rows[name].detach() for part in parts]).requires_grad_() for name in parts[0].rows}
    stats: dict[str, Stats] = {}
    for name in parts[0].stats:
        joined = functools.reduce(operator.add, [part.stats[name].detach() for part in parts])
        sums = {key: total.clone() for key, total in joined.sums.items()}
        for total in sums.values():
            total.requires_grad_(total.is_floating_point())
        stats[name] = dataclasses.replace(joined, sums=sums)
    return TaskOutput(rows, stats, shared)


def backward_from_cached_grads(out: TaskOutput, cached: TaskOutput, rows: slice) -> None:
    """Run the backward of one microbatch from the gradients of the cached outputs.

    Args:
        out: output of the second pass.
        cached: result of `join_outputs`, after the loss's backward.
        rows: rows of the microbatch in it.
    """
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for name, mine in out.rows.items():
        found = cached.rows[name].grad
        pairs.append((mine, None if found is None else found[rows]))
    for name, stats in out.stats.items():
        pairs += [(stats[key], cached.stats[name][key].grad) for key in stats]
    # Shared tensors have their gradient; DDP wants to see all weights in every backward.
    pairs += [(each, None) for each in out.shared.values()]
    with_grad = [(output, found) for output, found in pairs if output.requires_grad]  # parts of the model may be frozen
    torch.autograd.backward(
        [output for output, _ in with_grad],
        [torch.zeros_like(output) if found is None else found for output, found in with_grad],
    )


def mean_drift(out: TaskOutput, cached: TaskOutput, rows: slice) -> float:
    """Return the mean distance of this rank's rows between the two passes; 0 without rows."""
    pairs = [(again, cached.rows[name][rows]) for name, again in out.rows.items()]
    distances = [(again.detach() - first.detach()).flatten(1).norm(dim=1) for again, first in pairs]
    found = torch.cat(distances) if distances else torch.empty(0)
    return float(found.mean()) if len(found) else 0.0


def require_replay(
    model: nn.Module, drifts: Sequence[float], run: Callable[[int], object], half: bool, step: int
) -> None:
    """Check, on every rank, that the second pass repeats the first. A collective.

    Args:
        model: whose modules are compared.
        drifts: result of `mean_drift` for each microbatch.
        run: runs the model on a microbatch, every time from the same state of torch's generators.
        half: whether the model runs in half precision.
        step: number of the step, for the message.

    Raises:
        ReplayError: on every rank, if it does not on one; names the first module with other outputs.
    """
    worst = max(range(len(drifts)), key=drifts.__getitem__)
    moved = drifts[worst] > (3e-2 if half else 1e-3)  # a code may flip where kernels round differently
    drifting = first_drifting_module(model, lambda: run(worst), 1e-2 if half else 1e-4)
    named = "none" if drifting is None else f"model.{drifting}"
    found = f"embeddings moved by {drifts[worst]:.2g} on average, the first module with other outputs: {named}"
    reports = dist.gather_json(found if moved or drifting is not None else None)
    if guilty := [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]:
        raise ReplayError(
            f"train.micro_batches: the second pass of step {step} does not repeat the first, so the gradient would "
            f"be wrong. On {guilty[0]}. A module may draw random numbers from torch's generators alone and must "
            "not change its state in forward; replace it, or set train.micro_batches to 1"
        )


def first_drifting_module(model: nn.Module, forward: Callable[[], object], tolerance: float) -> str | None:
    """Return the first module, in the order in which modules finish, whose outputs differ between two forwards.

    As in the two passes, the first forward is without gradients and the second with them.

    Args:
        model: whose modules are compared.
        forward: runs the model, every time from the same state of torch's generators.
        tolerance: difference of an output, relative to its norm, that counts as rounding.
    """
    with torch.no_grad():
        first = _fingerprints(model, forward)
    with torch.enable_grad():
        second = _fingerprints(model, forward)
    for before, after in itertools.zip_longest(first, second, fillvalue=_Fingerprint("", 0.0, 0.0)):
        if before.name != after.name or _differ(before, after, tolerance):
            return before.name or after.name
    return None


def _differ(before: _Fingerprint, after: _Fingerprint, tolerance: float) -> bool:
    if math.isfinite(before.projection) and math.isfinite(after.projection):
        return abs(after.projection - before.projection) > tolerance * before.norm
    return math.isfinite(before.projection) or math.isfinite(after.projection)


class _Fingerprint(NamedTuple):
    """Summary of a module's output: enough to detect another output, and to measure the difference."""

    name: str
    projection: float
    """Projection onto random signs: it changes by about the norm of the outputs' difference."""
    norm: float


def _fingerprints(model: nn.Module, forward: Callable[[], object]) -> list[_Fingerprint]:
    """Return a fingerprint of every tensor that a module returns, in the order in which modules finish."""
    found: list[_Fingerprint] = []

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def record(module: nn.Module, inputs: object, output: object) -> None:
            for leaf in _leaves(output):
                if isinstance(leaf, Tensor):
                    wide = leaf.detach().double()
                    found.append(_Fingerprint(name, float((wide * _signs(wide)).sum()), float(wide.norm())))

        return record

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _leaves(output: object) -> Iterable[object]:
    """Return the fields of an output such as `QuantizerOutput`, the items of a tuple, or the output itself."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return output if isinstance(output, tuple) else (output,)


def _signs(like: Tensor) -> Tensor:
    """Draw random signs, the same for every tensor of that shape, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(0, 2, like.shape, generator=generator).to(like) - 1
