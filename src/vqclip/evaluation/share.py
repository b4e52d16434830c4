"""One evaluation over many ranks, or on one rank alone: which samples are whose, and how the parts come together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from vqclip import dist
from vqclip.data import Source, prepare_sources
from vqclip.errors import DistributedError, StopRequested
from vqclip.evaluation.datasets import EvaluationData

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
        """Every rank's rows on every rank, in the order of the items that `of` dealt out.

        A rank may have left some of its items out: the later ones of it then move up, as in `gather_items`.
        """
        if self.world_size == 1:
            return mine
        sizes = dist.gather_sizes(mine)
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        order = [starts[rank] + row for row in range(max(sizes)) for rank in range(len(sizes)) if row < sizes[rank]]
        rows = dist.all_gather(mine, sizes)
        return rows[torch.tensor(order, dtype=torch.int64, device=rows.device)]

    def gather_items(self, mine: list[T]) -> list[T]:
        """Every rank's values (what JSON can hold) on every rank, in the order of `gather_rows`."""
        if self.world_size == 1:
            return mine
        parts = dist.gather_json(mine)
        return [part[row] for row in range(max(map(len, parts))) for part in parts if row < len(part)]

    def open(self, data: EvaluationData) -> Source:
        """Open data on every rank, drawing and indexing together what is not there yet.

        Raises:
            DataError: data that cannot be used; `DistributedError` where only another rank cannot use them.
        """
        if self.world_size > 1:
            prepare_sources([data])
        with self.together():
            return data.build()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block on every rank; when it fails on one, it fails on all, instead of leaving the others waiting.

        The block must not hold a collective.

        Raises:
            StopRequested: on every rank, when one has been asked to stop, whatever the others met.
            DistributedError: where only another rank failed; else what failed here.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.world_size > 1:
            mine = None if failure is None else f"{type(failure).__name__}: {failure}"
            messages, stops = zip(*dist.gather_json([mine, isinstance(failure, StopRequested)]), strict=True)
            if any(stops):
                raise StopRequested
            if failure is None and any(messages):
                rank = next(rank for rank, message in enumerate(messages) if message)
                failure = DistributedError(f"evaluation stopped, because rank {rank} failed: {messages[rank]}")
        if failure is not None:
            raise failure

    def require_all_here(self, error: Exception) -> None:
        """Go on after `error` if it was met on all ranks, as those of `together` are; raise it if a rank is lost."""
        if self.world_size > 1:
            try:
                dist.barrier()
            except DistributedError:
                raise error from None
