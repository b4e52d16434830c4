"""Accuracy against bits: the figures with prefixes of the stored ids, on a part of the images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vqclip.evaluation.code_maps import SomeCodes
from vqclip.evaluation.details import Bits, BitsPoint, Interval
from vqclip.nn.precision import Precision
from vqclip.quantizers import Prefix
from vqclip.tokenizer import ImageTokenizer

_BATCH = 256

FiguresOf = Callable[[list[int], Mapping[str, Tensor]], Mapping[str, tuple[dict[str, float], dict[str, Interval]]]]
"""m rows and labels with embeddings ``(m, E)`` of these rows → labels with figures and intervals."""


def accuracy_by_bits(
    tokenizer: ImageTokenizer,
    codes: SomeCodes,
    rows: list[int],
    whole: Tensor,
    figures: FiguresOf,
    precision: Precision,
) -> Bits | None:
    """Return figures for the prefixes of the images' ids that `Prefix.shorter` chooses; texts keep all of their ids.

    Prefixes are those by stages if there are several, otherwise those by codebooks. The towers do not run: the stored
    ids are embedded again.

    Args:
        tokenizer: in evaluation mode.
        codes: contains the ids of ``rows``.
        rows: rows of the images.
        whole: ``(m, E)``, their embeddings with all ids.
        figures: function that returns the figures of embeddings.
        precision: of the evaluation; see `Encoder`.

    Returns:
        None if there is only one prefix, all of the ids.
    """
    extent = tokenizer.quantizer.extent
    along = [each for each in extent.shorter() if extent.stages <= 1 or each.codebooks == extent.codebooks]
    prefixes = {prefix_label(prefix, extent): prefix for prefix in along}
    if len(prefixes) < 2 or not rows:
        return None
    ids = codes.of(rows).to(tokenizer.device).split(_BATCH)
    embeddings = {prefix_label(extent, extent): whole}
    with torch.no_grad():
        for label, prefix in prefixes.items():
            if prefix != extent:
                parts = [tokenizer.embed(tokenizer.truncate(part, *prefix), precision) for part in ids]
                embeddings[label] = torch.cat(parts).to(whole)
    found = figures(rows, embeddings)
    points = [
        BitsPoint(
            label=label, bits_per_image=prefix_bits(tokenizer, prefixes[label]), figures=rates, intervals=intervals
        )
        for label, (rates, intervals) in found.items()
    ]
    return Bits(images=len(rows), points=tuple(sorted(points, key=lambda point: point.bits_per_image)))


def prefix_bits(tokenizer: ImageTokenizer, prefix: Prefix) -> float:
    """Return the bits of a prefix of an image's ids."""
    columns = tokenizer.quantizer.columns(*prefix)
    return tokenizer.num_tokens * math.fsum(math.log2(tokenizer.codebook_sizes[column]) for column in columns)


def prefix_label(prefix: Prefix, whole: Prefix) -> str:
    """Return a name such as ``2 of 4 stages``; empty for one stage of one codebook."""
    words = zip(("stages", "codebooks"), prefix, whole, strict=True)
    return ", ".join(f"{number} of {most} {word}" for word, number, most in words if most > 1)
