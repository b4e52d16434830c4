"""Meaning of an image to the model: zero-shot accuracy or R@1 of images and of their reconstructions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip.data.sources.class_names import DEFAULT_TEMPLATE
from vqclip.evaluation.details import Interval
from vqclip.evaluation.encode import Encoded, Encoder, Mode
from vqclip.evaluation.images import EncodedImages
from vqclip.evaluation.intervals import ratio_intervals
from vqclip.evaluation.ranking import DEPTHS
from vqclip.evaluation.results import common_modes
from vqclip.evaluation.retrieval import both_ranks, chance
from vqclip.evaluation.zero_shot import class_embeddings, fill, rank_classes
from vqclip.tokenizer import TextTokenizer

Found = Mapping[Mode, dict[str, tuple[float, Interval]]]
"""Mode → figure → rate and its interval."""


class Meaning(NamedTuple):
    """Figures of the meaning of a set's images."""

    text: Encoded
    """The class prompts or captions."""
    texts: int
    """Number of them."""
    chance: dict[str, float]
    """Figure → its expectation for random embeddings."""
    figures: Callable[[Encoded], Found]
    """Function of the encoded images, or of their reconstructions."""


def meaning_of_classes(
    images: EncodedImages[int], tokenizer: TextTokenizer, encoder: Encoder, batch_size: int, name: str
) -> Meaning:
    """Return the zero-shot accuracy ``top1``, with the prompts of the data; every rank must call this."""
    names, templates = images.source.classnames, images.source.templates or (DEFAULT_TEMPLATE,)
    prompts = [fill(templates, [each]) for each in names]
    text = encoder.captions(tokenizer, list(itertools.chain(*prompts)), batch_size, name)
    sizes = [len(each) for each in prompts]

    def figures(encoded: Encoded) -> Found:
        targets = {mode: class_embeddings(text.embeddings[mode], sizes) for mode in common_modes(encoded, text)[0]}
        ranks = rank_classes(encoded, targets, images.labels)
        return {mode: {"top1": _mean(each.hits(DEPTHS[:1]))} for mode, each in ranks.items()}

    return Meaning(text, sum(sizes), {"top1": 1 / len(names)}, figures)


def meaning_of_captions(
    images: EncodedImages[list[str]], tokenizer: TextTokenizer, encoder: Encoder, batch_size: int, name: str
) -> Meaning:
    """Return R@1 of captions and of images, ``i2t_r1`` and ``t2i_r1``; every rank must call this."""
    counts = torch.tensor([len(each) for each in images.annotations])
    text = encoder.captions(tokenizer, [each for one in images.annotations for each in one], batch_size, name)

    def figures(encoded: Encoded) -> Found:
        found = {}
        for mode in common_modes(encoded, text)[0]:
            ranks = both_ranks(encoded.embeddings[mode], text.embeddings[mode], counts)
            found[mode] = {
                "i2t_r1": _mean(ranks.to_text.hits((1,))),
                "t2i_r1": _mean(ranks.to_image.hits((1,)), counts),
            }
        return found

    chances = chance(counts)
    return Meaning(text, int(counts.sum()), {name: chances[name] for name in ("i2t_r1", "t2i_r1")}, figures)


def _mean(hits: Tensor, counts: Tensor | None = None) -> tuple[float, Interval]:
    """Return the mean of hits ``(1, Q)`` and its interval; ``counts``: hits of each image, None for one."""
    counts = torch.ones(hits.shape[1], dtype=torch.int64) if counts is None else counts
    return float(hits.mean()), ratio_intervals(hits, counts)[0]
