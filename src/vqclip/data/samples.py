"""Make one sample of a batch.

raw = read the image bytes and captions of (source, index)
image = transform(decode(raw.image), generator keyed by (seed, epoch, sample id))
caption = one of raw.captions, keyed by (seed, epoch, sample id)
if the sample is bad: try again with another index, keyed by (seed, epoch, sample id, attempt)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vqclip.data.batch import BadSample
from vqclip.data.decode import decode_image
from vqclip.data.draws import KeyedGenerator, hash_integers
from vqclip.data.sources import RawSample, Source
from vqclip.data.transforms import TrainTransform
from vqclip.errors import DataError, StorageError
from vqclip.seeds import derive_seed

__all__ = ["Sample", "SampleMaker", "read_decoded"]

_TRIES = 32


class Sample(NamedTuple):
    """A sample for a batch."""

    image: Tensor
    """``(3, S, S)`` uint8."""
    caption: str
    sample_id: int
    label: int


def read_decoded(source: Source, index: int, max_pixels: int) -> tuple[RawSample, Tensor]:
    """Read one sample of a source and decode its image to ``(3, H, W)`` uint8.

    Raises:
        DataError: the sample is bad; the message names shard and sample.
    """
    raw = source.read(index)
    try:
        return raw, decode_image(raw.image, max_pixels)
    except DataError as error:
        raise DataError(f"{source.name(index)}: {error}", error.kind) from error


def _draw_other(index: int, key: np.ndarray, size: int) -> int:
    """Return a random index below `size`, drawn by `key`; different from the given one if size > 1."""
    return (index + 1 + int(key % np.uint64(max(size - 1, 1)))) % size


class SampleMaker:
    """Reads, decodes and transforms samples, and replaces bad ones.

    Every draw is keyed by (seed, epoch, sample id), so it depends neither on worker or rank nor on earlier samples.

    Args:
        sources: sources of samples.
        transform: random augmentation.
        seed: the run's seed.
        max_pixels: larger images are bad samples.
    """

    def __init__(self, sources: Sequence[Source], transform: TrainTransform, seed: int, max_pixels: int):
        self.sources = sources
        self.first_ids = np.cumsum([0, *(len(source) for source in sources)])
        """Sample id of the first sample of every source, and the total number of samples."""
        self._transform = transform
        self._max_pixels = max_pixels
        self._augmentation = KeyedGenerator(derive_seed(seed, "data", "augmentation"))
        self._caption_seed = derive_seed(seed, "data", "caption")
        self._substitute_seed = derive_seed(seed, "data", "substitute")

    def make(self, source: int, index: int, epoch: int) -> tuple[Sample, list[BadSample]]:
        """Return a sample, or a substitute from the same source if it is bad, and the bad samples.

        Raises:
            DataError: many substitutes are bad too, so that the problem must be another one.
            StorageError: the shard cannot be downloaded, or has changed since it was indexed.
        """
        bad: list[BadSample] = []
        wanted = index
        for attempt in range(_TRIES):
            try:
                return self._make(source, index, epoch), bad
            except StorageError:
                raise  # the choice of a substitute would depend on the network and the cache
            except DataError as error:
                key = hash_integers(self._substitute_seed, epoch, self._id(source, wanted), attempt)
                failed, index = index, _draw_other(index, key, len(self.sources[source]))
                bad.append(BadSample(self._id(source, failed), str(error), error.kind, self._id(source, index)))
        raise DataError(
            f"{bad[0].reason}\n{_TRIES - 1} substitutes for it cannot be used either; the last: {bad[-1].reason}"
        )

    def _id(self, source: int, index: int) -> int:
        return int(self.first_ids[source]) + index

    def _make(self, source: int, index: int, epoch: int) -> Sample:
        sample_id = self._id(source, index)
        raw, image = read_decoded(self.sources[source], index, self._max_pixels)
        choice = 0
        if len(raw.captions) > 1:
            choice = int(hash_integers(self._caption_seed, epoch, sample_id) % np.uint64(len(raw.captions)))
        image = self._transform(image, self._augmentation.at(epoch, sample_id))
        return Sample(image, raw.captions[choice], sample_id, raw.label)
