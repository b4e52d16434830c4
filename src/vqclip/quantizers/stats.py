"""What a quantizer adds up in forward, and the one place where ranks put their sums together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ShapeError
from vqclip.quantizers.draws import random_integers, random_order


class Order(NamedTuple):
    """Where this rank's samples stand in the global batch: with it, a draw is the same on any number of ranks."""

    places: Tensor
    """``(B,)`` int64: the place in the global batch of every entry of the first dimension of this rank's batch."""
    size: int
    """G, the samples of the global batch."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Tokens to be drawn from the global batch, when the ranks meet: forward knows only this rank's part of it.

    No token is drawn twice. The draws go through all samples in random order, then through them again; a sample gives
    another of its real tokens every time, in random order. Without samples (see `sync`), every real token is one.
    """

    stream: Tensor
    """() int64, the stream of random numbers, equal on all ranks; see `vqclip.quantizers.draws`."""
    count: int
    """M, how many. Those beyond the tokens that there are yield nothing."""
    vectors: Tensor
    """``(T, G, D)`` this rank's tokens, without gradient; referred to, not copied."""
    keep: Tensor | None
    """``(T,)`` bool, True = real token; all by default."""
    shared: bool = True
    """From the tokens of all ranks; else each rank draws from its own."""


@dataclass(frozen=True, eq=False)
class Stats(Mapping[str, Tensor]):
    """Named sums and counts over tokens: immutable, added with ``+``, differentiable where a loss needs them.

    Every entry is a sum over tokens, so adding entries is adding batches: micro-batches by ``a + b``, ranks by
    ``sync()``. Means are taken only at the very end, as reduced sum over reduced count: a mean of per-rank means is
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
        drawn, also_drawn = ({name: draw.count for name, draw in stats.draws.items()} for stats in (self, other))
        if self.sums.keys() != other.sums.keys() or drawn != also_drawn:
            raise ShapeError(
                f"statistics of different quantizers, or from before and after an update: of {sorted(self)} and of "
                f"{sorted(other)}, with draws {drawn} and {also_drawn}"
            )
        if self.is_global or other.is_global:
            raise ShapeError("statistics that cover all ranks already cannot be added: reduce the sum of the batches")
        return Stats(
            {name: total + other.sums[name] for name, total in self.sums.items()},
            {name: _join_draws(draw, other.draws[name]) for name, draw in self.draws.items()},
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
    def nest(parts: Mapping[str, Stats]) -> Stats:
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
        return Stats(self.sums | _draw_tokens(self.draws, None), is_global=True)

    def sync(self, order: Order | None = None, group: Any = None) -> Stats:
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
        order: where this rank's samples stand in the global batch, for draws. By default every real token counts as a
            sample, rank after rank, for which the ranks tell each other their numbers of tokens where there is
            anything to draw: one small collective more.
        group: the process group, all ranks by default.

    Returns:
        One global `Stats` for each given one: counts in their integer dtype, and floating-point sums as float64 (in
        one process without an order as they are).
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
        entry if both is None else Stats(_unpack_sums(both[0], reduced) | both[1], is_global=True)
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
    return travels | _draw_tokens(shared, order), stays | _draw_tokens(alone, here)


def _orders(stats: Sequence[Stats], order: Order | None, group: Any) -> list[Order | None]:
    """The order for each of the statistics: that of the samples, or all real tokens, rank after rank."""
    waiting = [any(draw.shared for draw in entry.draws.values()) and not entry.is_global for entry in stats]
    if order is not None or not any(waiting):
        return [order] * len(stats)
    draws = [next(iter(entry.draws.values())) if waits else None for entry, waits in zip(stats, waiting, strict=True)]
    device = next(draw.vectors.device for draw in draws if draw is not None)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counts = dist.all_gather(torch.stack([zero if draw is None else _keep(draw).sum() for draw in draws])[None], group)
    before = counts[: dist.rank(group)].sum(dim=0)
    total = counts.sum(dim=0).tolist()
    return [
        None if draw is None else Order(_number_tokens(_keep(draw), begin), size)
        for draw, begin, size in zip(draws, before, total, strict=True)
    ]


def _draw_tokens(draws: Mapping[str, Draw], order: Order | None) -> dict[str, Tensor]:
    """``<name>/vectors`` ``(M, G, D)`` and ``<name>/present`` ``(M, 1, 1)``, 0 where the token is not on this rank."""
    found = {}
    for name, draw in draws.items():
        row = _rows(draw, order) if len(draw.vectors) else draw.stream.new_full((draw.count,), -1)
        present = (row >= 0)[:, None, None]
        # One row more, for what is elsewhere: an empty rank has no other to point at.
        vectors = torch.cat((draw.vectors, draw.vectors.new_zeros(1, *draw.vectors.shape[1:])))[row]
        found[f"{name}/vectors"] = vectors
        found[f"{name}/present"] = present.to(vectors.dtype)
    return found


def _rows(draw: Draw, order: Order | None) -> Tensor:
    """``(M,)``: the row of ``draw.vectors`` that each draw means, -1 where another rank has it, or no one."""
    keep = _keep(draw)
    # Without an order every real token is a sample; their number stays on the device.
    places, size = (_number_tokens(keep, 0), len(keep)) if order is None else order
    filled = keep.sum().clamp(min=1) if order is None else size
    tokens, left = divmod(len(keep), len(places))
    if left:
        raise ShapeError(
            f"statistics of {len(keep)} tokens with an order of {len(places)} samples; expected those of the forward's "
            "samples, each with the same number of tokens, padding included"
        )
    device, keep = keep.device, keep.view(-1, tokens)
    turn, index = torch.arange(draw.count, device=device), torch.arange(size, device=device)
    place = random_order(draw.stream, index, index < filled)[turn % filled]
    here = torch.full((size + 1,), -1, device=device)  # the last one for tokens that have no place
    here = here.scatter(0, places.where(places >= 0, size), torch.arange(len(places), device=device))[:size]
    sample, again = here[place], turn // filled
    # Negative indices: numbers of the stream that the samples have not used. By their number among the real ones, so
    # that padding changes nothing.
    own = random_integers(draw.stream, -1 - places)[:, None]
    token = random_order(own, keep.cumsum(dim=1) - 1, keep)[sample, again.clamp(max=tokens - 1)]
    found = (sample >= 0) & (again < keep.sum(dim=1)[sample])
    return torch.where(found, sample * tokens + token, -1)


def _keep(draw: Draw) -> Tensor:
    """``(T,)`` bool."""
    return (
        torch.ones(len(draw.vectors), dtype=torch.bool, device=draw.vectors.device) if draw.keep is None else draw.keep
    )


def _number_tokens(keep: Tensor, begin: Tensor | int) -> Tensor:
    """``(T,)`` the number of every real token, -1 for padding."""
    return torch.where(keep, begin + keep.cumsum(dim=0) - 1, -1)


def _join_draws(a: Draw, b: Draw) -> Draw:
    keep = None if a.keep is None and b.keep is None else torch.cat((_keep(a), _keep(b)))
    return Draw(a.stream, a.count, torch.cat((a.vectors, b.vectors)), keep, a.shared)


def _unpack_sums(local: Mapping[str, Tensor], reduced: Iterator[Tensor]) -> dict[str, Tensor]:
    sums = {}
    for name, total in local.items():
        whole = next(reduced).view_as(total)
        sums[name] = whole if total.is_floating_point() else whole.detach().round().to(total.dtype)
    return sums


# So that a quantizer, or a model that returns its statistics, can be exported.
torch.export.register_dataclass(Draw, serialized_type_name="vqclip.quantizers.Draw")
torch.export.register_dataclass(Stats, serialized_type_name="vqclip.quantizers.Stats")
