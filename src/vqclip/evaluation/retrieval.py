"""Retrieval of captions by images and of images by captions: R@1, R@5 and R@10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vqclip.evaluation.details import Details, Interval, Section
from vqclip.evaluation.encode import Encoder, Mode
from vqclip.evaluation.image_details import ImageDetails, make_details
from vqclip.evaluation.images import CaptionedData, ImagesConfig, encode_set
from vqclip.evaluation.intervals import ratio_intervals
from vqclip.evaluation.ranking import Ranks, hit_chance, rank
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.model import CLIP

_DEPTHS = (1, 5, 10)


class RetrievalConfig(ImagesConfig):
    """R@1, R@5 and R@10 of retrieval, in both directions."""

    figures: ClassVar[tuple[str, ...]] = tuple(f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in _DEPTHS)
    labelled: ClassVar[bool | None] = False

    kind: Literal["retrieval"] = "retrieval"
    name: str = "retrieval"
    """Title of the results."""
    data: CaptionedData
    """The captioned images."""

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Rank all captions for every image and all images for every caption, in each of the three modes.

        An image with several captions is hit if one of them is found, and each caption is a query. If images share
        equal captions, only an image's own is right; such ties count as a random order (`vqclip.evaluation.ranking`).
        """
        images = encode_set(self, self.data, model, encoder, f"{name}-image", self.limit)
        image, captions = images.encoded, images.annotations
        texts = [each for one in captions for each in one]
        text = encoder.captions(model.text, texts, self.batch_size, f"{name}-text")
        counts = torch.tensor([len(one) for one in captions])

        modes, notes = common_modes(image, text)
        with encoder.partition.raise_on_all_ranks():  # one rank may be asked to stop
            ranks = {mode: both_ranks(image.embeddings[mode], text.embeddings[mode], counts) for mode in modes}

        def details(maker: ImageDetails) -> Details:
            examples: tuple[Section, ...] = ()
            if "codes_only" in ranks:
                rows, targets = image.embeddings["codes_only"], text.embeddings["codes_only"]
                each, owner = _groups(counts, rows.device)
                to_text, to_image = ranks["codes_only"]
                examples = (
                    *maker.examples(rows, targets, each, owner, to_text, "image to caption", texts),
                    *maker.examples(targets, rows, owner, each, to_image, "caption to image", texts),
                )
            return Details(codes=maker.codes(), examples=examples)

        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes({mode: recalls(each) for mode, each in ranks.items()}),
            chance=chance(counts),
            samples=len(captions),
            classes=None,
            captions=int(counts.sum()),
            usage={"image": image.usage, "text": text.usage},
            notes=images.notes + text.notes + notes,
            details=make_details(model.image, encoder, images, (), details),
            intervals=recall_intervals(ranks, counts),
        )


class BothRanks(NamedTuple):
    """Ranks of n images and of their captions."""

    to_text: Ranks
    """Its best caption, for each image."""
    to_image: Ranks
    """Its image, for each caption."""


def both_ranks(images: Tensor, captions: Tensor, counts: Tensor) -> BothRanks:
    """Rank the captions for each image, and the images for each caption.

    Args:
        images: ``(n, E)`` unit-norm.
        captions: ``(Σ counts, E)`` unit-norm, image by image.
        counts: ``(n,)`` int64, captions of each image, at least 1.
    """
    each, owner = _groups(counts, images.device)
    return BothRanks(
        rank(images, captions, each, owner),
        rank(captions, images, owner, each),
    )


def recalls(ranks: BothRanks) -> dict[str, float]:
    """Return the recalls ``i2t_r1`` ... ``t2i_r10`` in [0, 1]."""
    to_text, to_image = (each.hits(_DEPTHS).mean(dim=1).tolist() for each in ranks)
    return dict(zip(RetrievalConfig.figures, to_text + to_image, strict=True))


def _groups(counts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of each image, and the image of each caption."""
    each = torch.arange(len(counts), device=device)
    return each, each.repeat_interleave(counts.to(device))


def chance(counts: Tensor) -> dict[str, float]:
    """Return the expectation of `recalls` for random embeddings."""
    none = torch.zeros_like(counts)
    to_text = [float(hit_chance(none, counts, counts.sum() - counts, k).mean()) for k in _DEPTHS]
    to_image = [min(k, len(counts)) / len(counts) for k in _DEPTHS]
    return dict(zip(RetrievalConfig.figures, to_text + to_image, strict=True))


def recall_intervals(ranks: Mapping[Mode, BothRanks], counts: Tensor) -> dict[Mode, dict[str, Interval]]:
    """Return the intervals of the recalls of each mode."""
    to_text = torch.cat([each.to_text.hits(_DEPTHS) for each in ranks.values()])
    to_image = torch.cat([each.to_image.hits(_DEPTHS) for each in ranks.values()])
    k = len(_DEPTHS)
    first, second = ratio_intervals(to_text, torch.ones_like(counts)), ratio_intervals(to_image, counts)
    return {
        mode: dict(zip(RetrievalConfig.figures, first[k * n : k * n + k] + second[k * n : k * n + k], strict=True))
        for n, mode in enumerate(ranks)
    }
