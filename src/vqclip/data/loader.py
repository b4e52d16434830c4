"""Training data: global batches that depend only on (configuration, data, seed, step).

for step in range(start, stop):                        # in the workers, ahead of time; each fills a slice of the rows
    slots, places = order.deal(step, G, rank, nodes)   # (source, sample, epoch) of this rank's samples; 0 ... G - 1
    samples = make each slot, or a substitute for a bad sample
    yield Batch(stacked images, tokenized captions, sample ids, places)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vqclip import dist
from vqclip.data.batch import BadSample, Batch
from vqclip.data.batch_maker import BatchMaker, LoaderOptions, Tokenize, make_batches
from vqclip.data.features import FeatureReader
from vqclip.data.order import FullOrder, GlobalOrder, WindowedOrder
from vqclip.data.samples import SampleMaker
from vqclip.data.tars.ahead import ChunkSupply, find_needs
from vqclip.errors import DataError
from vqclip.seeds import derive_seed

__all__ = ["Coverage", "TrainData"]

logger = logging.getLogger("vqclip.data")

_MIN_SEEN = 1000
"""Smallest number of samples that the fraction of bad ones refers to."""


@dataclass(frozen=True)
class Coverage:
    """Part of the data that the model has seen after a number of steps."""

    shown: int
    """Samples shown, including repetitions."""
    distinct: int
    """Different samples shown; exact for one source or at the end of an epoch (of whole slots), else as expected."""
    available: int
    """Different samples in the data."""
    epochs: float
    """Number of epochs."""

    def __str__(self) -> str:
        return (
            f"{self.shown:,} samples shown in {self.epochs:.2f} epochs: "
            f"{self.distinct:,} of {self.available:,} at least once ({self.distinct / self.available:.1%})"
        )


class TrainData:
    """The training data of a run.

    The whole state is the number of the next step: for any world size and number of workers, `batches(start)` yields
    the global batches that an uninterrupted run would see from there on.

    Args:
        samples: makes the samples of all sources.
        weights: how often a sample of each source appears in an epoch.
        tokenize: captions → ``(B, T)`` int64 and their lengths.
        batch_size: G, samples of a global batch over all ranks.
        seed: the run's seed.
        options: how batches are prepared.
        order: `FullOrder` or `WindowedOrder`.
        nodes: node of every rank of the job (`vqclip.dist.nodes`); with the windowed order, those of one node read the
            chunks that it owns.
    """

    def __init__(
        self,
        samples: SampleMaker,
        weights: Sequence[float],
        tokenize: Tokenize,
        batch_size: int,
        seed: int,
        *,
        options: LoaderOptions,
        order: FullOrder | WindowedOrder,
        nodes: Sequence[int] = (0,),
    ):
        sizes = [len(source) for source in samples.sources]
        self.samples = samples
        """Maker of the samples."""
        self.order: GlobalOrder = order.build(sizes, weights, derive_seed(seed, "data", "order"))
        self.batch_size = batch_size
        self.nodes = tuple(nodes)
        """Node of every rank of the job."""
        self.options = options
        self.seen = 0
        """Samples that this rank has read."""
        self.replaced = 0
        """Bad ones among them."""
        self.last_replaced: deque[BadSample] = deque(maxlen=100)
        """The last of them, in the order of the batches."""
        self._unreported: list[tuple[int, BadSample]] = []
        self._lengths: Counter[int] = Counter()
        self._weights = tuple(weights)
        self._tokenize = tokenize

    def __len__(self) -> int:
        """Return the number of different samples."""
        return int(self.samples.first_ids[-1])

    def use_features(self, readers: Mapping[str, FeatureReader]) -> None:
        """Add stored features to the batches from the next call of `batches` on; those of ``image`` replace images."""
        self.samples.features = readers

    @property
    def epoch_size(self) -> int:
        """Samples of one epoch, see `GlobalOrder`; differs from the number of samples if weights differ from 1."""
        return self.order.epoch_size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able description of the data. Equal fingerprints, seeds and batch sizes mean equal global batches."""
        sources = [
            {**source.fingerprint, "weight": weight} | ({} if slots.denominator == 1 else {"slots": str(slots)})
            for source, weight, slots in zip(self.samples.sources, self._weights, self.order.slots, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        return {"sources": sources, "sha256": digest}

    def coverage(self, steps: int) -> Coverage:
        """Return how much of the data the first `steps` steps of the run show."""
        shown = steps * self.batch_size
        epochs = shown / sum(self.order.slots)
        sizes_and_slots = zip(self.order.sizes, self.order.slots, strict=True)
        distinct = sum(min(size, round(epochs * slots)) for size, slots in sizes_and_slots)
        return Coverage(shown, distinct, len(self), float(epochs))

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool = False,
        judge: bool = True,
        nodes: Sequence[int] | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield this rank's share of the global batches `start`, `start + 1`, ...

        Args:
            start: first step; after a resume the number of finished steps.
            stop: step to stop before; None never stops.
            rank: default this process's.
            world_size: default the job's.
            pin_memory: batches in page-locked memory, for copying to a GPU in the background.
            judge: raise at once if this rank `has_too_many_bad`; if False, the caller checks it together with the other
                ranks.
            nodes: node of every rank; default those of the job, or one node for another `world_size`.

        Raises:
            DataError: more than `max_bad_fraction` of the samples are bad, or a worker died.
        """
        world_size = dist.world_size() if world_size is None else world_size
        if nodes is None:
            nodes = self.nodes if len(self.nodes) == world_size else (0,) * world_size
        rank = dist.rank() if rank is None else rank
        options, steps = self.options, range(start, sys.maxsize if stop is None else stop)
        needs = find_needs(self.samples.sources, self.order, self.batch_size, rank, nodes)
        lead = options.prefetch * options.workers + 1
        supply = None if needs is None else ChunkSupply(needs, steps, options.workers, lead)
        maker = BatchMaker(self.samples, self.order, self._tokenize, self.batch_size, rank, nodes, supply)
        batches = make_batches(maker, steps, options, pin_memory)
        with contextlib.closing(supply) if supply else contextlib.nullcontext(), contextlib.closing(batches):
            for batch in batches:
                self._count(batch)
                if judge:
                    self.require_few_bad(self.replaced, self.seen)
                yield batch

    def _count(self, batch: Batch) -> None:
        """Log bad samples and update the counters."""
        for bad in batch.bad:
            logger.warning(
                "step %d: sample %d replaced by %d: %s", batch.step, bad.sample_id, bad.substitute_id, bad.reason
            )
        self.seen += len(batch)
        self.replaced += len(batch.bad)
        self.last_replaced.extend(batch.bad)
        self._unreported += [(batch.step, bad) for bad in batch.bad]
        self._lengths.update(batch.lengths)

    def take_replaced(self) -> list[tuple[int, BadSample]]:
        """Return ``(step, bad sample)`` for each sample replaced on this rank since the last call."""
        found, self._unreported = self._unreported, []
        return found

    def take_lengths(self) -> Counter[int]:
        """Return caption length in tokens → number of this rank's captions, since the last call."""
        found, self._lengths = self._lengths, Counter()
        return found

    @property
    def has_too_many_bad(self) -> bool:
        """True if `require_few_bad` would raise for this rank's samples."""
        return self._too_many(self.replaced, self.seen)

    def _too_many(self, replaced: int, seen: int) -> bool:
        return replaced > self.options.max_bad_fraction * max(seen, _MIN_SEEN)

    def require_few_bad(self, replaced: int, seen: int, last: Sequence[str] | None = None, where: str = "") -> None:
        """Raise if more than `max_bad_fraction` of the samples, or of a thousand if they are fewer, were bad.

        Args:
            replaced: bad samples of this process or of the whole run.
            seen: all samples of the same.
            last: problems of the last bad samples of the run; default those of this process.
            where: place of the samples, for the message, such as " on rank 1".

        Raises:
            DataError: too many are bad; the message names the last ones.
        """
        if self._too_many(replaced, seen):
            whose = "in this process" if last is None else "in the run"
            last = [bad.reason for bad in list(self.last_replaced)[-5:]] if last is None else last
            shown = "\n".join(f"  {reason}" for reason in last)
            raise DataError(
                f"{replaced} bad samples among {seen}{where}: more than data.max_bad_fraction="
                f"{self.options.max_bad_fraction:g} allows. The last of them {whose}:\n{shown or '  none'}"
            )
