"""Exchange of the texts of all ranks, for losses in which each rank has only its own images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ShapeError


class Block(NamedTuple):
    """Texts of the global batch that a rank processes together."""

    texts: Tensor
    """``(C, E)``"""
    columns: slice
    """Their positions among all G texts."""
    carried: tuple[Tensor, ...]
    """``(C, ...)`` each, to be modified in place."""
    constant: tuple[Tensor, ...] = ()
    """``(C, ...)`` each, not to be modified."""


class Exchange:
    """All texts on every rank, in one block. The constructor and every method are collectives.

        sums = exchange.empty(like, 0.0)                   # one entry per text
        for block in exchange.blocks(sums):                # every rank sees all texts, block by block
            block.carried[0] += f(own images, block.texts) # this rank's part for these texts
        own = exchange.collect_sum(sums)                   # the sum over ranks, for this rank's texts

    Args:
        text: ``(B, E)`` this rank's texts.
        wants_grad: True if this rank needs gradients; equal on all ranks.
        note: a further property that must be equal on all ranks, as text.
        sizes: all B in rank order, if the caller knows them; the ranks then exchange and compare nothing here.

    Raises:
        DistributedError: the ranks' features or notes do not fit together, or only some ranks need gradients.
        ShapeError: the global batch is empty, or ``sizes`` do not fit.
    """

    def __init__(self, text: Tensor, wants_grad: bool, note: str = "", sizes: Sequence[int] | None = None):
        if sizes is None:
            with torch.enable_grad():
                sizes = dist.gather_sizes(text.detach().requires_grad_(wants_grad), note)
        elif len(sizes) != dist.world_size() or sizes[dist.rank()] != len(text):
            raise ShapeError(
                f"sizes: got {list(sizes)}, and {len(text)} pairs on rank {dist.rank()} of {dist.world_size()}; "
                "expected every rank's number of pairs, in rank order"
            )
        self.sizes = list(sizes)
        self.count = sum(self.sizes)
        if self.count == 0:
            raise ShapeError("features: the global batch is empty, expected at least one pair on one rank")
        self.start = sum(self.sizes[: dist.rank()])
        self._texts = self.share(text)

    def share(self, own: Tensor) -> Tensor:
        """Make ``(B, ...)`` values of this rank's texts into a constant tensor of `blocks`."""
        return dist.all_gather(own, self.sizes)

    def empty(self, own: Tensor, fill: float) -> Tensor:
        """Return a tensor that `blocks` can carry, with the shape ``(B, ...)`` and dtype of ``own``, filled."""
        return own.new_full((self.count, *own.shape[1:]), fill)

    def blocks(self, *carried: Tensor, constant: Sequence[Tensor] = ()) -> Iterator[Block]:
        """Yield all texts once, with their parts of the carried and constant tensors. Must be iterated to the end."""
        yield Block(self._texts, slice(0, self.count), carried, tuple(constant))

    def collect_sum(self, carried: Tensor) -> Tensor:
        """Return the sum over ranks of a carried tensor for this rank's texts, ``(B, ...)``."""
        return dist.reduce_scatter(carried, self.sizes)

    def collect_logsumexp(self, carried: Tensor) -> Tensor:
        """Return the logarithm of the sum over ranks of a carried tensor's exponentials, ``(B, ...)``."""
        highest = dist.reduce_(carried.clone(), "max")
        # A column without another row remains -inf.
        total = (carried - highest.masked_fill(highest == -torch.inf, 0)).exp_()
        own = slice(self.start, self.start + self.sizes[dist.rank()])
        return highest[own] + self.collect_sum(total).log()


class Ring(Exchange):
    """The texts of one rank after the other, with up to twice the traffic of `Exchange` (on two ranks).

    Blocks move from rank to rank until their carried tensors are back at their owner. The next texts arrive while the
    current ones are processed; carried tensors follow afterwards. A rank holds its own block, the current one, and the
    next one.
    """

    def __init__(self, text: Tensor, wants_grad: bool, note: str = "", sizes: Sequence[int] | None = None):
        super().__init__(text, wants_grad, note, sizes)
        # NCCL needs all ranks in a job's first collective, and empty ranks take no part in shifts.
        if min(self.sizes) == 0:
            dist.reduce_(text.new_zeros(()))

    def share(self, own: Tensor) -> Tensor:
        """Return the values themselves, which `blocks` moves from rank to rank."""
        return own

    def empty(self, own: Tensor, fill: float) -> Tensor:
        """Return a tensor for this rank's texts, which is carried to all ranks and back."""
        return own.new_full(own.shape, fill)

    def blocks(self, *carried: Tensor, constant: Sequence[Tensor] = ()) -> Iterator[Block]:
        """Yield the texts of this rank, then those of the rank before it, and so on."""
        ranks, here = len(self.sizes), dist.rank()
        texts, moving = self._texts, list(carried)
        for hop in range(ranks):
            owner, is_last = (here - hop) % ranks, hop == ranks - 1
            start, rows = sum(self.sizes[:owner]), self.sizes[(owner - 1) % ranks]
            arriving = None if is_last else dist.start_ring_shift([texts, *constant], rows)
            yield Block(texts, slice(start, start + self.sizes[owner]), tuple(moving), tuple(constant))
            moving = dist.start_ring_shift(moving, rows)()
            if arriving is not None:
                texts, *constant = arriving()
        for own, returned in zip(carried, moving, strict=True):
            own.copy_(returned)

    def collect_sum(self, carried: Tensor) -> Tensor:
        """Return the tensor itself: it has been on every rank."""
        return carried

    def collect_logsumexp(self, carried: Tensor) -> Tensor:
        """Return the tensor itself: it has been on every rank."""
        return carried


EXCHANGES: dict[str, type[Exchange]] = {"tiled": Exchange, "ring": Ring}
"""Name of the implementation → the exchange of texts between ranks."""
