"""Accuracy against bits: the figures with prefixes of the stored ids, on a part of the images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vqclip.evaluation.code_maps import SomeCodes
from vqclip.evaluation.details import Bits, BitsPoint, Interval
from vqclip.quantizers import Prefix
from vqclip.tokenizer import ImageTokenizer

_BATCH = 256


def accuracy_by_bits(
    tokenizer: ImageTokenizer,
    codes: SomeCodes,
    rows: Sequence[int],
    figures: Callable[[Tensor], tuple[dict[str, float], dict[str, Interval]]],
) -> Bits | None:
    """Return figures for the prefixes of the images' ids that `Prefix.shorter` chooses; texts keep all of their ids.

    The towers do not run: the stored ids are embedded again.

    Args:
        tokenizer: in evaluation mode.
        codes: contains the ids of ``rows``.
        rows: rows of the images.
        figures: function of their embeddings ``(m, E)`` that returns figures and intervals.

    Returns:
        None if there is only one prefix, all of the ids.
    """
    whole = tokenizer.quantizer.extent
    prefixes = whole.shorter()
    if len(prefixes) < 2 or not rows:
        return None
    ids, points = codes.of(rows), []
    for prefix in prefixes:
        with torch.no_grad():
            parts = [
                tokenizer.embed(tokenizer.truncate(part.to(tokenizer.device), *prefix)) for part in ids.split(_BATCH)
            ]
        rates, intervals = figures(torch.cat(parts))
        sizes = [tokenizer.codebook_sizes[column] for column in tokenizer.quantizer.columns(*prefix)]
        bits = tokenizer.num_tokens * math.fsum(map(math.log2, sizes))
        points.append(BitsPoint(label=_label(prefix, whole), bits_per_image=bits, figures=rates, intervals=intervals))
    return Bits(images=len(rows), points=tuple(sorted(points, key=lambda point: point.bits_per_image)))


def _label(prefix: Prefix, whole: Prefix) -> str:
    words = zip(("stages", "codebooks"), prefix, whole, strict=True)
    return ", ".join(f"{number} of {most} {word}" for word, number, most in words if most > 1)
