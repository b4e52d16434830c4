"""Retrieval: from an image to its captions, and from a caption to its image; R@1, R@5 and R@10."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vqclip.config import Config
from vqclip.data import EvalSet
from vqclip.evaluation.datasets import CaptionedData
from vqclip.evaluation.encode import Encoder
from vqclip.evaluation.ranking import hit_chance, hit_rates
from vqclip.evaluation.results import Result, all_modes, three_modes
from vqclip.model import CLIP

_DEPTHS = (1, 5, 10)


class RetrievalConfig(Config):
    """R@1, R@5 and R@10 of retrieval, both ways."""

    kind: Literal["retrieval"] = "retrieval"
    name: str = "retrieval"
    """How results are titled."""
    data: CaptionedData
    """The captioned images."""
    batch_size: int = Field(256, ge=1)
    """Images, or captions, at once on each rank. The figures do not depend on it, up to rounding."""
    workers: int = Field(0, ge=0, le=512)
    """Processes per rank that decode images; 0 does it in the evaluating process."""
    limit: int | None = Field(None, ge=1)
    """Use only so many images, evenly spread over the set; null uses all."""

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Evaluate ``model``, which is in evaluation mode; called by `vqclip.evaluation.evaluate`."""
        return retrieval(self, model, encoder, name)


def retrieval(config: RetrievalConfig, model: CLIP, encoder: Encoder, name: str) -> Result:
    """Rank all captions for every image and all images for every caption, in each of the three modes.

    All captions of an image count: to find one of them is a hit, and each is a query. Of equal captions of different
    images only the image's own is right; the tie is broken at random (`vqclip.evaluation.ranking`).

    Args:
        config: what to evaluate on.
        model: in evaluation mode.
        encoder: how; every rank of its share must call this.
        name: names the files of ids.

    Raises:
        DataError: data that cannot be used, on every rank; the message names file and sample.
    """
    share = encoder.share
    source = share.first_on_one(config.data.build)
    images = EvalSet(
        source, model.image.transform, config.batch_size, share.rank, share.world_size, config.workers, config.limit
    )
    captions: list[list[str]] = []

    def pixels() -> Iterator[Tensor]:
        for batch in images:
            captions.extend(map(list, batch.captions))
            yield batch.images

    image = encoder(model.image, pixels(), f"{name}-image")
    whole = share.gather_items(captions)
    text = encoder.captions(model.text, [each for one in whole for each in one], config.batch_size, f"{name}-text")
    counts = torch.tensor([len(one) for one in whole])

    modes, notes = three_modes(image, text)
    found = {mode: recalls(image.embeddings[mode], text.embeddings[mode], counts) for mode in modes}
    return Result(
        name=config.name,
        kind=config.kind,
        figures=all_modes(found),
        chance=chance(counts),
        samples=len(whole),
        classes=None,
        captions=int(counts.sum()),
        usage={"image": image.usage, "text": text.usage},
        notes=notes,
    )


def recalls(images: Tensor, captions: Tensor, counts: Tensor) -> dict[str, float]:
    """``i2t_r1`` ... ``t2i_r10`` in [0, 1].

    Args:
        images: ``(n, E)`` unit-norm.
        captions: ``(Σ counts, E)`` unit-norm, image by image.
        counts: ``(n,)`` int64, captions of each image, at least 1.
    """
    each = torch.arange(len(images), device=images.device)
    owner = each.repeat_interleave(counts.to(images.device))
    to_text = hit_rates(images, captions, each, owner, _DEPTHS)
    to_image = hit_rates(captions, images, owner, each, _DEPTHS)
    return _named(to_text, to_image)


def chance(counts: Tensor) -> dict[str, float]:
    """What `recalls` gives on average for embeddings that know nothing."""
    none = torch.zeros_like(counts)
    to_text = [float(hit_chance(none, counts, counts.sum() - counts, k).mean()) for k in _DEPTHS]
    return _named(to_text, [min(k, len(counts)) / len(counts) for k in _DEPTHS])


def _named(to_text: list[float], to_image: list[float]) -> dict[str, float]:
    names = [f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in _DEPTHS]
    return dict(zip(names, to_text + to_image, strict=True))
