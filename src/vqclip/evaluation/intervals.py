"""95 % confidence intervals of the figures: how far they would vary with other images of the same kind.

A mean of one hit per image: Wilson's score interval (Wilson 1927; Brown, Cai and DasGupta 2001), which is right near 0
and 1 too. A hit may be a fraction (a tie), whose variance is at most that of a 0/1 hit of the same mean. Figures that
are no such mean (captions of one image count together; means over classes) have a percentile bootstrap over images
(Efron 1979) with keyed draws, so that they are equal on every number of ranks. The weights of the model are fixed: runs
with other seeds may differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vqclip.evaluation.details import Interval, Mode
from vqclip.seeds import derive_seed

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
RESAMPLES = 500
_BLOCK = 1 << 21
"""Most draws in memory."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""Number of draws of each image ``(r, n)`` in r resamples → figures ``(r, F)``."""


def wilson(rate: float, count: int) -> Interval:
    """Return Wilson's interval of a rate among ``count`` independent trials; 0 to 1 without any."""
    if count == 0:
        return 0.0, 1.0
    square = _Z * _Z / count
    centre = (rate + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(rate * (1 - rate) / count + square / (4 * count))
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap(count: int, statistic: Statistic) -> list[Interval]:
    """Return the 2.5 and 97.5 % percentiles of each of F rates over resamples of ``count`` images."""
    return [
        # If all resamples are equal, as where every hit is 1, Wilson's interval is the honest one.
        wilson(low, count) if low == high else (max(0.0, low), min(1.0, high))
        for low, high in _percentiles(count, statistic)
    ]


def mean_value_intervals(values: Tensor) -> list[tuple[float, float]]:
    """Return the bootstrap interval of the mean of each of F values of images, of any unit.

    Args:
        values: ``(F, n)`` float64 on the CPU, n at least 1.
    """
    each, count = values.numpy(), values.shape[1]
    return _percentiles(count, lambda drawn: drawn @ each.T / count)


def _percentiles(count: int, statistic: Statistic) -> list[tuple[float, float]]:
    rng = np.random.default_rng(derive_seed("confidence interval", count))
    rows, found = max(1, _BLOCK // max(1, count)), []
    for start in range(0, RESAMPLES, rows):
        some = min(rows, RESAMPLES - start)
        draws = rng.integers(0, count, (some, count)) + count * np.arange(some)[:, None]
        found.append(statistic(np.bincount(draws.ravel(), minlength=some * count).reshape(some, count)))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def ratio_intervals(hits: Tensor, counts: Tensor) -> list[Interval]:
    """Return the interval of each mean hit; hits of one image belong together.

    Args:
        hits: ``(F, Q)`` in [0, 1] on the CPU, image by image.
        counts: ``(n,)`` int64, hits of each image, at least 1; their sum is Q.
    """
    if bool((counts == 1).all()):
        return [wilson(rate, len(counts)) for rate in hits.mean(dim=1).tolist()]
    sizes = counts.numpy()
    sums = np.add.reduceat(hits.numpy(), np.cumsum(sizes) - sizes, axis=1)
    return bootstrap(len(sizes), lambda drawn: (drawn @ sums.T) / (drawn @ sizes)[:, None])


def class_intervals(
    figures: Sequence[str], hits: Mapping[Mode, Tensor], labels: Tensor
) -> dict[Mode, dict[str, Interval]]:
    """Return the intervals of the `CLASS_FIGURES` of each mode.

    Args:
        figures: names of the figures, in the order of `CLASS_FIGURES`.
        hits: mode → ``(len(DEPTHS), n)`` in [0, 1] on the CPU.
        labels: ``(n,)`` int64.
    """
    if not len(labels):
        return {}
    means = class_mean_intervals(torch.stack([each[0] for each in hits.values()]), labels)
    ones = torch.ones_like(labels)
    return {
        mode: dict(zip(figures, [*ratio_intervals(each, ones), mean], strict=True))
        for (mode, each), mean in zip(hits.items(), means, strict=True)
    }


def class_mean_intervals(hits: Tensor, labels: Tensor) -> list[Interval]:
    """Return the intervals of the mean of the classes' own mean hits; a resample without a class leaves it out.

    Args:
        hits: ``(F, n)`` in [0, 1] on the CPU.
        labels: ``(n,)`` int64, at least one.
    """
    order = labels.argsort(stable=True)
    sizes = labels.unique(return_counts=True)[1].numpy()
    starts = np.cumsum(sizes) - sizes
    distinct, which = hits[:, order].unique(dim=0, return_inverse=True)  # quantized and codes only are often equal
    sorted_hits = distinct.float().numpy()

    def statistic(drawn: np.ndarray) -> np.ndarray:
        drawn = drawn.astype(np.float32)  # of places in the order of the classes
        sizes = np.add.reduceat(drawn, starts, axis=1)
        present = (sizes > 0).sum(1)
        sums = [np.add.reduceat(drawn * each, starts, axis=1) for each in sorted_hits]
        return np.stack([(each / np.maximum(sizes, 1)).sum(1) / present for each in sums], axis=1)

    found = bootstrap(len(labels), statistic)
    return [found[number] for number in which.tolist()]
