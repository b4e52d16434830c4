"""Linear probe: logistic regression on the codes of labelled images, as in CLIP's paper (Radford et al. 2021)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vqclip.errors import DataError
from vqclip.evaluation import logistic
from vqclip.evaluation.encode import Encoder, Mode
from vqclip.evaluation.labelled import LabelledImages, ProbeConfig, encode_both, probe_result
from vqclip.evaluation.ranking import CLASS_FIGURES, Classified
from vqclip.evaluation.results import Result, common_modes
from vqclip.model import CLIP

_SWEEP = tuple(10.0 ** (exponent / 2) for exponent in range(2, -13, -1))
"""Strengths of the L2 penalty that are tried, from 10 to 1e-6; each fit begins with the one before."""
_OVERFIT = 1.1
"""The trials end when the cross-entropy of the images held out is by this factor above its minimum."""
_HELD_OUT = 5
"""Every fifth training image of a class is held out to choose the penalty."""
_SAME = 1e-5
"""Largest difference of logits that is a tie."""


class LinearProbeConfig(ProbeConfig):
    """Top-1, top-5 and mean per class recall of logistic regression.

    The L2 penalty is the one that is best on every fifth training image of each class; the regression is then fitted to
    all training images.
    """

    figures: ClassVar[tuple[str, ...]] = tuple(f"linear_{name}" for name in CLASS_FIGURES)

    kind: Literal["linear_probe"] = "linear_probe"
    name: str = "linear probe"
    """Title of the results."""
    l2: float | None = Field(None, gt=0, le=1e6)
    """Strength of the penalty l2 / 2 · |weights|² beside the mean cross-entropy, for features of variance 1; null: the
    best one between 10 and 1e-6."""

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Fit and test a classifier in each of the three modes; the ranks share the modes.

        Raises:
            DataError: the data cannot be used, or has too few training images to hold some out; raised on every rank.
        """
        train, test = encode_both(self, model, encoder, name)
        held_out = _held_out(train.labels)
        if self.l2 is None and not held_out.any():
            raise DataError(
                f"{self.name}: got fewer than {_HELD_OUT} training images of every class, so none can be held out to "
                "choose the penalty; expected more images, or a value of l2"
            )
        modes = common_modes(test.encoded)[0]
        distinct = [mode for number, mode in enumerate(modes) if _first_equal(modes, mode, train, test) == number]
        with encoder.partition.raise_on_all_ranks():
            mine = [_probe(self, train, test, distinct[n], held_out) for n in encoder.partition.indices(len(distinct))]
        by_mode = dict(zip(distinct, encoder.partition.gather_items(mine), strict=True))
        fitted = {mode: by_mode[modes[_first_equal(modes, mode, train, test)]] for mode in modes}
        found = {
            mode: Classified(torch.tensor(hits, dtype=torch.float64), torch.tensor(predicted, dtype=torch.int64))
            for mode, (hits, predicted, _) in fitted.items()
        }
        result = probe_result(self, model, encoder, train, test, found)
        chosen = ", ".join(f"{mode.replace('_', ' ')} {l2:.1g}" for mode, (_, _, l2) in fitted.items())
        return dataclasses.replace(result, notes=[*result.notes, f"L2 of the linear probe: {chosen}"])


def _first_equal(modes: list[Mode], mode: Mode, train: LabelledImages, test: LabelledImages) -> int:
    """Return the number of the first mode whose vectors are those of ``mode``, so that each is fitted once."""
    return next(
        number
        for number, other in enumerate(modes)
        if all(torch.equal(each.encoded.embeddings[other], each.encoded.embeddings[mode]) for each in (train, test))
    )


def _held_out(labels: Tensor) -> Tensor:
    """Return ``(n,)`` bool, True at every fifth image of each class."""
    order = labels.argsort(stable=True)
    sizes = labels.bincount()
    starts = (sizes.cumsum(0) - sizes)[labels[order]]
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[order] = (torch.arange(len(labels)) - starts) % _HELD_OUT == _HELD_OUT - 1
    return held_out


def _probe(
    config: LinearProbeConfig, train: LabelledImages, test: LabelledImages, mode: Mode, held_out: Tensor
) -> tuple[list[list[float]], list[int], float]:
    """Return the `Classified` test images in one mode as lists, and its penalty."""
    # In float64, so that rounding in the features, which differs between numbers of ranks, does not grow in the fit.
    raw, other = (each.encoded.embeddings[mode].double() for each in (train, test))
    mean, count = raw.mean(dim=0), len(test.source.classnames)
    scale = (raw - mean).square().mean().sqrt().clamp(min=torch.finfo(raw.dtype).tiny)
    x, labels = (raw - mean) / scale, train.labels.to(raw.device)
    l2 = config.l2 or _choose(x, labels, count, held_out.to(raw.device))
    weights = logistic.fit(x, labels, count, l2)
    hits, predicted = _classify(weights, (other - mean) / scale, test.labels.to(raw.device))
    return hits.tolist(), predicted.tolist(), l2


def _choose(x: Tensor, labels: Tensor, count: int, held_out: Tensor) -> float:
    """Return the penalty with the highest accuracy on the images held out, the strongest of several."""
    kept, rest = (x[~held_out], labels[~held_out]), (x[held_out], labels[held_out])
    weights, best, least, chosen = None, -1.0, math.inf, _SWEEP[0]
    for l2 in _SWEEP:
        weights = logistic.fit(*kept, count, l2, weights)
        loss, accuracy = logistic.loss(weights, *rest), float(_classify(weights, *rest).hits[0].mean())
        if accuracy > best:
            best, chosen = accuracy, l2
        least = min(least, loss)
        if loss > _OVERFIT * least:  # weaker penalties take longest, and fit worse
            break
    return chosen


def _classify(weights: Tensor, x: Tensor, labels: Tensor) -> Classified:
    """Return the classes of ``x`` with the highest logits."""
    return Classified.join(
        [
            Classified.of_scores(logistic.logits(weights, part), own, _SAME)
            for part, own in logistic.blocks(x, labels, len(weights))
        ]
    )
