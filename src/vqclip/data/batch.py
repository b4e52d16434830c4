"""What the loader hands to the training step."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BadSample", "Batch", "EvalBatch"]


class BadSample(NamedTuple):
    """A sample that could not be used."""

    sample_id: int
    """Its number over all sources."""
    reason: str
    """What is wrong; names shard and sample."""
    substitute_id: int
    """Which sample stands in its place; -1 if none does (evaluation)."""


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch; B may differ between ranks by one, and be 0."""

    step: int
    """t, the number of the global batch."""
    epoch: int
    """Epoch of the global batch's first position."""
    images: Tensor
    """``(B, 3, H, W)`` uint8."""
    texts: Tensor
    """``(B, T)`` int64, as the tokenize function gave it."""
    sample_ids: Tensor
    """``(B,)`` int64, number of the sample over all sources; of the substitute where one stands in."""
    labels: Tensor
    """``(B,)`` int64, class number, -1 without one."""
    bad: tuple[BadSample, ...] = ()
    """Samples that were replaced."""

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch with all tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by torch's DataLoader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of at most `size` samples, in order; one empty one if the batch is empty."""
        parts = []
        for start in range(0, max(len(self), 1), size):
            rows = slice(start, start + size)
            part = self._map(operator.itemgetter(rows))
            parts.append(part if start == 0 else dataclasses.replace(part, bad=()))
        return parts

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return dataclasses.replace(
            self,
            images=function(self.images),
            texts=function(self.texts),
            sample_ids=function(self.sample_ids),
            labels=function(self.labels),
        )


@dataclass(frozen=True)
class EvalBatch:
    """Samples of an evaluation set, in the order of the shards."""

    images: Tensor
    """``(B, 3, H, W)`` uint8."""
    labels: Tensor
    """``(B,)`` int64, class number, -1 without one."""
    sample_ids: Tensor
    """``(B,)`` int64, number of the sample in its source."""
    captions: tuple[tuple[str, ...], ...]
    """B times all captions of a sample."""
    bad: tuple[BadSample, ...] = ()
    """Samples that were left out."""

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> EvalBatch:
        """The batch in page-locked memory; called by torch's DataLoader."""
        return dataclasses.replace(
            self,
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            sample_ids=self.sample_ids.pin_memory(),
        )
