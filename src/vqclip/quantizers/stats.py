"""What a quantizer adds up in forward, and the one place where ranks put their sums together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import dist


class Order(NamedTuple):
    """Where this rank's samples stand in the global batch: with it, a draw is the same on any number of ranks."""

    places: Tensor
    """``(B,)`` int64: the place in the global batch of every entry of the first dimension of this rank's batch."""
    size: int
    """G, the samples of the global batch."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Tokens to be drawn from the global batch, when the ranks meet: forward knows only this rank's part of it."""

    numbers: Tensor
    """``(M,)`` random int64, at least 0, equal on all ranks. No token is drawn twice: draws are spread evenly over the
    samples, and a sample's over its real tokens. Of few tokens some may be left out, and some draws yield nothing."""
    vectors: Tensor
    """``(T, G, D)`` this rank's tokens, without gradient; referred to, not copied."""
    keep: Tensor | None
    """``(T,)`` bool, True = real token; all by default. A sample without any yields nothing."""
    shared: bool = True
    """From the tokens of all ranks; else each rank draws from its own."""


@dataclass(frozen=True, eq=False)
class Stats(Mapping[str, Tensor]):
    """Named sums and counts over tokens: immutable, added with ``+``, differentiable where a loss needs them.

    Every entry is a sum over tokens, so adding entries is adding batches: micro-batches by ``a + b``, ranks by
    ``synced()``. Means are taken only at the very end, as reduced sum over reduced count: a mean of per-rank means is
    wrong when ranks hold different numbers of tokens.

    As a mapping it shows the sums, of this rank or of all; a rank's own sums stand beside them under ``own/``.

    Args:
        sums: name → tensor. Integer tensors are counts and stay exact.
        draws: name → tokens to draw. Once reduced, the sums have ``<name>/vectors`` ``(M, G, D)`` and
            ``<name>/present`` ``(M, 1, 1)`` in their stead, 0 where a draw met no real token.
        is_global: the sums already cover all ranks.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, Draw] = field(default_factory=dict)
    is_global: bool = False

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def __len__(self) -> int:
        return len(self.sums)

    def __add__(self, other: Stats) -> Stats:
        """Statistics of both batches together, e.g. of two micro-batches, this one's tokens first."""
        if not isinstance(other, Stats):
            return NotImplemented
        assert self.sums.keys() == other.sums.keys(), f"different quantizers: {set(self)} and {set(other)}"
        assert not self.is_global, "what covers all ranks already cannot be added to"
        assert not other.is_global, "what covers all ranks already cannot be added"
        return Stats(
            {name: total + other.sums[name] for name, total in self.sums.items()},
            {name: _joined(draw, other.draws[name]) for name, draw in self.draws.items()},
        )

    def under(self, prefix: str) -> Stats:
        """The part whose names begin with ``prefix/``, without it: one stage's of several."""
        start = len(prefix) + 1
        return Stats(
            {name[start:]: total for name, total in self.sums.items() if name.startswith(f"{prefix}/")},
            {name[start:]: draw for name, draw in self.draws.items() if name.startswith(f"{prefix}/")},
            self.is_global,
        )

    @staticmethod
    def nested(parts: Mapping[str, Stats]) -> Stats:
        """Several statistics as one, each under its own prefix; `under` takes them apart again."""
        return Stats(
            {f"{prefix}/{name}": total for prefix, part in parts.items() for name, total in part.sums.items()},
            {f"{prefix}/{name}": draw for prefix, part in parts.items() for name, draw in part.draws.items()},
        )

    def detach(self) -> Stats:
        """The same sums without their gradient, e.g. to keep a running total for `Quantizer.metrics`."""
        return Stats({name: total.detach() for name, total in self.sums.items()}, self.draws, self.is_global)

    def local(self) -> Stats:
        """The same sums taken as if this rank were alone: `Quantizer.losses` on them never meets another rank."""
        if self.is_global:
            return self
        return Stats(self.sums | _drawn(self.draws, None), is_global=True)

    def synced(self, order: Order | None = None, group: Any = None) -> Stats:
        """Sums over all ranks, itself when it has them already. A collective: every rank must call it.

        Several statistics are cheaper together: `sync`.
        """
        return sync([self], order, group)[0]


def sync(stats: Sequence[Stats], order: Order | None = None, group: Any = None) -> list[Stats]:
    """Reduce several statistics over all ranks in one collective, keeping gradients.

    Call it once a step on the statistics of all quantizers of both modalities; `Quantizer.losses` and
    `Quantizer.update` then find them reduced and communicate nothing. Every rank must call it with statistics of the
    same quantizers, in the same order, a rank without a single token too.

    Every rank computes the same loss from the same result, so the backward of the reduction needs no collective
    (`vqclip.dist.replicated_sum`). Sums travel as float64, in which counts below 2^53 are exact. A drawn token is
    the sum over ranks of itself and zeros.

    Args:
        stats: any number of statistics; those that are global already are returned as they are.
        order: where this rank's samples stand in the global batch; rank after rank by default, for which the ranks
            tell each other their token counts, one small collective more, where there is anything to draw.
        group: the process group, all ranks by default.

    Returns:
        One global `Stats` for each given one: floating-point sums as float64, counts in their integer dtype.
    """
    if dist.world_size(group) == 1 and order is None:
        return [entry.local() for entry in stats]
    orders = _orders(stats, order, group)
    pending = [None if entry.is_global else _split(entry, each) for entry, each in zip(stats, orders, strict=True)]
    parts = [total.double().flatten() for both in pending if both for total in both[0].values()]
    if not parts:
        return list(stats)
    flat = dist.replicated_sum(torch.cat(parts), group)
    reduced = iter(flat.split([part.numel() for part in parts]))
    return [
        entry if both is None else Stats(_rebuilt(both[0], reduced) | both[1], is_global=True)
        for entry, both in zip(stats, pending, strict=True)
    ]


OWN = "own/"
"""An entry with this in its path is a rank's own and never summed over ranks."""


def _is_own(name: str) -> bool:
    return OWN.removesuffix("/") in name.split("/")[:-1]


def _split(entry: Stats, order: Order | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What travels, and what stays on this rank."""
    shared = {name: draw for name, draw in entry.draws.items() if draw.shared}
    alone = {name: draw for name, draw in entry.draws.items() if not draw.shared}
    travels = {name: total for name, total in entry.sums.items() if not _is_own(name)}
    stays = {name: total for name, total in entry.sums.items() if _is_own(name)}
    here = order and Order(torch.arange(len(order.places), device=order.places.device), len(order.places))
    return travels | _drawn(shared, order), stays | _drawn(alone, here)


def _orders(stats: Sequence[Stats], order: Order | None, group: Any) -> list[Order | None]:
    """The order of the tokens of each of the statistics: that of the samples, or rank after rank."""
    waiting = [any(draw.shared for draw in entry.draws.values()) and not entry.is_global for entry in stats]
    if order is not None or not any(waiting):
        return [order] * len(stats)
    vectors = [next(iter(e.draws.values())).vectors if waits else None for e, waits in zip(stats, waiting, strict=True)]
    device = next(each.device for each in vectors if each is not None)
    mine = torch.tensor([[0 if each is None else len(each) for each in vectors]], device=device)
    counts = dist.all_gather(mine, group).tolist()
    rank = dist.rank(group)
    orders: list[Order | None] = []
    for waits, column in zip(waiting, zip(*counts, strict=True), strict=True):
        start = sum(column[:rank])
        places = torch.arange(start, start + column[rank], device=device)
        orders.append(Order(places, sum(column)) if waits else None)
    return orders


def _drawn(draws: Mapping[str, Draw], order: Order | None) -> dict[str, Tensor]:
    """``<name>/vectors`` ``(M, G, D)`` and ``<name>/present`` ``(M, 1, 1)``, 0 where the token is not on this rank."""
    found = {}
    for name, draw in draws.items():
        here = order or Order(torch.arange(len(draw.vectors), device=draw.numbers.device), len(draw.vectors))
        row = _rows(draw, here) if len(draw.vectors) else torch.full_like(draw.numbers, -1)
        present = (row >= 0)[:, None, None]
        # One row more, for what is elsewhere: an empty rank has no other to point at.
        vectors = torch.cat((draw.vectors, draw.vectors.new_zeros(1, *draw.vectors.shape[1:])))[row]
        found[f"{name}/vectors"] = vectors
        found[f"{name}/present"] = present.to(vectors.dtype)
    return found


def _rows(draw: Draw, order: Order) -> Tensor:
    """``(M,)``: the row of ``draw.vectors`` that each draw means, -1 where another rank has it, or no one."""
    samples, device = len(order.places), draw.numbers.device
    tokens, left = divmod(len(draw.vectors), samples)
    assert not left, (
        f"{len(draw.vectors)} tokens of {samples} samples: statistics of other forwards than of the order's"
    )
    keep = torch.ones(samples, tokens, dtype=torch.bool, device=device) if draw.keep is None else draw.keep
    keep = keep.view(samples, tokens)
    # In every round each draw takes a sample of its own; a sample's draws share its tokens out among the rounds.
    index = torch.arange(len(draw.numbers), device=device)
    rounds, turn = index // order.size, index % order.size
    of_round = (len(index) - rounds * order.size).clamp(max=order.size)
    number, place = _part(draw.numbers, turn, of_round, order.size)
    sample = torch.full((order.size,), -1, device=device)
    sample = sample.scatter(0, order.places, torch.arange(samples, device=device))[place]
    parts = -(-len(index) // order.size)
    part = (rounds + (draw.numbers[place % len(index)] >> 32)) % parts  # from a random part of the sample on
    number, token = _part(number, part, parts, keep.sum(dim=1)[sample])
    # The real tokens of a sample, in their order: padding changes none of their numbers.
    token = (~keep).byte().argsort(dim=1, stable=True)[sample, token]
    return torch.where((sample >= 0) & (number >= 0), sample * tokens + token, -1)


def _part(numbers: Tensor, part: Tensor, parts: Tensor | int, size: Tensor | int) -> tuple[Tensor, Tensor]:
    """One of ``range(size)`` from its ``part``-th of ``parts`` parts: (what is left of the numbers, the chosen ones).

    Where a part is empty, what is left is -1 and the chosen one 0.
    """
    start, end = part * size // parts, (part + 1) * size // parts
    width = (end - start).clamp(min=1)
    found = end > start
    return torch.where(found, numbers // width, -1), torch.where(found, start + numbers % width, 0)


def _joined(a: Draw, b: Draw) -> Draw:
    keep = None
    if a.keep is not None or b.keep is not None:
        keep = torch.cat([d.vectors.new_ones(len(d.vectors)).bool() if d.keep is None else d.keep for d in (a, b)])
    return Draw(a.numbers, torch.cat((a.vectors, b.vectors)), keep, a.shared)


def _rebuilt(local: Mapping[str, Tensor], reduced: Iterator[Tensor]) -> dict[str, Tensor]:
    sums = {}
    for name, total in local.items():
        whole = next(reduced).view_as(total)
        sums[name] = whole if total.is_floating_point() else whole.detach().round().to(total.dtype)
    return sums


# So that a quantizer, or a model that returns its statistics, can be exported.
torch.export.register_dataclass(Draw, serialized_type_name="vqclip.quantizers.Draw")
torch.export.register_dataclass(Stats, serialized_type_name="vqclip.quantizers.Stats")
