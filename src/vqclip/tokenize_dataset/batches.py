"""Batches of one shape from the samples of a shard, read and decoded in workers, in order.

A batch contains samples of one shard, and the last batch of a shard is padded. So each batch, and with it every id, is
a function of the shard, the tokenizer and the batch size, and not of the process that encodes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vqclip.data import BadSample, RawSample
from vqclip.data.in_order import ShardSlices, read_in_order
from vqclip.data.samples import ReadsSamples, read_decoded

__all__ = ["DecodedBatch", "DecodedSample", "ShardBatches", "ShardSamples"]


class DecodedSample(NamedTuple):
    """A usable sample of a batch."""

    row: int
    """Row in the batch."""
    key: str
    sample_id: int
    label: int
    captions: tuple[str, ...]


class DecodedBatch(NamedTuple):
    """Samples of one shard, ready to be encoded."""

    shard: int
    """Number of the shard."""
    size: int
    """Samples read, usable or not."""
    images: Tensor | None
    """``(B, 3, S, S)`` uint8, always with all B rows: black without a sample; None if no images are wanted."""
    found: tuple[DecodedSample, ...]
    """The usable samples."""
    bad: tuple[tuple[str, BadSample], ...]
    """The unusable samples, each with its key."""


class ShardSamples(ReadsSamples, Protocol):
    """The part of a `ShardedSource` that reads samples."""

    def key(self, index: int) -> str:
        """See `ShardedSource.key`."""
        ...


class ShardBatches:
    """Batches of some shards, by number; workers get a copy of it.

    Args:
        source: source of the samples.
        sizes: number of samples of every shard of the data set.
        shards: numbers of the shards wanted.
        batch_size: B.
        transform: ``(3, H, W)`` uint8 → ``(3, S, S)`` uint8; None if no images are wanted.
        image_size: S.
        max_pixels: larger images are bad samples.
    """

    def __init__(
        self,
        source: ShardSamples,
        sizes: Sequence[int],
        shards: Sequence[int],
        batch_size: int,
        transform: Callable[[Tensor], Tensor] | None,
        image_size: int,
        max_pixels: int,
    ):
        self._slices = ShardSlices(sizes, shards, batch_size)
        self._source, self._batch_size = source, batch_size
        self._transform, self._image_size, self._max_pixels = transform, image_size, max_pixels

    def __len__(self) -> int:
        """Return the number of batches in all shards."""
        return len(self._slices)

    def __call__(self, number: int) -> DecodedBatch:
        """Return batch `number`, counted over the shards.

        Raises:
            StorageError: the shard cannot be fetched.
        """
        shard, indices = self._slices[number]
        read = read_in_order(self._read, indices, shard)
        images = None
        if self._transform is not None:
            images = torch.zeros(self._batch_size, 3, self._image_size, self._image_size, dtype=torch.uint8)
            for index, (_, image) in read.found.items():
                assert image is not None
                images[index - indices.start] = image
        found = tuple(
            DecodedSample(index - indices.start, self._source.key(index), index, sample.label, sample.captions)
            for index, (sample, _) in read.found.items()
        )
        bad = tuple((self._source.key(each.sample_id), each) for each in read.bad)
        return DecodedBatch(shard, len(indices), images, found, bad)

    def _read(self, index: int) -> tuple[RawSample, Tensor | None]:
        """Return a sample, and its transformed image if images are wanted."""
        if self._transform is None:
            return self._source.read(index), None
        sample, image = read_decoded(self._source, index, self._max_pixels)
        return sample, self._transform(image)
