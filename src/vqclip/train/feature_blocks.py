"""Samples to compute features of, in blocks: read, decoded and transformed in the data workers, shard after shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqclip.data.features import FeatureSettings
from vqclip.data.features.folder import BadFeatures
from vqclip.data.samples import SampleMaker
from vqclip.data.shard_folder import ShardSlices
from vqclip.errors import DataError, StorageError


@dataclass
class Block:
    """Some consecutive samples of one shard."""

    shard: int
    size: int
    """Samples, bad ones included."""
    is_last: bool
    """True for the last block of its shard."""
    inputs: list[Tensor] | list[tuple[str, ...]] = field(default_factory=list)
    """Views ``(n, 3, S, S)`` uint8 or captions of each sample; empty for a bad one."""
    bad: list[BadFeatures] = field(default_factory=list)


class Blocks:
    """Blocks of some shards, by number; workers get a copy of it.

    Args:
        samples: reads the samples.
        settings: of the features.
        shards: numbers of the shards wanted.
        size: samples in a block.
    """

    def __init__(self, samples: SampleMaker, settings: FeatureSettings, shards: Sequence[int], size: int):
        self._samples, self._settings = samples, settings
        self._slices = ShardSlices([len(settings.shard_range(n)) for n in range(settings.shards)], shards, size)

    def __len__(self) -> int:
        """Return the number of blocks in all shards."""
        return len(self._slices)

    def __call__(self, number: int) -> Block:
        """Return block `number`, counted over the shards.

        Raises:
            StorageError: the storage of a sample cannot be read; a bad sample is part of the block.
        """
        shard, ids = self._slices[number]
        block = Block(shard, len(ids), ids.stop == self._settings.shard_range(shard).stop)
        is_image = self._settings.modality == "image"
        empty: Tensor | tuple[str, ...] = torch.empty(0) if is_image else ()
        read = self._samples.make_views if is_image else self._samples.read_captions
        inputs: list[Tensor | tuple[str, ...]] = []
        for sample_id in ids:
            try:
                inputs.append(read(sample_id))
            except StorageError:
                raise  # it may be gone in the next run
            except DataError as error:
                inputs.append(empty)
                block.bad.append(BadFeatures(sample_id=sample_id, kind=error.kind, reason=str(error)))
        block.inputs = inputs  # type: ignore[assignment]
        return block
