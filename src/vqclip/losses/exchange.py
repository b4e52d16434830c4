"""How every image meets every text, wherever it lives.

A round shows a rank all texts, block by block; what a round carries along is written to in place and collects what the
ranks add to each text's share of it. `Gathered` has all texts on every rank in one block and adds up at the end of a
round. `Ring` never holds those of all ranks: blocks go from rank to rank, with what they carry, until they are back
where they belong; a rank holds its own, the one it looks at, and two more while they are handed on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ShapeError


class Block(NamedTuple):
    """Some texts of the global batch, as a rank meets them."""

    texts: Tensor
    """``(C, E)``"""
    columns: slice
    """Where they stand among all G."""
    carried: tuple[Tensor, ...]
    """``(C, ...)`` each, to be written to in place."""


class Exchange(ABC):
    """The texts of all ranks. Making one is a collective, and so is everything that it does.

    Args:
        text: ``(B, E)`` this rank's.
        group: the ranks.
        wants_grad: whether this rank wants gradients; all must agree.
        note: what else all must agree on, in words.

    Raises:
        DistributedError: the ranks' features or notes do not fit together, or only some of them want gradients.
        ShapeError: no rank has a pair.
    """

    def __init__(self, text: Tensor, group: dist.Group, wants_grad: bool, note: str = ""):
        self.group = group
        with torch.enable_grad():
            self.sizes = dist.gather_sizes(text.detach().requires_grad_(wants_grad), group, note)
        self.count = sum(self.sizes)
        if self.count == 0:
            raise ShapeError("features: the global batch is empty, expected at least one pair on one rank")
        self.start = self._start_of(dist.rank(group))

    @abstractmethod
    def spread(self, own: Tensor) -> Tensor:
        """``(B, ...)`` of this rank's texts → what a round can carry."""

    @abstractmethod
    def empty(self, own: Tensor, fill: float) -> Tensor:
        """What a round can carry, shaped and typed like ``own`` ``(B, ...)`` and filled with a number."""

    @abstractmethod
    def round(self, *carried: Tensor) -> Iterator[Block]:
        """All texts, once. To be gone through to its end."""

    @abstractmethod
    def collect_sum(self, carried: Tensor) -> Tensor:
        """What ranks have added to something carried → ``(B, ...)``, their sum for this rank's texts."""

    @abstractmethod
    def collect_logsumexp(self, carried: Tensor) -> Tensor:
        """The same for logarithms of sums."""

    def _start_of(self, rank: int) -> int:
        return sum(self.sizes[:rank])


class Gathered(Exchange):
    """All texts on every rank."""

    def __init__(self, text: Tensor, group: dist.Group, wants_grad: bool, note: str = ""):
        super().__init__(text, group, wants_grad, note)
        self._texts = self.spread(text)

    def spread(self, own: Tensor) -> Tensor:
        """See `Exchange`."""
        return dist.all_gather(own, self.sizes, self.group)

    def empty(self, own: Tensor, fill: float) -> Tensor:
        """See `Exchange`."""
        return own.new_full((self.count, *own.shape[1:]), fill)

    def round(self, *carried: Tensor) -> Iterator[Block]:
        """See `Exchange`."""
        yield Block(self._texts, slice(0, self.count), carried)

    def collect_sum(self, carried: Tensor) -> Tensor:
        """See `Exchange`."""
        return dist.reduce_scatter(carried, self.sizes, self.group)

    def collect_logsumexp(self, carried: Tensor) -> Tensor:
        """See `Exchange`."""
        highest = dist.reduce_(carried.clone(), "max", self.group)
        # A column without another row stays at -inf.
        total = (carried - highest.masked_fill(highest == -torch.inf, 0)).exp_()
        own = slice(self.start, self.start + self.sizes[dist.rank(self.group)])
        return highest[own] + self.collect_sum(total).log()


class Ring(Exchange):
    """One rank's texts after the other, for as many more bytes: twice those of `Gathered` at most (on two ranks)."""

    def __init__(self, text: Tensor, group: dist.Group, wants_grad: bool, note: str = ""):
        super().__init__(text, group, wants_grad, note)
        self._text = text
        if (
            min(self.sizes) == 0
        ):  # NCCL wants all ranks in a group's first collective, and empty ones stay out of shifts
            dist.reduce_(text.new_zeros(()), group=group)

    def spread(self, own: Tensor) -> Tensor:
        """See `Exchange`."""
        return own.clone()

    def empty(self, own: Tensor, fill: float) -> Tensor:
        """See `Exchange`."""
        return own.new_full(own.shape, fill)

    def round(self, *carried: Tensor) -> Iterator[Block]:
        """See `Exchange`."""
        ranks, here = len(self.sizes), dist.rank(self.group)
        texts, moving = self._text, carried
        for hop in range(ranks):
            owner = (here - hop) % ranks
            start = self._start_of(owner)
            yield Block(texts, slice(start, start + self.sizes[owner]), moving)
            going = moving if hop == ranks - 1 else (texts, *moving)  # at last only what was carried has to go home
            coming = self._shift(going, self.sizes[(owner - 1) % ranks])
            texts, moving = (texts, coming) if hop == ranks - 1 else (coming[0], coming[1:])
        for own, home in zip(carried, moving, strict=True):
            own.copy_(home)

    def _shift(self, going: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
        """What the next rank gets from us → what we get from the one before us: ``rows`` rows, in one message."""
        if not going:
            return ()
        widths = [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in going]
        # As bytes: what is carried is wider than the texts, which must not travel as wide as that.
        packed = torch.cat([tensor.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8) for tensor in going], dim=1)
        parts = dist.ring_shift(packed, rows, self.group).split(widths, dim=1)
        # Cloned, since one row is contiguous wherever it begins, and wider types begin at multiples of their size.
        return tuple(
            part.clone(memory_format=torch.contiguous_format).view(tensor.dtype).reshape(rows, *tensor.shape[1:])
            for part, tensor in zip(parts, going, strict=True)
        )

    def collect_sum(self, carried: Tensor) -> Tensor:
        """See `Exchange`."""
        return carried

    def collect_logsumexp(self, carried: Tensor) -> Tensor:
        """See `Exchange`."""
        return carried
