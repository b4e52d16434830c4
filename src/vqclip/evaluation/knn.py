"""Classification of images by their nearest labelled neighbours (Wu et al. 2018; DINO, Caron et al. 2021)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vqclip.errors import DataError
from vqclip.evaluation import ranking
from vqclip.evaluation.encode import Encoder, Mode
from vqclip.evaluation.labelled import ProbeConfig, encode_both, probe_result
from vqclip.evaluation.ranking import CLASS_FIGURES, SAME, Classified
from vqclip.evaluation.results import Result, common_modes
from vqclip.model import CLIP
from vqclip.process import progress


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

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Classify every test image by its neighbours in each of the three modes; each rank classifies its part.

        Raises:
            DataError: the data cannot be used, or has fewer training images than neighbours; raised on every rank.
        """
        train, test = encode_both(self, model, encoder, name)
        if len(train.labels) < self.neighbours:
            raise DataError(
                f"{self.name}: got {len(train.labels)} training images, expected at least {self.neighbours}"
            )
        count, partition = len(test.source.classnames), encoder.partition
        mine = torch.tensor(partition.indices(len(test.labels)), dtype=torch.int64)
        found: dict[Mode, Classified] = {}
        for mode in common_modes(test.encoded)[0]:
            with partition.raise_on_all_ranks():  # one rank may be asked to stop
                rows, bank = (F.normalize(each.encoded.embeddings[mode], dim=-1) for each in (test, train))
                some = rows[mine.to(rows.device)]
                part = vote(some, bank, test.labels[mine], train.labels, count, self.neighbours, self.temperature)
            hits, predicted = (partition.gather_rows(each.to(rows.device)).cpu() for each in (part.hits.T, part[1]))
            found[mode] = Classified(hits.T, predicted)
        return probe_result(self, model, encoder, train, test, found)


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
