"""Statistics that quantizers sum in forward, their reduction over ranks, and the keyed random numbers of training."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ShapeError

LAST = 2**63 - 1
"""Sort key that is larger than every random number."""


class Order(NamedTuple):
    """Positions of this rank's samples in the global batch, which make draws independent of the number of ranks."""

    places: Tensor
    """``(B,)`` int64: position in the global batch of each sample of this rank's batch."""
    size: int
    """G, the number of samples in the global batch."""


@dataclass(eq=False)
class Draw:
    """A request for random tokens of the global batch, fulfilled by `sync`: forward sees only this rank's tokens.

        order = random permutation of the G samples, keyed by the stream
        for m in range(M):
            sample = order[m % G]
            token = the (m // G)-th of the sample's real tokens, in random order; none if it has no more

    No token is drawn twice. Without an `Order` (see `sync`), every real token counts as a sample.
    """

    stream: Tensor
    """() int64, the random stream, equal on all ranks; see `stream`."""
    count: Tensor | int
    """M, the number of draws. As () int64 on the CPU, one compiled graph serves all numbers. Draws beyond the number of
    tokens return nothing."""
    vectors: Tensor
    """``(T, G, D)`` this rank's tokens, without gradient; a reference, not a copy."""
    keep: Tensor
    """``(T,)`` bool, True = real token."""
    shared: bool = True
    """True: draw from the tokens of all ranks. False: each rank draws from its own."""


@dataclass(eq=False)
class Stats:
    """Named sums and counts over tokens: added with ``+``, never changed, differentiable where a loss needs them.

    Every entry is a sum over tokens, so sums of entries are entries of joined batches: ``a + b`` joins microbatches,
    ``sync()`` joins ranks. A mean is computed only at the end, as reduced sum over reduced count: a mean of per-rank
    means is wrong when ranks have different numbers of tokens.

    Read like a mapping, it contains the sums and histograms, of this rank or of all ranks. It is a dataclass, not a
    `Mapping`: other programs (accelerate, Lightning) rebuild a mapping of any class from its items, without the draws,
    but keep the fields of a dataclass.

    Args:
        sums: name → tensor. Integer tensors are counts and stay exact.
        histograms: name → counts of codes that neither a loss nor an update reads; `sync` can leave them out.
        draws: name → request for tokens. The reduction replaces it by the sums ``<name>/vectors`` ``(M, G, D)`` and
            ``<name>/present`` ``(M, 1, 1)``, both 0 for draws without a token; in ``own`` unless the draw is shared.
        is_global: True if the sums cover all ranks; ``histograms`` that are left are still those of this rank.
        own: name → sum over this rank's tokens alone, which is never reduced over ranks.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, Draw] = field(default_factory=dict)
    is_global: bool = False
    histograms: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name] if name in self.sums else self.histograms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> KeysView[str]:
        """Return the names of the entries."""
        return (self.sums | self.histograms).keys()

    def __add__(self, other: Stats) -> Stats:
        """Return the statistics of both batches together, e.g. of two microbatches, this one's tokens first."""
        if not isinstance(other, Stats):
            return NotImplemented
        drawn = {name: int(draw.count) for name, draw in self.draws.items()}
        also_drawn = {name: int(draw.count) for name, draw in other.draws.items()}
        if self.keys() != other.keys() or drawn != also_drawn:
            raise ShapeError(
                f"statistics of different quantizers, or from before and after an update: of {sorted(self)} and of "
                f"{sorted(other)}, with draws {drawn} and {also_drawn}"
            )
        if self.is_global or other.is_global:
            raise ShapeError("statistics that cover all ranks already cannot be added: add first, then reduce the sum")
        return Stats(
            {name: total + other.sums[name] for name, total in self.sums.items()},
            {
                name: replace(
                    draw,
                    vectors=torch.cat((draw.vectors, other.draws[name].vectors)),
                    keep=torch.cat((draw.keep, other.draws[name].keep)),
                )
                for name, draw in self.draws.items()
            },
            histograms={name: counts + other.histograms[name] for name, counts in self.histograms.items()},
            own={name: total + other.own[name] for name, total in self.own.items()},
        )

    def under(self, prefix: str) -> Stats:
        """Return the entries whose names begin with ``prefix/``, without the prefix: the inverse of `nest`."""
        sums, draws, histograms, own = (
            {name.removeprefix(f"{prefix}/"): each for name, each in named.items() if name.startswith(f"{prefix}/")}
            for named in self._parts()
        )
        return Stats(sums, draws, self.is_global, histograms, own)

    @staticmethod
    def nest(parts: Mapping[str, Stats]) -> Stats:
        """Join several statistics, each under its own prefix."""
        sums, draws, histograms, own = (
            {f"{prefix}/{name}": each for prefix, part in parts.items() for name, each in part._parts()[kind].items()}
            for kind in range(4)
        )
        return Stats(sums, draws, histograms=histograms, own=own)

    def _parts(self) -> tuple[dict[str, Any], ...]:
        return self.sums, self.draws, self.histograms, self.own

    def detach(self) -> Stats:
        """Return the sums without gradient, e.g. for a running total for `Quantizer.metrics`."""
        return replace(self, sums={name: total.detach() for name, total in self.sums.items()})

    def local(self) -> Stats:
        """Return the sums marked as global, as for a single rank, so that `Quantizer.losses` needs no collective.

        Global ones are returned unchanged, with the histograms they have.
        """
        if self.is_global:
            return self
        drawn, own = _draw_tokens(self.draws, None)
        return Stats(dict(self) | drawn, is_global=True, own=self.own | own)

    def sync(self, order: Order | None = None, histograms: bool = True) -> Stats:
        """Return the sums over all ranks; itself if already global. A collective: every rank must call it.

        The function `sync` reduces several statistics in one collective.
        """
        return sync([self], order, histograms)[0]


def sync(stats: Sequence[Stats], order: Order | None = None, histograms: bool = True) -> list[Stats]:
    """Reduce several statistics over all ranks in one collective, keeping gradients.

    Call it once per step on the statistics of all quantizers of both modalities; `Quantizer.losses` and
    `Quantizer.update` then need no communication. Every rank, also one without tokens, must pass statistics of the same
    quantizers in the same order.

    All ranks compute the same loss from the result, so the backward of the reduction needs no collective
    (`vqclip.dist.replicated_sum`). Sums are reduced in float64, in which counts below 2^53 are exact. A drawn token is
    reduced as the sum of itself and zeros of the other ranks.

    Args:
        stats: any number of statistics; global ones are returned unchanged.
        order: positions of this rank's samples in the global batch, for draws. By default every real token counts as a
            sample, rank after rank. If there is anything to draw, this takes a second, small collective, for the
            numbers of tokens.
        histograms: False: leave ``histograms`` as they are, of this rank; another `sync` of the result reduces them.

    Returns:
        One global `Stats` for each given one: counts in their integer dtype, floating-point sums in float64 (unchanged
        in one process without an order).
    """
    if dist.world_size() == 1 and order is None:
        return [entry.local() for entry in stats]
    included = histograms or dist.world_size() == 1
    pending = [_split(entry, each, included) for entry, each in zip(stats, _orders(stats, order), strict=True)]
    parts = [total.double().flatten() for travels, _ in pending for total in travels.values()]
    if not parts:
        return list(stats)
    flat = dist.replicated_sum(torch.cat(parts))
    reduced = iter(flat.split([part.numel() for part in parts]))

    def unpack(local: Tensor) -> Tensor:
        total = next(reduced).view_as(local)
        return total if local.is_floating_point() else total.detach().round().to(local.dtype)

    return [
        replace(rest, sums={name: unpack(local) for name, local in travels.items()} | rest.sums)
        if travels or not entry.is_global
        else entry
        for entry, (travels, rest) in zip(stats, pending, strict=True)
    ]


def _split(entry: Stats, order: Order | None, histograms: bool) -> tuple[dict[str, Tensor], Stats]:
    """Return the sums to reduce over ranks, with draws fulfilled, and the rest of the result."""
    counts, left = (entry.histograms, {}) if histograms else ({}, entry.histograms)
    if entry.is_global:
        return counts, replace(entry, histograms=left)
    drawn, own = _draw_tokens(entry.draws, order)
    return entry.sums | counts | drawn, Stats(is_global=True, histograms=left, own=entry.own | own)


def _orders(stats: Sequence[Stats], order: Order | None) -> list[Order | None]:
    """Return the order for each of the statistics: the given one, or all real tokens, rank after rank."""
    waiting = [any(draw.shared for draw in entry.draws.values()) and not entry.is_global for entry in stats]
    if order is not None or not any(waiting):
        return [order] * len(stats)
    draws = [next(iter(entry.draws.values())) if waits else None for entry, waits in zip(stats, waiting, strict=True)]
    device = next(draw.vectors.device for draw in draws if draw is not None)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counts = dist.all_gather(torch.stack([zero if draw is None else draw.keep.sum() for draw in draws])[None])
    before = counts[: dist.rank()].sum(dim=0)
    total = counts.sum(dim=0).tolist()
    return [
        None if draw is None else Order(_number_tokens(draw.keep, begin), size)
        for draw, begin, size in zip(draws, before, total, strict=True)
    ]


def _draw_tokens(draws: Mapping[str, Draw], order: Order | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return ``<name>/vectors`` ``(M, G, D)`` and ``<name>/present`` ``(M, 1, 1)``, 0 for tokens of other ranks.

    Those of shared draws, which have the order, and those of draws from this rank's tokens.
    """
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, draw in draws.items():
        places = order
        if order is not None and not draw.shared:
            places = Order(torch.arange(len(order.places), device=order.places.device), len(order.places))
        count = int(draw.count)  # it is on the CPU
        some = len(draw.vectors) and count and (places is None or places.size)
        row = _rows(draw, count, places) if some else draw.stream.new_full((count,), -1)
        present = (row >= 0)[:, None, None]
        # An additional row of zeros for tokens of other ranks, because an empty rank has no row.
        vectors = torch.cat((draw.vectors, draw.vectors.new_zeros(1, *draw.vectors.shape[1:])))[row]
        found[not draw.shared].update({f"{name}/vectors": vectors, f"{name}/present": present.to(vectors.dtype)})
    return found


def _rows(draw: Draw, count: int, order: Order | None) -> Tensor:
    """Return ``(M,)`` for M draws: the row in ``draw.vectors``, -1 if another rank or no rank has the token."""
    keep = draw.keep
    # Without an order every real token is a sample. Their number stays on the device.
    places, size = (_number_tokens(keep, 0), len(keep)) if order is None else order
    filled = keep.sum().clamp(min=1) if order is None else size
    tokens, left = divmod(len(keep), max(len(places), 1))
    if left or (tokens and not len(places)):
        raise ShapeError(
            f"statistics of {len(keep)} tokens with an order of {len(places)} samples; expected those of the forward's "
            "samples, each with the same number of tokens, padding included"
        )
    device, keep = keep.device, keep.view(-1, tokens)
    turn, index = torch.arange(count, device=device), torch.arange(size, device=device)
    place = random_order(draw.stream, index, index < filled)[turn % filled]
    here = torch.full((size + 1,), -1, device=device)  # the last entry collects tokens without a place
    here = here.scatter(0, places.where(places >= 0, size), torch.arange(len(places), device=device))[:size]
    sample, again = here[place], turn // filled
    # Negative indices give numbers of the stream that the order of samples does not use. Tokens are counted among the
    # real ones, so that padding changes nothing.
    own = random_integers(draw.stream, -1 - places)[:, None]
    token = random_order(own, keep.cumsum(dim=1) - 1, keep)[sample, again.clamp(max=tokens - 1)]
    found = (sample >= 0) & (again < keep.sum(dim=1)[sample])
    return torch.where(found, sample * tokens + token, -1)


def _number_tokens(keep: Tensor, begin: Tensor | int) -> Tensor:
    """Return ``(T,)`` consecutive numbers of the real tokens, -1 for padding."""
    return torch.where(keep, begin + keep.cumsum(dim=0) - 1, -1)


def stream(key: int, step: Tensor) -> Tensor:
    """Return the () int64 random stream of one layer in one step: equal on every rank, without generator state.

    Args:
        key: key of the layer in the run.
        step: () int64, the number of the optimizer step.
    """
    return _mix(_mix(step + key))


def random_integers(stream: Tensor, index: Tensor) -> Tensor:
    """Return one number of a stream for every entry of ``index``, int64, uniform over ``[0, 2^62)``.

    The finaliser of SplitMix64 (Steele et al. 2014) over a counter: different indices give practically independent
    numbers. It uses only int64 arithmetic, so it can be compiled and runs on the device of ``index`` without waiting.
    """
    return _mix(stream + index) & (2**62 - 1)


def random_order(stream: Tensor, index: Tensor, keep: Tensor) -> Tensor:
    """Return a random permutation of the last dimension, with the entries that are not kept at the end.

    Args:
        stream: broadcast against ``index``.
        index: ``(..., n)`` int64, the identity of each entry: the permutation does not depend on their arrangement.
        keep: ``(..., n)`` bool.
    """
    return random_integers(stream, index).masked_fill(~keep, LAST).argsort(dim=-1, stable=True)


def _mix(x: Tensor) -> Tensor:
    # int64 wraps around. The constants of SplitMix64 as signed numbers.
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)  # a logical shift: `>>` alone repeats the sign


# Needed to export a quantizer, or a model that returns its statistics.
torch.export.register_dataclass(Draw, serialized_type_name="vqclip.quantizers.Draw")
torch.export.register_dataclass(Stats, serialized_type_name="vqclip.quantizers.Stats")
