"""Batches for the training step and for evaluation, and the samples that could not be used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from vqclip.errors import DataError


def share_sizes(batch_size: int, world_size: int) -> tuple[int, ...]:
    """Return the number of samples of every rank in a global batch, whatever the nodes and the order are."""
    return tuple(batch_size // world_size + (rank < batch_size % world_size) for rank in range(world_size))


class BadSample(NamedTuple):
    """A sample that could not be used."""

    sample_id: int
    """Number of the sample over all sources."""
    reason: str
    """Description of the problem, with shard and sample."""
    kind: str
    """Kind of the problem in a word or two."""
    substitute_id: int
    """Sample that replaces it; -1 without one (evaluation)."""


SMALL = 1000
"""Data of fewer samples may have as many bad ones as data of so many."""


def allowed_bad(fraction: float, size: int) -> int:
    """Return the largest number of bad samples in data of ``size``, of which ``fraction`` may be bad.

    In small data a few damaged files are a larger share: `SMALL` counts instead, but a tenth of the data at most, or
    one of fewer than ten; never all.
    """
    return max(int(fraction * size), min(int(fraction * SMALL), max(size // 10, 1), size - 1))


def require_few_bad(reasons: Iterable[str], count: int, allowed: int, option: str) -> None:
    """Check the number of samples left out; raise DataError if it is larger than allowed."""
    if count > allowed:
        shown = "\n".join(f"  {reason}" for reason in itertools.islice(reasons, 5))
        raise DataError(
            f"{count} samples cannot be used; {option} allows {allowed} of these data. Repair or remove them, or raise "
            f"it, and run the command again. Some of them:\n{shown}"
        )


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch; B may differ by one between ranks, and may be 0."""

    step: int
    """t, the number of the global batch."""
    epoch: int
    """Epoch of the global batch's first position."""
    images: Tensor
    """``(B, 3, H, W)`` uint8; ``(B, 3, 0, 0)`` if `features` of ``image`` replace them."""
    texts: Tensor
    """``(B, T)`` int64, from the tokenize function."""
    sample_ids: Tensor
    """``(B,)`` int64, number of each sample over all sources; of the substitute for a replaced sample."""
    labels: Tensor
    """``(B,)`` int64, class number, -1 without one."""
    places: Tensor
    """``(B,)`` int64, position of each sample in the global batch, 0 to G - 1."""
    global_size: int
    """G, the samples of the global batch."""
    sizes: tuple[int, ...] | None = None
    """B of every rank, in rank order; None: not known, and exchanges ask for them."""
    bad: tuple[BadSample, ...] = ()
    """Samples that were replaced."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each caption before it was cut."""
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → ``(B, N, D)`` from the feature cache, in its dtype: ``image`` and ``text`` of frozen towers, and what
    teachers compute."""
    captions: tuple[str, ...] = ()
    """B captions, for models with another vocabulary."""

    def __len__(self) -> int:
        return len(self.images)


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
    """All captions of each of the B samples."""
    bad: tuple[BadSample, ...] = ()
    """Samples that were skipped."""

    def __len__(self) -> int:
        return len(self.images)
