"""The `data` section, and the training data: global batches that depend only on (configuration, data, seed, step).

open_sources                                          # once; a collective
for step in range(start, stop):                        # in the workers, ahead of time; each fills a slice of the rows
    slots, places = order.deal(step, rank, nodes)      # (source, sample, epoch) of this rank's samples; 0 ... G - 1
    samples = make each slot, or a substitute for a bad sample
    yield Batch(stacked images, tokenized captions, sample ids, places)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import sys
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from vqclip import dist
from vqclip.config import FREE
from vqclip.data.batch import SMALL, BadSample, Batch, allowed_bad
from vqclip.data.batch_maker import BatchMaker, LoaderOptions, Tokenize, make_batches
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.features import FeatureCacheConfig, FeatureFolder
from vqclip.data.held_out import HeldOutShare, PartOfSource
from vqclip.data.order import FullOrder, OrderConfig, WindowedOrder
from vqclip.data.prepare import open_sources
from vqclip.data.samples import SampleMaker
from vqclip.data.sources.base import Source, SourceConfigBase
from vqclip.data.sources.kinds import SourceConfig
from vqclip.data.tars.ahead import ChunkSupply
from vqclip.data.transforms import Size, TrainTransformConfig
from vqclip.errors import ConfigError, DataError
from vqclip.seeds import derive_seed

logger = logging.getLogger("vqclip.data")

_MOST_NAMED = 100
"""Bad samples that a process names in its log."""


def _use_train_split(source: SourceConfigBase) -> SourceConfigBase:
    return source.model_copy(update={"split": "train"}) if getattr(source, "split", "") is None else source


def _to_list(given: object) -> object:
    return [given] if isinstance(given, (str, Path, Mapping)) else given


class DataConfig(LoaderOptions):
    """Training data and how to read them."""

    sources: Annotated[
        tuple[Annotated[SourceConfig, AfterValidator(_use_train_split)], ...],
        BeforeValidator(_to_list),
        Field(min_length=1),
        FREE,  # `TrainData.fingerprint` says what is in them
    ]
    """Sources of samples, or their paths; several are mixed by their weights."""
    held_out: Annotated[HeldOutShare | None, FREE] = None
    """Share of the samples of each source that training leaves out, by a hash of their names; tasks of `evaluation`
    with the same `held_out` read these. null: none."""
    order: OrderConfig = FullOrder()
    """Order of the samples, `full` or `windowed`."""
    transform: TrainTransformConfig = TrainTransformConfig()
    """Random augmentation of training images."""
    views: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Number of different views of each image that the augmentation draws; each comes in every `views`-th epoch. null:
    a new view in every epoch."""
    feature_cache: Annotated[FeatureCacheConfig | None, FREE] = None
    """Features of frozen towers, stored before the first step; null: towers run in every step."""
    max_pixels: Annotated[int, Field(ge=1)] = MAX_PIXELS
    """Images with more pixels are bad samples; they are not decoded."""

    def open(self) -> list[Source]:
        """Open the sources without the samples that are held out. A collective; see `open_sources`.

        Raises:
            DataError: a source cannot be used.
            ConfigError: `held_out` is set for a windowed order.
        """
        if self.held_out is not None and isinstance(self.order, WindowedOrder):  # its chunks are those of the shards
            raise ConfigError(
                f"data.held_out: got {self.held_out:g} with data.order.kind windowed; expected null, or the order full"
            )
        sources: list[SourceConfigBase] = [*self.sources]
        if isinstance(self.order, WindowedOrder):  # the chunks of an index divide those of the order
            sources = [source.in_chunks(self.order.chunk) for source in self.sources]
        opened = open_sources(sources, [f"data.sources[{number}]" for number in range(len(sources))])
        if self.held_out is None:
            return opened
        with dist.raise_on_all_ranks():
            return [PartOfSource(source, self.held_out, held_out=False) for source in opened]

    def samples_of_an_epoch(self) -> int:
        """Return the number of samples of an epoch, from the sources' sizes and weights. A collective, as `open`."""
        weights = [Fraction(1 if source.weight is None else str(source.weight)) for source in self.sources]
        return max(1, round(sum(len(source) * weight for source, weight in zip(self.open(), weights, strict=True))))

    def build(self, size: Size, tokenize: Tokenize, batch_size: int, seed: int) -> TrainData:
        """Open the data, after drawing and indexing missing ones. A collective: every rank must call it.

        Args:
            size: of the images.
            tokenize: captions → ``(B, T)`` int64, padded with 0, and their lengths before the cut; runs in the workers.
            batch_size: G, samples of a global batch over all ranks.
            seed: the run's seed.

        Raises:
            DataError: on every rank, if a source cannot be used on one of them; the message says what to do.
            ConfigError: an epoch has fewer samples than a global batch; see also `open`.
        """
        opened = self.open()
        samples = SampleMaker(opened, self.transform.build(size), seed, self.max_pixels, self.views)
        data = TrainData(self, samples, tokenize, batch_size, seed)
        with dist.raise_on_all_ranks():
            supply = ChunkSupply.find(opened, data.order, dist.rank(), data.nodes)
        if supply is not None and dist.is_main():  # chunks at URLs, which a cache of this node holds
            supply.warn()
        if batch_size > data.epoch_size:  # a sample would be its own negative
            raise ConfigError(
                f"train.batch_size: got {batch_size}, more than the {data.epoch_size} samples of an epoch of "
                f"data.sources; expected at most {data.epoch_size}"
            )
        return data


class TrainData:
    """The training data of a run.

    The whole state is the number of the next step: for any world size and number of workers, `batches(start)` yields
    the global batches that an uninterrupted run would see from there on.

    Args:
        config: weights of the sources, the order, and how batches are prepared.
        samples: makes the samples of all sources.
        tokenize: captions → ``(B, T)`` int64 and their lengths.
        batch_size: G, samples of a global batch over all ranks.
        seed: the run's seed.
    """

    def __init__(self, config: DataConfig, samples: SampleMaker, tokenize: Tokenize, batch_size: int, seed: int):
        self.options: LoaderOptions = config
        self.samples = samples
        """Maker of the samples."""
        self._weights = [1.0 if source.weight is None else source.weight for source in config.sources]
        sizes = [len(source) for source in samples.sources]
        self.order = config.order.build(sizes, self._weights, derive_seed(seed, "data", "order"), batch_size)
        self._tokenize = tokenize
        self.batch_size = batch_size
        self.nodes = dist.nodes()
        """Node of every rank of the job; with the windowed order, those of one node read the chunks that it owns."""
        self.seen = 0
        """Samples that this rank has read."""
        self.replaced = 0
        """Bad ones among them."""
        self.last_replaced: deque[BadSample] = deque(maxlen=100)
        """The last of them, in the order of the batches."""
        self._unreported: list[tuple[int, BadSample]] = []
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return the number of different samples."""
        return int(self.samples.first_ids[-1])

    def use_features(self, folders: Mapping[str, FeatureFolder]) -> None:
        """Add stored features to the batches from the next call of `batches` on; those of ``image`` replace images."""
        self.samples.features = folders

    @property
    def epoch_size(self) -> int:
        """Samples of one epoch, see `GlobalOrder`; differs from the number of samples if weights differ from 1."""
        return self.order.epoch_size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able description of the data. Equal fingerprints, seeds and batch sizes mean equal global batches."""
        parts = zip(self.samples.sources, self._weights, self.order.slots, self.samples.caption_weights, strict=True)
        sources = [
            {**source.fingerprint, "weight": weight}
            | ({} if slots.denominator == 1 else {"slots": str(slots)})
            | ({"caption_weights": [*of_captions]} if of_captions else {})
            for source, weight, slots, of_captions in parts
        ]
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        return {"sources": sources, "sha256": digest}

    def coverage(self, steps: int) -> str:
        """Return a sentence on how much of the data the first `steps` steps of the run show.

        The number of different samples is exact for one source or at the end of an epoch, else as expected.
        """
        shown = steps * self.batch_size
        epochs = shown / sum(self.order.slots)
        sizes_and_slots = zip(self.order.sizes, self.order.slots, strict=True)
        distinct = sum(min(size, round(epochs * slots)) for size, slots in sizes_and_slots)
        return (
            f"{shown:,} samples shown in {float(epochs):.2f} epochs: "
            f"{distinct:,} of {len(self):,} at least once ({distinct / len(self):.1%})"
        )

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        rank: int | None = None,
        nodes: Sequence[int] | None = None,
        pin_memory: bool = False,
        judge: bool = True,
    ) -> Generator[Batch, None, None]:
        """Yield this rank's share of the global batches `start`, `start + 1`, ...

        Args:
            start: first step; after a resume the number of finished steps.
            stop: step to stop before; None never stops.
            rank: default this process's.
            nodes: node of every rank; default those of the job.
            pin_memory: batches in page-locked memory, for copying to a GPU in the background.
            judge: raise at once if this rank `has_too_many_bad`; if False, the caller checks it together with the other
                ranks.

        Raises:
            DataError: more than `max_bad_fraction` of the samples are bad, or a worker died.
        """
        rank, nodes = dist.rank() if rank is None else rank, nodes or self.nodes
        options, steps = self.options, range(start, sys.maxsize if stop is None else stop)
        supply = ChunkSupply.find(self.samples.sources, self.order, rank, nodes)
        if supply is not None:  # there are chunks at URLs
            supply.start(steps, options.workers, options.prefetch * options.workers + 1)
        maker = BatchMaker(self.samples, self.order, self._tokenize, rank, nodes, supply)
        batches, named = make_batches(maker, steps, options, pin_memory), set[int]()
        with contextlib.closing(supply) if supply else contextlib.nullcontext(), contextlib.closing(batches):
            for batch in batches:
                for bad in batch.bad:
                    if bad.sample_id not in named and len(named) < _MOST_NAMED:
                        text = "step %d: sample %d replaced by %d: %s"
                        logger.warning(text, batch.step, bad.sample_id, bad.substitute_id, bad.reason)
                        named.add(bad.sample_id)
                        if len(named) == _MOST_NAMED:
                            logger.warning("bad samples: %d are named; others are only counted", _MOST_NAMED)
                self.seen += len(batch)
                self.replaced += len(batch.bad)
                self.last_replaced.extend(batch.bad)
                self._unreported += [(batch.step, bad) for bad in batch.bad]
                self._lengths.update(batch.lengths)
                if judge and self.has_too_many_bad:
                    self.require_few_bad(self.replaced, self.seen)
                yield batch

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
        """True if this rank's samples alone are more than all could have; `require_few_bad` decides for all."""
        return self.replaced > self._limit(self.seen, of_rank=True)

    def _limit(self, seen: int, of_rank: bool = False) -> float:
        fraction, size, order = self.options.max_bad_fraction, len(self), self.order
        usual = fraction * max(seen, SMALL)
        # The same come in each pass over a source. Passes of sources with other weights, and those that a rank reads
        # from a step on, begin and end anywhere.
        weights = [slots / of_source for slots, of_source in zip(order.slots, order.sizes, strict=True)]
        passes = math.ceil(seen * max(weights) / sum(order.slots)) + (of_rank or len({*weights}) > 1)
        most = allowed_bad(fraction, size) * passes
        # In large data few of a pass are seen, and by chance more of them are bad than of the others.
        return max(usual, most if size < SMALL else min(most, usual + 5 * math.sqrt(usual)))

    def require_few_bad(self, replaced: int, seen: int, last: Sequence[str] | None = None) -> None:
        """Raise if more samples were bad than `max_bad_fraction` allows; see there.

        Args:
            replaced: bad samples of this process or of the whole run.
            seen: all samples of the same.
            last: problems of the last bad samples of the run; default those of this process.

        Raises:
            DataError: too many are bad; the message names the last ones.
        """
        if replaced > self._limit(seen):
            whose = "in this process" if last is None else "in the run"
            last = [bad.reason for bad in list(self.last_replaced)[-5:]] if last is None else last
            shown = "\n".join(f"  {reason}" for reason in dict.fromkeys(last))
            raise DataError(
                f"{replaced} bad samples among {seen}: more than data.max_bad_fraction="
                f"{self.options.max_bad_fraction:g} allows. Repair or remove them (`vqclip data check` names all), or "
                f"raise it. The last of them {whose}:\n{shown or '  none'}"
            )
