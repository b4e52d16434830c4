"""Result of a task's forward: what the losses need of the samples of a rank or of a microbatch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vqclip.quantizers import Stats

__all__ = ["TaskOutput", "join_outputs"]


@dataclass(frozen=True)
class TaskOutput:
    """Output of a forward for the losses; `vqclip.train.grad_cache` keeps it between the two passes."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → ``(B, ...)`` of every sample, such as embeddings that are compared with those of other samples."""
    stats: Mapping[str, Stats] = field(default_factory=dict)
    """Name → sums over the samples."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → tensor that does not depend on the samples, such as the temperature."""


def join_outputs(parts: Sequence[TaskOutput], shared: Mapping[str, Tensor]) -> TaskOutput:
    """Join the outputs of microbatches; each tensor but the shared ones is a leaf that collects its gradient.

    Args:
        parts: outputs without a graph; at least one.
        shared: with a graph, so that it enters the loss once.
    """
    rows = {name: torch.cat([part.rows[name].detach() for part in parts]).requires_grad_() for name in parts[0].rows}
    stats = {}
    for name in parts[0].stats:
        joined = functools.reduce(operator.add, [part.stats[name].detach() for part in parts])
        sums = {key: total.clone() for key, total in joined.sums.items()}
        for total in sums.values():
            total.requires_grad_(total.is_floating_point())
        stats[name] = replace(joined, sums=sums)
    return TaskOutput(rows, stats, shared)
