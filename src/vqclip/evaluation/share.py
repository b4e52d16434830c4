"""One evaluation over many ranks, or on one rank alone: which samples are whose, and how the parts come together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import DistributedError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Share:
    """Rank ``rank`` takes items ``rank::world_size``. Alone (rank 0 of 1) nothing here is a collective."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def of_this_process(cls, distributed: bool) -> Share:
        """All ranks together (every rank must evaluate), or this process alone."""
        return cls(dist.rank(), dist.world_size()) if distributed else cls()

    def of(self, count: int) -> range:
        """This rank's items of ``count``."""
        return range(self.rank, count, self.world_size)

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's rows, one rank after the other, on every rank."""
        return mine if self.world_size == 1 else dist.all_gather(mine)

    def gather_rows(self, mine: Tensor) -> Tensor:
        """Every rank's rows, in the order of the items that `of` dealt out, on every rank."""
        rows = self.gather(mine)
        if self.world_size == 1:
            return rows
        dealt = [item for rank in range(self.world_size) for item in range(rank, len(rows), self.world_size)]
        return rows[torch.argsort(torch.tensor(dealt, dtype=torch.int64)).to(rows.device)]

    def gather_items(self, mine: list[T]) -> list[T]:
        """Every rank's values (what JSON can hold), in the order of the items that `of` dealt out, on every rank."""
        if self.world_size == 1:
            return mine
        parts = dist.gather_json(mine)
        return [parts[place % self.world_size][place // self.world_size] for place in range(sum(map(len, parts)))]

    def first_on_one(self, make: Callable[[], T]) -> T:
        """``make()`` on rank 0, then on the others, which find what it left (an index, drawn data) on the disk."""
        made = None
        with self.together():
            made = make() if self.rank == 0 else None
        with self.together():
            made = make() if self.rank != 0 else made
        assert made is not None
        return made

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block on every rank; when it fails on one, it fails on all, instead of leaving the others waiting.

        The block must not hold a collective.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.world_size > 1:
            messages = dist.gather_json(None if failure is None else f"{type(failure).__name__}: {failure}")
            if failure is None and any(messages):
                rank = next(rank for rank, message in enumerate(messages) if message)
                failure = DistributedError(f"evaluation stopped, because rank {rank} failed: {messages[rank]}")
        if failure is not None:
            raise failure
