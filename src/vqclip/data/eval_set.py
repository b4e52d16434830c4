"""Samples for evaluation: each exactly once, in the order of the shards, never replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vqclip.data.batch import BadSample, EvalBatch
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.in_order import read_in_order
from vqclip.data.samples import read_decoded
from vqclip.data.sources.base import RawSample, Source
from vqclip.data.workers import ordered_map
from vqclip.errors import DataError

__all__ = ["EvalSet"]

logger = logging.getLogger("vqclip.data")


class EvalSet:
    """Deterministic batches of a source, or of one rank's share of it. Calls no collective.

    Args:
        source: where samples come from.
        transform: ``(3, H, W)`` uint8 → ``(3, S, S)`` uint8, such as `EvalTransform` or ``tokenizer.transform``.
        batch_size: samples a batch; the last one may be smaller.
        rank: reads samples ``rank::world_size``. Rank and world size do not come from `vqclip.dist`, so that one rank
            can evaluate all samples alone.
        world_size: W.
        workers: processes that decode; 0 decodes in this one.
        limit: number of samples to use, evenly spread over the source; None uses all.
        max_bad_fraction: bad samples are skipped and logged; a larger fraction of all samples is an error. The default
            tolerates none, since skipping samples changes what is measured. A rank knows only its own bad samples: the
            caller compares the sum over all ranks with `allowed`.
        max_pixels: larger images are bad samples.
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
        max_pixels: int = MAX_PIXELS,
        timeout_s: float = 240.0,
    ):
        self.source = source
        self.size = len(source) if limit is None else min(limit, len(source))
        """Samples over all ranks."""
        self.allowed = int(max_bad_fraction * self.size)
        """Largest number of bad samples over all ranks."""
        self._transform = transform
        self._batch_size = batch_size
        self._mine = range(rank, self.size, world_size)
        self._workers = workers
        self._max_pixels = max_pixels
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
        numbers = range(-(-len(self) // self._batch_size))
        for batch in ordered_map(self._make, numbers, self._workers, timeout_s=self._timeout_s, section="evaluation"):
            bad += batch.bad
            if len(bad) > self.allowed:
                shown = "\n".join(f"  {sample.reason}" for sample in bad[-5:])
                raise DataError(f"{len(bad)} of {self.size} evaluation samples cannot be used:\n{shown}")
            for sample in batch.bad:
                logger.warning("evaluation: sample %d skipped: %s", sample.sample_id, sample.reason)
            yield batch

    def _make(self, number: int) -> EvalBatch:
        places = self._mine[number * self._batch_size : (number + 1) * self._batch_size]
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
        sample, image = read_decoded(self.source, index, self._max_pixels)
        return self._transform(image), sample
