"""A rank's part of a global batch: its samples, made in the data workers, a part of the rows in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqclip.data.batch import BadSample, Batch
from vqclip.data.chunks.supply import ChunkSupply, find_needs
from vqclip.data.dealing import part_sizes
from vqclip.data.order import GlobalOrder
from vqclip.data.parts import Layout
from vqclip.data.samples import SampleMaker

__all__ = ["BatchMaker", "Tokenize"]

Tokenize = Callable[[list[str]], tuple[Tensor, Sequence[int]]]
"""Captions → ``(B, T)`` int64, padded with 0, and the length of each before it was cut; for any B >= 1."""


@dataclass(frozen=True)
class _Rows:
    """Small fields of some rows of a batch; an array passes between processes faster than a tensor."""

    places: np.ndarray
    texts: np.ndarray
    lengths: tuple[int, ...]
    captions: tuple[str, ...]
    ids: tuple[int, ...]
    labels: tuple[int, ...]
    bad: tuple[BadSample, ...]


class BatchMaker:
    """Makes a rank's part of any global batch; runs in the workers.

    Args:
        samples: makes samples.
        order: order of the samples.
        tokenize: captions → ``(B, T)`` int64 and their lengths, for any B >= 1.
        image_size: side of the images in pixels.
        batch_size: G.
        rank: this rank.
        nodes: node of every rank.
        steps: that are made.
        workers: processes that make batches; 0: this one.
        lead: batches by which the workers of one rank may be ahead of those of another rank.
    """

    def __init__(
        self,
        samples: SampleMaker,
        order: GlobalOrder,
        tokenize: Tokenize,
        image_size: int,
        batch_size: int,
        rank: int,
        nodes: Sequence[int],
        steps: range,
        workers: int = 0,
        lead: int = 0,
    ):
        self._samples = samples
        self._order = order
        self._tokenize = tokenize
        self._image_size = image_size
        self._batch_size = batch_size
        self._rank = rank
        self._nodes = nodes
        needs = find_needs(samples.sources, order, batch_size, rank, nodes)
        self.supply = None if needs is None else ChunkSupply(needs, steps, workers, lead)
        """Fetches chunks ahead."""

    @property
    def layout(self) -> Layout:
        """Images and features of this rank's part of a batch; images have no pixels if features replace them."""
        rows, stored = -(-self._batch_size // len(self._nodes)), self._samples.features
        side = 0 if "image" in stored else self._image_size
        images = ((rows, 3, side, side), torch.uint8)
        empty = {name: reader.empty(0) for name, reader in stored.items()}
        return {
            "image": images,
            **{_feature(name): ((rows, *e.shape[1:]), e.dtype) for name, e in empty.items()},
        }

    def fill(self, step: int, part: int, parts: int, tensors: Mapping[str, Tensor]) -> _Rows:
        """Make one of ``parts`` equal parts of this rank's rows; see `vqclip.data.parts.PartMaker`."""
        if self.supply is not None:
            self.supply.advance(step)
        slots, places = self._order.deal(step, self._batch_size, self._rank, self._nodes)
        count = len(slots.sample)
        first, end = count * part // parts, count * (part + 1) // parts
        captions, ids, labels, bad = [], [], [], []
        for row, slot in enumerate(zip(*(each[first:end].tolist() for each in slots), strict=True), first):
            sample, replaced = self._samples.make(*slot)
            if sample.image is not None:
                tensors["image"][row] = sample.image
            for name, each in sample.features.items():
                tensors[_feature(name)][row] = each
            captions.append(sample.caption)
            ids.append(sample.sample_id)
            labels.append(sample.label)
            bad += replaced
        texts, lengths = self._tokenize(captions or [""])
        size = end - first
        return _Rows(
            places[first:end],
            texts[:size].numpy(),
            tuple(lengths[:size]),
            tuple(captions),
            tuple(ids),
            tuple(labels),
            tuple(bad),
        )

    def join(self, step: int, tensors: Mapping[str, Tensor], rests: Sequence[_Rows]) -> Batch:
        """Return this rank's part of global batch `step`; see `vqclip.data.parts.PartMaker`."""
        ids = [each for rest in rests for each in rest.ids]
        return Batch(
            step=step,
            epoch=self._order.epoch_of(step * self._batch_size),
            images=tensors["image"][: len(ids)],
            texts=torch.from_numpy(np.concatenate([rest.texts for rest in rests])),
            sample_ids=torch.tensor(ids, dtype=torch.int64),
            labels=torch.tensor([each for rest in rests for each in rest.labels], dtype=torch.int64),
            places=torch.from_numpy(np.concatenate([rest.places for rest in rests])),
            global_size=self._batch_size,
            sizes=part_sizes(self._batch_size, len(self._nodes)),
            bad=tuple(each for rest in rests for each in rest.bad),
            lengths=tuple(each for rest in rests for each in rest.lengths),
            captions=tuple(each for rest in rests for each in rest.captions),
            features={name: tensors[_feature(name)][: len(ids)] for name in self._samples.features},
        )


def _feature(name: str) -> str:
    return f"feature {name}"
