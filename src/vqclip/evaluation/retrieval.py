"""Retrieval of captions by images and of images by captions: R@1, R@5 and R@10."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from vqclip.data import Source
from vqclip.evaluation.datasets import CaptionedData, open_captioned
from vqclip.evaluation.encode import Encoder
from vqclip.evaluation.images import ImagesConfig, encode_images
from vqclip.evaluation.partition import RankPartition
from vqclip.evaluation.ranking import hit_chance, hit_rates
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.model import CLIP

_DEPTHS = (1, 5, 10)


class RetrievalConfig(ImagesConfig):
    """R@1, R@5 and R@10 of retrieval, in both directions."""

    figures: ClassVar[tuple[str, ...]] = tuple(f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in _DEPTHS)

    kind: Literal["retrieval"] = "retrieval"
    name: str = "retrieval"
    """Title of the results."""
    data: CaptionedData
    """The captioned images."""

    def open(self, partition: RankPartition) -> Source:
        """Open the data on every rank; raise DataError if they have no captions of their own."""
        return open_captioned(self.data, partition)

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Rank all captions for every image and all images for every caption, in each of the three modes.

        An image with several captions is hit if one of them is found, and each caption is a query. If images share
        equal captions, only an image's own is right; such ties count as a random order (`vqclip.evaluation.ranking`).
        """
        source = self.open(encoder.partition)
        image, captions, left_out = encode_images(
            self, source, model.image, encoder, f"{name}-image", lambda batch: [list(each) for each in batch.captions]
        )
        text = encoder.captions(model.text, [each for one in captions for each in one], self.batch_size, f"{name}-text")
        counts = torch.tensor([len(one) for one in captions])

        modes, notes = common_modes(image, text)
        with encoder.partition.raise_on_all_ranks():  # one rank may be asked to stop
            found = {mode: recalls(image.embeddings[mode], text.embeddings[mode], counts) for mode in modes}
        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes(found),
            chance=chance(counts),
            samples=len(captions),
            classes=None,
            captions=int(counts.sum()),
            usage={"image": image.usage, "text": text.usage},
            notes=left_out + text.notes + notes,
        )


def recalls(images: Tensor, captions: Tensor, counts: Tensor) -> dict[str, float]:
    """Return the recalls ``i2t_r1`` ... ``t2i_r10`` in [0, 1].

    Args:
        images: ``(n, E)`` unit-norm.
        captions: ``(Σ counts, E)`` unit-norm, image by image.
        counts: ``(n,)`` int64, captions of each image, at least 1.
    """
    each = torch.arange(len(images), device=images.device)
    owner = each.repeat_interleave(counts.to(images.device))
    to_text = hit_rates(images, captions, each, owner, _DEPTHS)
    to_image = hit_rates(captions, images, owner, each, _DEPTHS)
    return _by_figure(to_text, to_image)


def chance(counts: Tensor) -> dict[str, float]:
    """Return the expectation of `recalls` for random embeddings."""
    none = torch.zeros_like(counts)
    to_text = [float(hit_chance(none, counts, counts.sum() - counts, k).mean()) for k in _DEPTHS]
    return _by_figure(to_text, [min(k, len(counts)) / len(counts) for k in _DEPTHS])


def _by_figure(to_text: list[float], to_image: list[float]) -> dict[str, float]:
    return dict(zip(RetrievalConfig.figures, to_text + to_image, strict=True))
