"""The samples of a rank in one step, on its device, with the features of its frozen towers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.data import Batch
from vqclip.losses import Positives, pair_keys
from vqclip.model import CLIP
from vqclip.nn.precision import Precision, autocast
from vqclip.quantizers import Order

__all__ = ["RankBatch", "copy_images", "make_rank_batch"]


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


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies to a GPU."""
    return torch.cuda.Stream(device)


def _copy_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors of the host to a device; on a GPU without waiting for the computation of the step before.

    The copies run on a stream of their own, for which the current stream waits. They overlap if the tensors are in
    page-locked memory.
    """
    if device.type != "cuda":
        return {name: each.to(device) for name, each in tensors.items()}
    current, stream = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(stream):
        copies = {name: each.to(device, non_blocking=True) for name, each in tensors.items()}
    current.wait_stream(stream)
    for each in copies.values():
        each.record_stream(current)  # its memory is not used again before the step is done with it
    return copies


def copy_images(batch: Batch, others: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Copy the images of a batch and other tensors to a device.

    Returns:
        ``(B, 3, H, W)`` uint8, and the other tensors.
    """
    copies = _copy_to_device({**others, "images": batch.images}, device)
    return copies.pop("images"), copies


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
    named = {"texts": batch.texts, "places": batch.places, "sample_ids": batch.sample_ids}
    stored = {f"features/{name}": each for name, each in batch.features.items()}
    images, copies = copy_images(batch, named | stored, device)
    tokens, places, sample_ids = (copies[name] for name in named)
    keys = pair_keys(positives, sample_ids, tokens)  # of all columns: ranks leave out different ones
    features = {name: copies[f"features/{name}"].to(dtype) for name in batch.features}
    for tokenizer, inputs in ((model.image, images), (model.text, tokens)):
        if tokenizer.tower.is_frozen and tokenizer.modality not in features:
            with torch.no_grad(), autocast(device, precision):
                features[tokenizer.modality] = tokenizer.tower_features(inputs)
    needed = model.text.needed_tokens(batch.texts)
    if "text" in features:
        features["text"] = features["text"][:, :needed]
    order = Order(places, batch.global_size)
    return RankBatch(images, tokens[:, :needed], order, batch.sizes, keys, features, batch.captions)
