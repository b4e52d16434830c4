"""The samples of a rank in one step, on its device, with the features of its frozen towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.data import Batch
from vqclip.losses import Positives, pair_keys
from vqclip.model import CLIP
from vqclip.nn.precision import Precision, autocast
from vqclip.quantizers import Order

__all__ = ["RankBatch", "make_rank_batch"]


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of the global batch, or of a microbatch of it."""

    images: Tensor
    """``(B, 3, H, W)`` uint8."""
    tokens: Tensor
    """``(B, N)`` int64, without columns that no caption needs."""
    order: Order
    """Places of the samples in the global batch."""
    sizes: tuple[int, ...] | None
    """Samples of every rank in the global batch; None if they are not known."""
    keys: Tensor | None
    """See `pair_keys`."""
    features: Mapping[str, Tensor]
    """Name → ``(B, N, D)``: of frozen towers (``image``, ``text``), and of teachers from the feature cache."""
    captions: tuple[str, ...]
    """B captions."""

    def part(self, rows: slice) -> RankBatch:
        """Return some of its samples."""
        return dataclasses.replace(
            self,
            images=self.images[rows],
            tokens=self.tokens[rows],
            order=Order(self.order.places[rows], self.order.size),
            keys=None if self.keys is None else self.keys[rows],
            features={name: each[rows] for name, each in self.features.items()},
            captions=self.captions[rows],
        )

    def __len__(self) -> int:
        return len(self.images)


def make_rank_batch(batch: Batch, model: CLIP, positives: Positives | None, precision: Precision) -> RankBatch:
    """Move a batch to the model's device, and run the frozen towers whose features are not in the cache.

    They run outside of the model that is compiled and wrapped, and once for both passes over microbatches.

    Args:
        batch: from the loader.
        model: not wrapped.
        positives: of the loss.
        precision: of the step.
    """
    device, dtype = model.logit_scale.device, model.image.pool.position.dtype
    images, tokens, places, sample_ids = (
        tensor.to(device, non_blocking=True) for tensor in (batch.images, batch.texts, batch.places, batch.sample_ids)
    )
    keys = pair_keys(positives, sample_ids, tokens)  # of all columns: ranks leave out different ones
    features = {name: each.to(device, non_blocking=True).to(dtype) for name, each in batch.features.items()}
    for tokenizer, inputs in ((model.image, images), (model.text, tokens)):
        if tokenizer.tower.is_frozen and tokenizer.modality not in features:
            with torch.no_grad(), autocast(device, precision):
                features[tokenizer.modality] = tokenizer.tower_features(inputs)
    needed = model.text.needed_tokens(batch.texts)
    if "text" in features:
        features["text"] = features["text"][:, :needed]
    order = Order(places, batch.global_size)
    return RankBatch(images, tokens[:, :needed], order, batch.sizes, keys, features, batch.captions)
