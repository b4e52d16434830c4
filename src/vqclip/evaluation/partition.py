"""Partition of the samples of an evaluation over ranks, and collection of the results on all ranks."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from vqclip import dist
from vqclip.data import Source, SourceConfigBase, open_source, open_sources

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RankPartition:
    """Assignment of items ``rank::world_size`` to rank ``rank``; rank 0 of 1 enters no collective."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def create(cls, distributed: bool) -> RankPartition:
        """Return the partition over all ranks (each must evaluate), or over this process alone."""
        return cls(dist.rank(), dist.world_size()) if distributed else cls()

    def indices(self, count: int) -> range:
        """Return the indices of this rank's items out of ``count``."""
        return range(self.rank, count, self.world_size)

    def gather(self, mine: Tensor) -> Tensor:
        """Gather every rank's rows on every rank, in rank order."""
        return mine if self.world_size == 1 else dist.all_gather(mine)

    def gather_rows(self, mine: Tensor) -> Tensor:
        """Gather every rank's rows on every rank, in the order of `indices`.

        If a rank has left out some of its items, its later ones move up, as in `gather_items`.
        """
        if self.world_size == 1:
            return mine
        sizes = dist.gather_sizes(mine)
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        order = [starts[rank] + row for row in range(max(sizes)) for rank in range(len(sizes)) if row < sizes[rank]]
        rows = dist.all_gather(mine, sizes)
        return rows[torch.tensor(order, dtype=torch.int64, device=rows.device)]

    def gather_items(self, mine: list[T]) -> list[T]:
        """Gather every rank's JSON-able values on every rank, in the order of `gather_rows`."""
        if self.world_size == 1:
            return mine
        parts = dist.gather_json(mine)
        return [part[row] for row in range(max(map(len, parts))) for part in parts if row < len(part)]

    def open(self, data: SourceConfigBase, key: str = "data") -> Source:
        """Open data on every rank; all ranks together draw and index data that is not prepared yet.

        Args:
            data: configuration of the data.
            key: its key in the configuration of the task, for messages.

        Raises:
            DataError: the data cannot be used on some rank.
        """
        if self.world_size > 1:
            return open_sources([data], [key])[0]
        return open_source(data, key)

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """Raise an exception of the block on every rank, as `vqclip.dist.raise_on_all_ranks`; nothing for one rank."""
        return dist.raise_on_all_ranks() if self.world_size > 1 else nullcontext()
