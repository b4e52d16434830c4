"""Make one sample of a batch.

raw = read the image bytes and captions of (source, index)
image = transform(decode(raw.image), generator keyed by (seed, view, sample id)), or its features from the cache
caption = one of raw.captions, keyed by (seed, epoch, sample id), by the weights of their keys where there are any
if the sample is bad: try again with another index, keyed by (seed, epoch, sample id, attempt)

The view is the epoch, or with `data.views` n one of n, each in every n-th epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vqclip.data.batch import BadSample
from vqclip.data.decode import decode_image
from vqclip.data.draws import KeyedGenerator, hash_integers
from vqclip.data.features import FeatureFolder
from vqclip.data.lookup import locate
from vqclip.data.sources.base import RawSample, Source
from vqclip.data.transforms import TrainTransform
from vqclip.errors import DataError, StorageError
from vqclip.seeds import derive_seed

_TRIES = 32


class Sample(NamedTuple):
    """A sample for a batch."""

    image: Tensor | None
    """``(3, S, S)`` uint8; None if its features replace it."""
    caption: str
    sample_id: int
    label: int
    features: Mapping[str, Tensor]
    """Name → ``(N, D)`` from the feature cache."""


def read_decoded(source: Source, index: int, max_pixels: int, min_side: int | None = None) -> tuple[RawSample, Tensor]:
    """Read one sample of a source and decode its image to ``(3, H, W)`` uint8; see `decode_image`.

    Raises:
        DataError: the sample is bad; the message names shard and sample.
    """
    raw = source.read(index)
    return raw, _decode(source, index, raw, max_pixels, min_side)


def _decode(source: Source, index: int, raw: RawSample, max_pixels: int, min_side: int | None) -> Tensor:
    try:
        return decode_image(raw.image, max_pixels, min_side)
    except DataError as error:
        raise DataError(f"{source.name(index)}: {error}", error.kind) from error


class SampleMaker:
    """Reads, decodes and transforms samples, and replaces bad ones.

    Every draw is keyed by (seed, epoch or view, sample id), so it depends neither on worker or rank nor on earlier
    samples.

    Args:
        sources: sources of samples.
        transform: random augmentation.
        seed: the run's seed.
        max_pixels: larger images are bad samples.
        views: n, number of different views of each image; None: a new one in every epoch.
    """

    def __init__(
        self, sources: Sequence[Source], transform: TrainTransform, seed: int, max_pixels: int, views: int | None = None
    ):
        self.sources, self.transform, self.views, self._max_pixels = sources, transform, views, max_pixels
        self.features: Mapping[str, FeatureFolder] = {}
        """Stored features by name; those of ``image`` replace the images."""
        self.first_ids = np.cumsum([0, *(len(source) for source in sources)])
        """Sample id of the first sample of every source, and the total number of samples."""
        configs = [getattr(source, "config", None) for source in sources]
        self.caption_weights: list[tuple[float, ...]] = [getattr(each, "caption_weights", ()) for each in configs]
        """Weights of the keys of captions of every source; see `SourceConfigBase.caption_weights`."""
        self._augmentation = KeyedGenerator(derive_seed(seed, "data", "augmentation"))
        self._caption_seed = derive_seed(seed, "data", "caption")
        self._substitute_seed = derive_seed(seed, "data", "substitute")

    def make(self, source: int, index: int, epoch: int) -> tuple[Sample, BadSample | None]:
        """Return a sample and None; or, if it is bad, a substitute from the same source and the bad sample.

        A substitute that is bad too is not reported: it is when its own turn comes.

        Raises:
            DataError: many substitutes are bad too, so that the problem must be another one.
            StorageError: the shard cannot be downloaded, or has changed since it was indexed.
        """
        bad, reason = None, ""
        wanted, size = index, len(self.sources[source])
        for attempt in range(_TRIES):
            try:
                sample = self._make(source, index, epoch)
                return sample, bad and bad._replace(substitute_id=sample.sample_id)
            except StorageError:
                raise  # the choice of a substitute would depend on the network and the cache
            except DataError as error:
                key = hash_integers(self._substitute_seed, epoch, self._id(source, wanted), attempt)
                index = (index + 1 + int(key % np.uint64(max(size - 1, 1)))) % size  # any other
                reason = str(error)
                bad = bad or BadSample(self._id(source, wanted), reason, error.kind, -1)
        assert bad is not None
        raise DataError(f"{bad.reason}\n{_TRIES - 1} substitutes for it cannot be used either; the last: {reason}")

    def make_views(self, sample_id: int) -> Tensor:
        """Return all views ``(n, 3, S, S)`` uint8 of an image, decoded once.

        Raises:
            DataError: the sample is bad, as in `make`.
        """
        assert self.views is not None
        _, image = read_decoded(*self.locate(sample_id), self._max_pixels, self.transform.min_side)
        draws = (self._augmentation.at(view, sample_id) for view in range(self.views))
        return torch.stack([self.transform(image, rng) for rng in draws])

    def read_captions(self, sample_id: int) -> tuple[str, ...]:
        """Return all captions of a sample.

        Raises:
            DataError: the sample cannot be read.
        """
        source, index = self.locate(sample_id)
        return source.read(index).captions

    def locate(self, sample_id: int) -> tuple[Source, int]:
        """Return the source of a sample, and its index there."""
        source, index = locate(self.first_ids, sample_id)
        return self.sources[source], index

    def _id(self, source: int, index: int) -> int:
        return int(self.first_ids[source]) + index

    def _make(self, source: int, index: int, epoch: int) -> Sample:
        sample_id, image, stored = self._id(source, index), None, self.features
        view = epoch if self.views is None else (epoch + sample_id) % self.views
        raw = self.sources[source].read(index)
        if "image" not in stored:
            decoded = _decode(self.sources[source], index, raw, self._max_pixels, self.transform.min_side)
            image = self.transform(decoded, self._augmentation.at(view, sample_id))
        choice = self._choose_caption(source, raw, epoch, sample_id) if len(raw.captions) > 1 else 0
        entries = {"image": view, "text": choice}
        features = {name: each.read(sample_id, entries[each.settings.modality]) for name, each in stored.items()}
        return Sample(image, raw.captions[choice], sample_id, raw.label, features)

    def _choose_caption(self, source: int, raw: RawSample, epoch: int, sample_id: int) -> int:
        """Return the number of a drawn caption, by the weight of its key if there are any."""
        draw, count = hash_integers(self._caption_seed, epoch, sample_id), len(raw.captions)
        weights = self.caption_weights[source]
        if not (weights and raw.keys):
            return int(draw % np.uint64(count))
        bounds = np.cumsum([weights[key] / raw.keys.count(key) for key in raw.keys])
        return min(int(np.searchsorted(bounds, float(draw) / 2**64 * bounds[-1], side="right")), count - 1)
