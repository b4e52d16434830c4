"""Read samples in order, and collect the bad ones: for evaluation, packing, tokens, stored features and checks.

for ids in slices of the source or of its shards:      # in workers, by `vqclip.data.workers.ordered_map`
    for id in ids:
        value = read(id), or a `BadSample`; storage that cannot be read is an error

Nothing is replaced, unlike in training (`vqclip.data.samples`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vqclip.data.batch import BadSample
from vqclip.data.lookup import locate
from vqclip.errors import DataError, StorageError

__all__ = ["InOrderReader", "SamplesRead", "ShardSlices", "read_in_order", "require_few_bad"]

T = TypeVar("T")


@dataclass(frozen=True)
class SamplesRead(Generic[T]):
    """Samples that were read together."""

    ids: Sequence[int]
    """All of them, in order."""
    found: dict[int, T]
    """Id → value of each usable one, in order."""
    bad: tuple[BadSample, ...]
    """The unusable ones, in order."""
    shard: int = 0
    """Number of the shard that they belong to."""


def read_in_order(read: Callable[[int], T], ids: Sequence[int], shard: int = 0) -> SamplesRead[T]:
    """Read samples one after the other; a bad one is noted, and ends nothing.

    Args:
        read: returns what is wanted of a sample, or raises `DataError`, whose message names it.
        ids: numbers of the samples.
        shard: number of the shard that they belong to.

    Raises:
        StorageError: storage cannot be read, or has changed. No sample is to blame, and the next run may succeed.
    """
    found: dict[int, T] = {}
    bad: list[BadSample] = []
    for sample_id in ids:
        try:
            found[sample_id] = read(sample_id)
        except StorageError:
            raise
        except DataError as error:
            bad.append(BadSample(sample_id, str(error), error.kind, -1))
    return SamplesRead(ids, found, tuple(bad), shard)


class ShardSlices:
    """Batches of consecutive samples, each of one shard.

    Args:
        sizes: number of samples of every shard.
        shards: numbers of the shards wanted.
        batch_size: samples in a batch; the last batch of a shard may be smaller.
    """

    def __init__(self, sizes: Sequence[int], shards: Sequence[int], batch_size: int):
        self._starts = np.cumsum([0, *sizes])
        self._shards, self._batch_size = tuple(shards), batch_size
        # An empty shard is one batch without samples, so that it is written like the others.
        counts = (max(1, -(-sizes[shard] // batch_size)) for shard in shards)
        self._batches = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of batches in all shards."""
        return int(self._batches[-1])

    def __getitem__(self, number: int) -> tuple[int, range]:
        """Return the shard of batch `number`, counted over the shards, and the indices of its samples."""
        place, batch = locate(self._batches, number)
        shard = self._shards[place]
        first = int(self._starts[shard]) + batch * self._batch_size
        return shard, range(first, min(first + self._batch_size, int(self._starts[shard + 1])))


class InOrderReader(Generic[T]):
    """Batches of the samples of some shards, by number; the function of `ordered_map`, copied to the workers.

    Args:
        read: see `read_in_order`.
        slices: the batches.
    """

    def __init__(self, read: Callable[[int], T], slices: ShardSlices):
        self._read, self._slices = read, slices

    def __len__(self) -> int:
        """Return the number of batches in all shards."""
        return len(self._slices)

    def __call__(self, number: int) -> SamplesRead[T]:
        """Return batch `number`; see `read_in_order`."""
        shard, ids = self._slices[number]
        return read_in_order(self._read, ids, shard)


def require_few_bad(reasons: Iterable[str], count: int, allowed: int, option: str) -> None:
    """Check the number of samples left out; raise DataError if it is larger than allowed."""
    if count > allowed:
        shown = "\n".join(f"  {reason}" for reason in itertools.islice(reasons, 5))
        raise DataError(
            f"{count} samples cannot be used; {option} allows {allowed} of these data. Repair them, or raise it and "
            f"run the command again. Some of them:\n{shown}"
        )
