"""Read samples in order, and collect the bad ones: for evaluation, packing, tokens, stored features and checks.

for some in slices_of(ids of the source or of a shard):      # in workers, by `vqclip.data.workers.ordered_map`
    for id in some:
        value = read(id), or a `BadSample`; storage that cannot be read is an error

Nothing is replaced, unlike in training (`vqclip.data.samples`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vqclip.data.batch import BadSample, EvalBatch, allowed_bad, require_few_bad
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.samples import read_decoded
from vqclip.data.sources.base import RawSample, Source
from vqclip.data.workers import ordered_map
from vqclip.errors import DataError, StorageError

logger = logging.getLogger("vqclip.data")

T = TypeVar("T")

_OPTION = "max_bad_fraction of an evaluation (--bad-fraction of a command)"


@dataclass(frozen=True)
class SamplesRead(Generic[T]):
    """Samples that were read together."""

    ids: Sequence[int]
    """All of them, in order."""
    found: dict[int, T]
    """Id → value of each usable one, in order."""
    bad: tuple[BadSample, ...]
    """The unusable ones, in order."""


def slices_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive parts of some items, each of so many; the last one may be smaller."""
    return (items[first : first + size] for first in range(0, len(items), size))


def read_in_order(read: Callable[[int], T], ids: Sequence[int]) -> SamplesRead[T]:
    """Read samples one after the other; a bad one is noted, and ends nothing.

    Args:
        read: returns what is wanted of a sample, or raises `DataError`, whose message names it.
        ids: numbers of the samples.

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
    return SamplesRead(ids, found, tuple(bad))


def read_captions(source: Source, max_bad_fraction: float = 0.0) -> dict[int, tuple[str, ...]]:
    """Return number → all captions of the samples of a source; bad ones are left out and logged.

    Raises:
        DataError: more are bad than `allowed_bad`; the message names some.
        StorageError: see `read_in_order`.
    """
    read = read_in_order(lambda index: source.read(index).captions, range(len(source)))
    allowed = allowed_bad(max_bad_fraction, len(source))
    require_few_bad((sample.reason for sample in read.bad), len(read.bad), allowed, _OPTION)
    _log_bad(read.bad)
    return read.found


def _log_bad(bad: Sequence[BadSample]) -> None:
    for sample in bad:
        logger.warning("sample %d left out: %s", sample.sample_id, sample.reason)


class EvalSet:
    """Deterministic batches of a source, or of one rank's share of it, for evaluation. Calls no collective.

    Each sample comes once, in the order of the shards.

    Args:
        source: where samples come from.
        transform: ``(3, H, W)`` uint8 → ``(3, S, S)`` uint8, such as `EvalTransform` or ``tokenizer.transform``.
        batch_size: samples a batch; the last one may be smaller.
        rank: reads samples ``rank::world_size``. Rank and world size do not come from `vqclip.dist`, so that one rank
            can evaluate all samples alone.
        world_size: W.
        workers: processes that decode; 0 decodes in this one.
        limit: number of samples to use, evenly spread over the source; None uses all.
        max_bad_fraction: bad samples are left out and logged; more than `allowed_bad` are an error. The default
            tolerates none, since skipping samples changes what is measured. A rank knows only its own bad samples: the
            caller compares the sum over all ranks with `allowed`.
        timeout_s: longest wait for a worker; 0 waits forever.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[Tensor], Tensor],
        batch_size: int = 256,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        limit: int | None = None,
        max_bad_fraction: float = 0.0,
        timeout_s: float = 240.0,
    ):
        self.source = source
        self.size = len(source) if limit is None else min(limit, len(source))
        """Samples over all ranks."""
        self.allowed = allowed_bad(max_bad_fraction, self.size)
        """Largest number of bad samples over all ranks."""
        self._transform = transform
        self._batch_size = batch_size
        self._mine = range(rank, self.size, world_size)
        self._workers = workers
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return len(self._mine)

    def __iter__(self) -> Iterator[EvalBatch]:
        """Yield all batches; a batch of only bad samples is empty.

        Raises:
            DataError: this rank has more bad samples than allowed over all ranks; the message names shard and sample.
        """
        bad: list[BadSample] = []
        places = slices_of(self._mine, self._batch_size)
        for batch in ordered_map(self._make, places, self._workers, timeout_s=self._timeout_s, section="evaluation"):
            bad += batch.bad
            self.require_few_bad([sample.reason for sample in bad])
            _log_bad(batch.bad)
            yield batch

    def require_few_bad(self, reasons: Sequence[str]) -> None:
        """Raise DataError if more samples are bad, for these reasons, than are allowed over all ranks."""
        require_few_bad(reasons, len(reasons), self.allowed, _OPTION)

    def _make(self, places: Sequence[int]) -> EvalBatch:
        read = read_in_order(self._read, [place * len(self.source) // self.size for place in places])
        images = [image for image, _ in read.found.values()]
        samples = [sample for _, sample in read.found.values()]
        return EvalBatch(
            images=torch.stack(images) if images else torch.empty(0, 3, 0, 0, dtype=torch.uint8),
            labels=torch.tensor([sample.label for sample in samples], dtype=torch.int64),
            sample_ids=torch.tensor(list(read.found), dtype=torch.int64),
            captions=tuple(sample.captions for sample in samples),
            bad=read.bad,
        )

    def _read(self, index: int) -> tuple[Tensor, RawSample]:
        sample, image = read_decoded(self.source, index, MAX_PIXELS)
        return self._transform(image), sample
