"""What the loader hands to the training step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["BadSample", "Batch", "EvalBatch"]


class BadSample(NamedTuple):
    """A sample that could not be used."""

    sample_id: int
    """Its number over all sources."""
    reason: str
    """What is wrong; names shard and sample."""
    kind: str
    """The same in a word or two."""
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
    places: Tensor
    """``(B,)`` int64, where each sample stands in the global batch, 0 to G - 1."""
    global_size: int
    """G, the samples of the global batch."""
    bad: tuple[BadSample, ...] = ()
    """Samples that were replaced."""
    lengths: tuple[int, ...] = ()
    """Tokens of each caption before it was cut."""

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by torch's DataLoader."""
        return dataclasses.replace(
            self,
            images=self.images.pin_memory(),
            texts=self.texts.pin_memory(),
            sample_ids=self.sample_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            places=self.places.pin_memory(),
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
