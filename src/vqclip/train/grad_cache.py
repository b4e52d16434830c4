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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.errors import ReplayError
from vqclip.quantizers import Stats
from vqclip.train.tasks.base import TaskOutput


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


def find_drift(out: TaskOutput, cached: TaskOutput, rows: slice) -> float:
    """Return the distance between the two passes that a tenth of this rank's rows exceeds at most; 0 without rows.

    Kernels that round differently, as of compiled code with and without gradients, may flip codes of a few rows.
    """
    pairs = [(again, cached.rows[name][rows]) for name, again in out.rows.items()]
    distances = [(again.detach() - first.detach()).flatten(1).norm(dim=1).double() for again, first in pairs]
    found = torch.cat(distances) if distances else torch.empty(0)
    return float(found.quantile(0.9, interpolation="lower")) if len(found) else 0.0


def require_replay(
    model: nn.Module, drifts: Sequence[float], run: Callable[[int], object], half: bool, step: int
) -> None:
    """Check, on every rank, that the second pass repeats the first. A collective.

    Compared are the outputs of the two passes, and, module by module, two further forwards, the first one without
    gradients: codes hide small differences in what comes before them. Of a module's output the sum with random signs
    is compared, which changes by about the norm of the outputs' difference.

    Args:
        model: whose modules are compared.
        drifts: result of `find_drift` for each microbatch.
        run: runs the model on a microbatch, every time from the same state of torch's generators.
        half: whether the model runs in half precision.
        step: number of the step, for the message.

    Raises:
        ReplayError: on every rank, if it does not on one; names the first module, in the order in which they finish,
            with other outputs.
    """
    worst = max(range(len(drifts)), key=drifts.__getitem__)
    passes: list[list[tuple[str, float, float]]] = []

    def record(name: str, module: nn.Module, inputs: object, output: Any) -> None:
        if dataclasses.is_dataclass(output):
            output = tuple(vars(output).values())
        for leaf in output if isinstance(output, tuple) else (output,):
            if isinstance(leaf, Tensor):
                wide, generator = leaf.detach().double(), torch.Generator().manual_seed(0)
                signs = 2.0 * torch.randint(0, 2, wide.shape, generator=generator).to(wide) - 1
                passes[-1].append((name, float((wide * signs).sum()), float(wide.norm())))

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(functools.partial(record, name)) for name, module in named]
    try:
        for mode in (torch.no_grad(), torch.enable_grad()):
            passes.append([])
            with mode:
                run(worst)
    finally:
        for handle in handles:
            handle.remove()
    tolerance, drifting = 1e-2 if half else 1e-4, "none"
    for (name, before, norm), (again, after, _) in itertools.zip_longest(*passes, fillvalue=("", 0.0, 0.0)):
        both_nan = not (math.isfinite(before) or math.isfinite(after))
        if name != again or not (both_nan or abs(after - before) <= tolerance * norm):
            drifting = f"model.{name or again}"
            break
    moved = drifts[worst] > (3e-2 if half else 1e-3)
    found = f"embeddings moved by {drifts[worst]:.2g}, the first module with other outputs: {drifting}"
    reports = dist.gather_json(found if moved or drifting != "none" else None)
    if guilty := [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]:
        raise ReplayError(
            f"train.micro_batches: the second pass of step {step} does not repeat the first, so the gradient would "
            f"be wrong. On {guilty[0]}. A module may draw random numbers from torch's generators alone and must "
            "not change its state in forward; replace it, or set train.micro_batches to 1"
        )
