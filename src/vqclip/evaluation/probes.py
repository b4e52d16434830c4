"""Classifiers that are fitted to the codes of labelled images: k nearest neighbours and the linear probe.

The neighbours vote as in Wu et al. 2018 and DINO (Caron et al. 2021). The linear probe is logistic regression, as in
CLIP's paper (Radford et al. 2021), fitted by L-BFGS: deterministic, in blocks of rows.

Shapes: n samples, Q queries, D features, E embedding width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from vqclip.data import Source
from vqclip.errors import DataError
from vqclip.evaluation import ranking
from vqclip.evaluation.encode import Encoder, Features, Mode, RankPartition
from vqclip.evaluation.image_details import make_details
from vqclip.evaluation.images import (
    EncodedImages,
    ImagesConfig,
    LabelledData,
    TrainingData,
    encode_set,
    open_data,
)
from vqclip.evaluation.intervals import class_intervals
from vqclip.evaluation.ranking import CLASS_FIGURES, DEPTHS, SAME, Classified, class_figures, rank
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.evaluation.zero_shot import class_details
from vqclip.model import CLIP
from vqclip.process import progress

_SWEEP = tuple(10.0 ** (exponent / 2) for exponent in range(2, -13, -1))
"""Strengths of the L2 penalty that are tried, from 10 to 1e-6; each fit begins with the one before."""
_OVERFIT = 1.1
"""The trials end when the cross-entropy of the images held out is by this factor above its minimum."""
_HELD_OUT = 5
"""Every fifth training image of a class is held out to choose the penalty."""
_SAME_LOGITS = 1e-5
"""Largest difference of logits that is a tie."""
BLOCK = 2**24
"""Most logits of a fit in memory: 128 MiB in float64."""
_ITERATIONS = 1000
"""Most iterations of a fit, as in CLIP's linear probes (Radford et al. 2021)."""


class ProbeConfig(ImagesConfig):
    """A classifier that is fitted to the codes of labelled training images, and tested on others."""

    needs_texts: ClassVar[bool] = False
    labelled: ClassVar[bool | None] = True

    data: LabelledData
    """The labelled test images."""
    train: TrainingData
    """The labelled training images, of the same classes."""
    train_limit: int | None = Field(None, ge=1)
    """Number of training images to use, evenly spread over the set; null uses all."""
    features: Features = "embedding"
    """Vector of an image. embedding: the joint embedding. tokens: the mean of the vectors that `decode` returns."""

    @model_validator(mode="after")
    def _has_other_training_images(self) -> ProbeConfig:
        if self.train == self.data and self.held_out is None:
            raise ValueError(
                "train: got the images of data; expected others, to fit the classifier to: set train.path, or the "
                "splits of both (data.split, train.split)"
            )
        return self

    def open(self, partition: RankPartition) -> Source:
        """Open both sets on every rank, and return the test images; raise DataError if they have no classes."""
        open_data(self.train, partition, True, "train", self.held_out)
        return super().open(partition)

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Fit a classifier to the training images, and classify the test images, in each of the three modes.

        Chance is what a classifier finds that knows no more than how many training images each class has.

        Raises:
            DataError: the data cannot be used, their classes differ, or there are too few; raised on every rank.
        """
        train = encode_set(self, self.train, model, encoder, f"{name}-train", self.train_limit, self.features, "train")
        test = encode_set(self, self.data, model, encoder, f"{name}-image", self.limit, self.features)
        names, count = test.source.classnames, len(test.source.classnames)
        if train.source.classnames != names:
            few = [each for each in names if each not in train.source.classnames][:5]
            told = f"classes that only the test images have: {', '.join(few)}"
            raise DataError(
                f"{self.name}: got training images of {len(train.source.classnames)} classes and test images of "
                f"{count}, {told if few else 'other names or another order'}; expected the same classes in the same "
                "order"
            )
        if not len(train.labels) or not len(test.labels):
            raise DataError(f"{self.name}: got {len(train.labels)} training and {len(test.labels)} test images")
        found, told_by_probe = self.classify(train, test, encoder.partition)
        prefix = self.figures[0].removesuffix(CLASS_FIGURES[0])
        sizes = torch.bincount(train.labels, minlength=count).double()[:, None]
        each = torch.arange(count)
        by_class = rank(torch.ones(1, 1, dtype=torch.float64).expand(count, 1), sizes, each, each).hits(DEPTHS)
        chance = class_figures(by_class[:, test.labels], test.labels)
        rates = {mode: class_figures(classified.hits, test.labels) for mode, classified in found.items()}
        notes = [f"training images: {note}" for note in train.notes] + test.notes + common_modes(test.encoded)[1]
        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes({mode: {prefix + key: one[key] for key in one} for mode, one in rates.items()}),
            chance={prefix + key: rate for key, rate in chance.items()},
            samples=len(test.labels),
            classes=count,
            captions=0,
            usage={"image": test.encoded.usage},
            notes=notes + told_by_probe,
            details=make_details(
                model.image, encoder, test, names, lambda maker: class_details(maker, test, names, found)
            ),
            intervals=class_intervals(self.figures, {mode: each.hits for mode, each in found.items()}, test.labels),
        )

    def classify(
        self, train: EncodedImages, test: EncodedImages, partition: RankPartition
    ) -> tuple[dict[Mode, Classified], list[str]]:
        """Return the classes of all test images in each mode, on every rank, and remarks for the reader.

        Raises:
            DataError: there are too few training images; raised on every rank.
        """
        raise NotImplementedError


class KnnConfig(ProbeConfig):
    """Top-1, top-5 and mean per class recall of the k nearest neighbours, weighted by exp(cosine / temperature)."""

    figures: ClassVar[tuple[str, ...]] = tuple(f"knn_{name}" for name in CLASS_FIGURES)

    kind: Literal["knn"] = "knn"
    name: str = "k-NN"
    """Title of the results."""
    neighbours: int = Field(20, ge=1, le=10_000)
    """k, training images that vote."""
    temperature: float = Field(0.07, gt=0, le=100)
    """Temperature of the weights."""

    def classify(
        self, train: EncodedImages, test: EncodedImages, partition: RankPartition
    ) -> tuple[dict[Mode, Classified], list[str]]:
        """Classify every test image by its neighbours; each rank classifies its part."""
        if len(train.labels) < self.neighbours:
            raise DataError(
                f"{self.name}: got {len(train.labels)} training images, expected at least {self.neighbours}"
            )
        count, found = len(test.source.classnames), dict[Mode, Classified]()
        mine = torch.tensor(partition.indices(len(test.labels)), dtype=torch.int64)
        for mode in common_modes(test.encoded)[0]:
            with partition.raise_on_all_ranks():  # one rank may be asked to stop
                rows, bank = (F.normalize(each.encoded.embeddings[mode], dim=-1) for each in (test, train))
                some = rows[mine.to(rows.device)]
                part = vote(some, bank, test.labels[mine], train.labels, count, self.neighbours, self.temperature)
            hits, predicted = (partition.gather_rows(each.to(rows.device)).cpu() for each in (part.hits.T, part[1]))
            found[mode] = Classified(hits.T, predicted)
        return found, []


def vote(
    queries: Tensor, bank: Tensor, right: Tensor, labels: Tensor, classes: int, neighbours: int, temperature: float
) -> Classified:
    """Return the classes with the most votes, and for each of `DEPTHS` whether a query's class is among them.

    Training images that are equally near share the places that are left; classes with equally many votes count as in a
    random order.

    Args:
        queries: ``(Q, E)`` unit-norm.
        bank: ``(n, E)`` unit-norm, the training images.
        right: ``(Q,)`` int64, the class of each query.
        labels: ``(n,)`` int64, the class of each training image.
        classes: K.
        neighbours: k, at most n.
        temperature: of the weights.

    Raises:
        StopRequested: this rank has been asked to stop (`vqclip.process.progress`).
    """
    labels, right = labels.to(bank.device), right.to(bank.device)
    found = []
    rows = max(1, ranking.BLOCK // max(len(bank), classes))
    for part, own in zip(queries.split(rows), right.split(rows), strict=True):
        progress.heartbeat()
        scores = part @ bank.T
        last = scores.topk(neighbours, dim=1).values[:, -1:]
        above, level = scores > last + SAME, (scores - last).abs() <= SAME
        shares = (neighbours - above.sum(1, keepdim=True)) / level.sum(1, keepdim=True)
        row, column = (above | level).nonzero(as_tuple=True)
        weights = ((scores - scores.amax(dim=1, keepdim=True)) / temperature).exp().double()
        weights = (weights * torch.where(above, 1.0, shares))[row, column]
        votes = torch.zeros(len(part), classes, dtype=torch.float64, device=bank.device)
        votes.index_put_((row, labels[column]), weights, accumulate=True)
        votes /= votes.sum(dim=1, keepdim=True)
        found.append(Classified.of_scores(votes, own, SAME / temperature))
    return Classified.join(found)


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

    def classify(
        self, train: EncodedImages, test: EncodedImages, partition: RankPartition
    ) -> tuple[dict[Mode, Classified], list[str]]:
        """Fit and test a classifier in each mode; the ranks share the modes."""
        held_out = _held_out(train.labels)
        if self.l2 is None and not held_out.any():
            raise DataError(
                f"{self.name}: got fewer than {_HELD_OUT} training images of every class, so none can be held out to "
                "choose the penalty; expected more images, or a value of l2"
            )
        modes = common_modes(test.encoded)[0]
        vectors = {mode: [each.encoded.embeddings[mode] for each in (train, test)] for mode in modes}
        first = {  # mode with the same vectors, so that each is fitted once
            mode: next(each for each in modes if all(map(torch.equal, vectors[each], vectors[mode]))) for mode in modes
        }
        distinct = [mode for mode in modes if first[mode] == mode]
        with partition.raise_on_all_ranks():
            mine = [_probe(self, train, test, distinct[n], held_out) for n in partition.indices(len(distinct))]
        by_mode = dict(zip(distinct, partition.gather_items(mine), strict=True))
        fitted = {mode: by_mode[first[mode]] for mode in modes}
        found = {
            mode: Classified(torch.tensor(hits, dtype=torch.float64), torch.tensor(predicted, dtype=torch.int64))
            for mode, (hits, predicted, _) in fitted.items()
        }
        chosen = ", ".join(f"{mode.replace('_', ' ')} {l2:.1g}" for mode, (_, _, l2) in fitted.items())
        return found, [f"L2 of the linear probe: {chosen}"]


def _held_out(labels: Tensor) -> Tensor:
    """Return ``(n,)`` bool, True at every fifth image of each class."""
    order = labels.argsort(stable=True)
    sizes = labels.bincount()
    starts = (sizes.cumsum(0) - sizes)[labels[order]]
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[order] = (torch.arange(len(labels)) - starts) % _HELD_OUT == _HELD_OUT - 1
    return held_out


def _probe(
    config: LinearProbeConfig, train: EncodedImages, test: EncodedImages, mode: Mode, held_out: Tensor
) -> tuple[list[list[float]], list[int], float]:
    """Return the `Classified` test images in one mode as lists, and its penalty."""
    # In float64, so that rounding in the features, which differs between numbers of ranks, does not grow in the fit.
    raw, other = (each.encoded.embeddings[mode].double() for each in (train, test))
    mean, count = raw.mean(dim=0), len(test.source.classnames)
    scale = (raw - mean).square().mean().sqrt().clamp(min=torch.finfo(raw.dtype).tiny)
    x, labels = (raw - mean) / scale, train.labels.to(raw.device)
    l2 = config.l2 or _choose(x, labels, count, held_out.to(raw.device))
    weights = fit_logistic(x, labels, count, l2)
    hits, predicted = _classify(weights, (other - mean) / scale, test.labels.to(raw.device))
    return hits.tolist(), predicted.tolist(), l2


def _choose(x: Tensor, labels: Tensor, count: int, held_out: Tensor) -> float:
    """Return the penalty with the highest accuracy on the images held out, the strongest of several."""
    kept, rest = (x[~held_out], labels[~held_out]), (x[held_out], labels[held_out])
    weights, best, least, chosen = None, -1.0, math.inf, _SWEEP[0]
    for l2 in _SWEEP:
        weights = fit_logistic(*kept, count, l2, weights)
        loss, accuracy = float(_loss(weights, *rest)), float(_classify(weights, *rest).hits[0].mean())
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
            Classified.of_scores(logits(weights, part), own, _SAME_LOGITS)
            for part, own in _blocks(x, labels, len(weights))
        ]
    )


def fit_logistic(x: Tensor, labels: Tensor, classes: int, l2: float, start: Tensor | None = None) -> Tensor:
    """Minimise mean cross-entropy + ``l2`` / 2 · |weights|², without a penalty on the bias.

    Args:
        x: ``(n, D)`` float64.
        labels: ``(n,)`` int64.
        classes: K.
        l2: strength of the penalty.
        start: ``(K, D + 1)`` to begin with; None: zeros.

    Returns:
        ``(K, D + 1)``: weights, and the bias in the last column.

    Raises:
        StopRequested: this rank has been asked to stop (`vqclip.process.progress`).
    """
    with torch.inference_mode(False):  # tensors of that mode have no gradient
        x, labels = (each.clone() if each.is_inference() else each for each in (x, labels))
        weights = torch.zeros(classes, x.shape[1] + 1).to(x) if start is None else start.clone()
        weights.requires_grad_()
    solver = torch.optim.LBFGS(
        [weights],
        max_iter=_ITERATIONS,
        tolerance_grad=1e-5,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        value = l2 / 2 * weights[:, :-1].square().sum()
        value.backward()
        return value.detach() + _loss(weights, x, labels)

    with torch.inference_mode(False), torch.enable_grad():
        solver.step(closure)
    return weights.detach()


def logits(weights: Tensor, x: Tensor) -> Tensor:
    """Return the logits ``(n, K)`` of ``x`` ``(n, D)``."""
    return torch.addmm(weights[:, -1], x, weights[:, :-1].T)


def _blocks(x: Tensor, labels: Tensor, classes: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Split samples and labels into blocks whose logits fit into `BLOCK`."""
    rows = max(1, BLOCK // classes)
    return list(zip(x.split(rows), labels.split(rows), strict=True))


def _loss(weights: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy; add its gradient to that of ``weights``, if these have one."""
    total = x.new_zeros(())
    for part, own in _blocks(x, labels, len(weights)):
        progress.heartbeat()
        loss = F.cross_entropy(logits(weights, part), own, reduction="sum") / len(x)
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total
