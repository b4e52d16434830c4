"""Training data: global batches that are functions of (configuration, data, seed, step) alone."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vqclip import dist
from vqclip.data.batch import BadSample, Batch
from vqclip.data.order import GlobalOrder
from vqclip.data.samples import SampleMaker
from vqclip.data.sources import Source
from vqclip.data.transforms import TrainTransform
from vqclip.data.workers import ordered_map
from vqclip.errors import DataError
from vqclip.seeds import derive_seed

__all__ = ["BatchMaker", "Coverage", "LoaderOptions", "TrainData"]

logger = logging.getLogger("vqclip.data")

Tokenize = Callable[[list[str]], tuple[Tensor, Sequence[int]]]
"""Captions to ``(B, T)`` int64, 0-padded, and the length of each before it was cut; for any B >= 1."""

_FEW = 1000
"""Bad samples are judged as a share of at least so many."""


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are prepared; none of these changes what is in them. See `vqclip.data.DataConfig`."""

    workers: int = 0
    prefetch: int = 2
    timeout_s: float = 0
    max_bad_fraction: float = 0.01


@dataclass(frozen=True)
class Coverage:
    """How much of the data a number of steps has shown."""

    shown: int
    """Samples shown, repetitions counted."""
    distinct: int
    """Different samples shown; exact for one source, or at the end of an epoch, else expected."""
    available: int
    """Samples there are."""
    epochs: float
    """Epochs gone through."""

    def __str__(self) -> str:
        return (
            f"{self.shown:,} samples shown in {self.epochs:.2f} epochs: "
            f"{self.distinct:,} of {self.available:,} at least once ({self.distinct / self.available:.1%})"
        )


class BatchMaker:
    """A rank's share of any global batch. Holds all that a worker needs.

    Args:
        samples: makes samples.
        order: which sample stands where.
        tokenize: captions → ``(B, T)`` int64 and their lengths, for any B >= 1.
        image_size: side of the images in pixels.
        batch_size: G.
        rank: this rank.
        world_size: W.
    """

    def __init__(
        self,
        samples: SampleMaker,
        order: GlobalOrder,
        tokenize: Tokenize,
        image_size: int,
        batch_size: int,
        rank: int,
        world_size: int,
    ):
        self._samples = samples
        self._order = order
        self._tokenize = tokenize
        self._image_size = image_size
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size

    def __call__(self, step: int) -> Batch:
        """This rank's share of global batch `step`."""
        slots = self._order.batch(step, self._batch_size, self._rank, self._world_size)
        count = len(slots.sample)
        images = torch.empty(count, 3, self._image_size, self._image_size, dtype=torch.uint8)
        captions, ids, labels, bad = [], [], [], []
        for row, (source, index, epoch) in enumerate(zip(*(part.tolist() for part in slots), strict=True)):
            sample, replaced = self._samples.make(source, index, epoch)
            images[row] = sample.image
            captions.append(sample.caption)
            ids.append(sample.sample_id)
            labels.append(sample.label)
            bad += replaced
        texts, lengths = self._tokenize(captions or [""])
        return Batch(
            step=step,
            epoch=step * self._batch_size // self._order.epoch_size,
            images=images,
            texts=texts[:count],
            sample_ids=torch.tensor(ids, dtype=torch.int64),
            labels=torch.tensor(labels, dtype=torch.int64),
            places=torch.arange(self._batch_size)[self._rank :: self._world_size],
            global_size=self._batch_size,
            bad=tuple(bad),
            lengths=tuple(lengths[:count]),
        )


class TrainData:
    """The training data of a run.

    The whole state is the number of the next step: `batches(start)` gives, on any world size and any number of
    workers, the global batches that an uninterrupted run would see from there on.

    Args:
        sources: where samples come from.
        weights: how often a sample of each source appears in an epoch.
        transform: random augmentation.
        tokenize: captions → ``(B, T)`` int64 and their lengths.
        batch_size: G, samples of a global batch over all ranks.
        seed: the run's seed.
        max_pixels: larger images are bad samples.
        options: how batches are prepared.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        transform: TrainTransform,
        tokenize: Tokenize,
        batch_size: int,
        seed: int,
        max_pixels: int,
        options: LoaderOptions,
    ):
        self.order = GlobalOrder([len(source) for source in sources], weights, derive_seed(seed, "data", "order"))
        self.batch_size = batch_size
        self.options = options
        self.seen = 0
        """Samples that this rank has met."""
        self.replaced = 0
        """Bad ones among them."""
        self.last_replaced: deque[BadSample] = deque(maxlen=100)
        """The last of them, in the order of the batches."""
        self._untold: list[tuple[int, BadSample]] = []
        self._lengths: Counter[int] = Counter()
        self._weights = tuple(weights)
        self._tokenize = tokenize
        self._image_size = transform.image_size
        self._samples = SampleMaker(sources, transform, seed, max_pixels)

    def __len__(self) -> int:
        """Number of different samples."""
        return int(self._samples.first_ids[-1])

    @property
    def epoch_size(self) -> int:
        """Samples of one epoch; differs from the number of samples where weights differ from 1."""
        return self.order.epoch_size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the data are, JSON-able. Equal fingerprints, seeds and batch sizes mean equal global batches."""
        sources = [
            {**source.fingerprint, "weight": weight}
            for source, weight in zip(self._samples.sources, self._weights, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        return {"sources": sources, "sha256": digest}

    def coverage(self, steps: int) -> Coverage:
        """How much of the data the first `steps` steps of the run show."""
        shown = steps * self.batch_size
        epochs = shown / self.epoch_size
        sizes_and_slots = zip(self.order.sizes, self.order.slots, strict=True)
        distinct = sum(min(size, round(epochs * slots)) for size, slots in sizes_and_slots)
        return Coverage(shown, distinct, len(self), epochs)

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool = False,
        judge: bool = True,
    ) -> Iterator[Batch]:
        """Yields this rank's share of the global batches `start`, `start + 1`, ...

        Args:
            start: first step; after a resume the number of steps done.
            stop: first step that is not wanted; None goes on for ever.
            rank: default this process's.
            world_size: default that of the job.
            pin_memory: batches in page-locked memory, for copying to a GPU in the background.
            judge: raise at once where this rank has `has_too_many_bad`; false: the caller asks, as others may have to
                be told.

        Raises:
            DataError: more than `max_bad_fraction` of the samples are bad, or a worker died. The message names them.
        """
        make = BatchMaker(
            self._samples,
            self.order,
            self._tokenize,
            self._image_size,
            self.batch_size,
            dist.rank() if rank is None else rank,
            dist.world_size() if world_size is None else world_size,
        )
        options = self.options
        steps = range(start, sys.maxsize if stop is None else stop)
        for batch in ordered_map(make, steps, options.workers, options.prefetch, pin_memory, options.timeout_s):
            self._note(batch)
            if judge:
                self.require_few_bad(self.replaced, self.seen)
            yield batch

    def _note(self, batch: Batch) -> None:
        """Names bad samples in the log, and counts."""
        for bad in batch.bad:
            logger.warning(
                "step %d: sample %d replaced by %d: %s", batch.step, bad.sample_id, bad.substitute_id, bad.reason
            )
        self.seen += len(batch)
        self.replaced += len(batch.bad)
        self.last_replaced.extend(batch.bad)
        self._untold += [(batch.step, bad) for bad in batch.bad]
        self._lengths.update(batch.lengths)

    def take_replaced(self) -> list[tuple[int, BadSample]]:
        """Step and sample of what this rank has replaced since it was last asked."""
        found, self._untold = self._untold, []
        return found

    def take_lengths(self) -> Counter[int]:
        """Lengths in tokens of the captions that this rank has met since it was last asked → their number."""
        found, self._lengths = self._lengths, Counter()
        return found

    @property
    def has_too_many_bad(self) -> bool:
        """Whether `require_few_bad` would raise for what this rank has met."""
        return self._too_many(self.replaced, self.seen)

    def _too_many(self, replaced: int, seen: int) -> bool:
        return replaced > self.options.max_bad_fraction * max(seen, _FEW)

    def require_few_bad(self, replaced: int, seen: int, last: Sequence[str] | None = None, where: str = "") -> None:
        """Stops when more than `max_bad_fraction` of the samples, or of a thousand if they are fewer, were bad.

        Args:
            replaced: bad samples, met by this process or by the whole run.
            seen: samples among which they were.
            last: what was wrong with the last ones of the run; default those that this process met.
            where: they were met, such as " on rank 1".

        Raises:
            DataError: there are too many; the message names the last ones.
        """
        if self._too_many(replaced, seen):
            whose = "in this process" if last is None else "in the run"
            last = [bad.reason for bad in list(self.last_replaced)[-5:]] if last is None else last
            shown = "\n".join(f"  {reason}" for reason in last)
            raise DataError(
                f"{replaced} bad samples among {seen}{where}: more than data.max_bad_fraction="
                f"{self.options.max_bad_fraction:g} allows. The last of them {whose}:\n{shown or '  none'}"
            )
