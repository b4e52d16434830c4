"""What a quantizer adds up in forward, and the one place where ranks put their sums together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vqclip import dist


@dataclass(frozen=True, eq=False)
class Stats(Mapping[str, Tensor]):
    """Named sums and counts over tokens: immutable, added with ``+``, differentiable where a loss needs them.

    Every entry is a sum over tokens, so adding entries is adding batches: micro-batches by ``a + b``, ranks by
    ``synced()``. Means are taken only at the very end, as reduced sum over reduced count: a mean of per-rank means is
    wrong when ranks hold different numbers of tokens.

    Args:
        sums: name → tensor. Integer tensors are counts and stay exact.
        is_global: the sums already cover all ranks.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    is_global: bool = False

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def __len__(self) -> int:
        return len(self.sums)

    def __add__(self, other: Stats) -> Stats:
        """Statistics of both batches together, e.g. of two micro-batches."""
        if not isinstance(other, Stats):
            return NotImplemented
        assert self.sums.keys() == other.sums.keys(), f"different quantizers: {set(self)} and {set(other)}"
        assert self.is_global == other.is_global, "statistics of one rank cannot be added to those of all ranks"
        return Stats({name: total + other.sums[name] for name, total in self.sums.items()}, self.is_global)

    def detach(self) -> Stats:
        """The same sums without their gradient, e.g. to keep a running total for `Quantizer.metrics`."""
        return Stats({name: total.detach() for name, total in self.sums.items()}, self.is_global)

    def local(self) -> Stats:
        """The same sums taken as if this rank were alone: `Quantizer.losses` on them never meets another rank."""
        return Stats(self.sums, is_global=True)

    def synced(self, group: Any = None) -> Stats:
        """Sums over all ranks, itself when it has them already. A collective: every rank must call it.

        Several statistics are cheaper together: `sync`.
        """
        return sync([self], group)[0]


def sync(stats: Sequence[Stats], group: Any = None) -> list[Stats]:
    """Reduce several statistics over all ranks in one collective, keeping gradients.

    Call it once a step on the statistics of all quantizers of both modalities; `Quantizer.losses` and
    `Quantizer.update` then find them reduced and communicate nothing. Every rank must call it with statistics of the
    same quantizers, in the same order, a rank without a single token too.

    Every rank computes the same loss from the same result, so the backward of the reduction needs no collective
    (`vqclip.dist.replicated_sum`). Sums travel as float64, in which counts below 2^53 are exact.

    Args:
        stats: any number of statistics; those that are global already are returned as they are.
        group: the process group, all ranks by default.

    Returns:
        One global `Stats` for each given one: floating-point sums as float64, counts in their integer dtype.
    """
    if dist.world_size(group) == 1:
        return [entry.local() for entry in stats]
    local = [entry for entry in stats if not entry.is_global]
    parts = [total.double().flatten() for entry in local for total in entry.sums.values()]
    if not parts:
        return list(stats)
    flat = dist.replicated_sum(torch.cat(parts), group)
    reduced = iter(flat.split([part.numel() for part in parts]))
    return [entry if entry.is_global else _rebuilt(entry, reduced) for entry in stats]


def _rebuilt(entry: Stats, reduced: Iterator[Tensor]) -> Stats:
    sums = {}
    for name, total in entry.sums.items():
        whole = next(reduced).view_as(total)
        sums[name] = whole if total.is_floating_point() else whole.detach().round().to(total.dtype)
    return Stats(sums, is_global=True)


# So that a quantizer, or a model that returns its statistics, can be exported.
torch.export.register_dataclass(Stats, serialized_type_name="vqclip.quantizers.Stats")
