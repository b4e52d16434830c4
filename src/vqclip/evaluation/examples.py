"""Hits and misses of a search: which queries find the right thing with the largest lead, and which find it last.

Shapes: Q queries, M candidates, E embedding width, n images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from vqclip.evaluation.details import Candidate, DetailsConfig, Example, Examples, ShownImage, clip_text
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


def make_examples(
    queries: Tensor,
    candidates: Tensor,
    query_group: Tensor,
    group: Tensor,
    ranks: Ranks,
    config: DetailsConfig,
    direction: Direction,
    *,
    image: Callable[[int], ShownImage],
    image_of_query: Sequence[int] | Tensor,
    texts: Sequence[str],
    text_of_query: Callable[[int, int], str],
) -> Examples:
    """Return the hits and misses of a search.

    Args:
        queries: ``(Q, E)`` unit-norm.
        candidates: ``(M, E)`` unit-norm.
        query_group: ``(Q,)`` int64, see `vqclip.evaluation.ranking.rank`.
        group: ``(M,)`` int64.
        ranks: what `rank` returned, with `Ranks.best_wrong`.
        config: numbers of hits, misses and found candidates.
        direction: queries and candidates.
        image: function of an image's row.
        image_of_query: row of the image of each query.
        texts: text of each candidate.
        text_of_query: function of the row of a query and of its nearest right candidate; see `Example.text`.
    """

    def example(row: int) -> Example:
        scores = (queries[row] @ candidates.T).cpu()
        right = (group == query_group[row]).cpu()
        order = (scores.double() / SAME).round().argsort(stable=True, descending=True)
        first_right = int(order[right[order]][0])
        found = tuple(
            Candidate(
                text=clip_text(texts[place]),
                image=image(place) if direction == "text_to_image" else None,
                score=float(scores[place]),
                right=bool(right[place]),
            )
            for place in order[: config.nearest].tolist()
        )
        return Example(
            image=image(int(image_of_query[row])),
            text=clip_text(text_of_query(row, first_right)),
            score=float(ranks.best[row]),
            rank=int(ranks.place[row]),
            candidates=len(candidates),
            found=found,
        )

    hits, misses = choose_examples(ranks, config, direction)
    return Examples(direction=direction, hits=tuple(map(example, hits)), misses=tuple(map(example, misses)))
