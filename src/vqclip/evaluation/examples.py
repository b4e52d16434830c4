"""Hits and misses of a search, accuracy of each class, and which classes are confused.

Shapes: Q queries, M candidates, E embedding width, n images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from vqclip.evaluation.details import (
    MAX_CLASSES,
    MAX_CONFUSED,
    ClassAccuracy,
    Confused,
    Confusion,
    DetailsConfig,
    Mode,
    clip_text,
)
from vqclip.evaluation.ranking import SAME, Ranks

Direction = Literal["image_to_text", "text_to_image", "image_to_class"]


def choose_examples(ranks: Ranks, config: DetailsConfig, direction: Direction) -> tuple[list[int], list[int]]:
    """Return the rows of hits and of misses; see `Examples`. Equal ones are in the order of the set.

    Args:
        ranks: places of the right candidates, with `Ranks.best_wrong`.
        config: numbers of hits and misses.
        direction: misses of classes are sorted by confidence, the others by rank.
    """
    # Rounded, so that the last bits of a score, which differ between numbers of ranks, do not decide.
    lead = ((ranks.best.double() - ranks.best_wrong.double()).clamp(-2, 2) / SAME).round()
    by_lead = lead.argsort(stable=True, descending=True)
    hits = by_lead[(lead > 1)[by_lead] & (ranks.above == 0)[by_lead]]
    order = lead.argsort(stable=True)
    if direction != "image_to_class":
        order = order[ranks.place[order].argsort(stable=True, descending=True)]
    misses = order[ranks.place[order] > 1]
    return hits[: config.hits].tolist(), misses[: config.misses].tolist()


def class_accuracies(names: Sequence[str], labels: Tensor, hits: Mapping[Mode, Tensor]) -> tuple[ClassAccuracy, ...]:
    """Return the accuracy of each class that has images; of too many classes, of those with the lowest one.

    Args:
        names: of the K classes.
        labels: ``(n,)`` int64.
        hits: mode → ``(n,)`` in [0, 1]; the last mode decides which accuracies are lowest.
    """
    present, which, counts = labels.unique(return_inverse=True, return_counts=True)
    rates = {
        mode: (torch.zeros(len(counts), dtype=torch.float64).index_add_(0, which, each) / counts).clamp(0, 1)
        for mode, each in hits.items()
    }
    lowest = list(rates.values())[-1].argsort(stable=True)[:MAX_CLASSES].sort().values
    return tuple(
        ClassAccuracy(
            name=clip_text(names[int(present[row])]),
            images=int(counts[row]),
            accuracy={mode: float(each[row]) for mode, each in rates.items()},
        )
        for row in lowest.tolist()
    )


def confusion(names: Sequence[str], labels: Tensor, predicted: Tensor) -> Confusion:
    """Return the confusion matrix of labels ``(n,)`` int64 and predicted classes ``(n,)`` int64."""
    count, shown = len(names), [clip_text(name) for name in names]
    pairs, images = (labels * count + predicted).unique(return_counts=True)
    right, wrong = pairs // count, pairs % count
    order = torch.where(right == wrong, -1, images).argsort(stable=True, descending=True)
    largest = [place for place in order[:MAX_CONFUSED].tolist() if right[place] != wrong[place]]
    chosen = list(range(count)) if count <= MAX_CONFUSED else _of_largest(right, wrong, order.tolist())
    place_of = {label: place for place, label in enumerate(chosen)}
    counts = [[0] * len(chosen) for _ in chosen]
    for a, b, number in zip(right.tolist(), wrong.tolist(), images.tolist(), strict=True):
        if a in place_of and b in place_of:
            counts[place_of[a]][place_of[b]] = number
    return Confusion(
        classes=tuple(shown[label] for label in chosen),
        counts=tuple(map(tuple, counts)),
        complete=len(chosen) == count,
        largest=tuple(
            Confused(right=shown[right[place]], predicted=shown[wrong[place]], images=int(images[place]))
            for place in largest
        ),
    )


def _of_largest(right: Tensor, wrong: Tensor, order: Sequence[int]) -> list[int]:
    """Return the classes of the largest confusions, at most `MAX_CONFUSED`, ascending."""
    chosen: set[int] = set()
    for place in order:
        both = {int(right[place]), int(wrong[place])}
        if len(both) == 1 or len(chosen | both) > MAX_CONFUSED:
            break
        chosen |= both
    return sorted(chosen)
