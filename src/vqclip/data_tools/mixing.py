"""Simulate, without data, the shuffling of data that are sorted by topic.

The figure is Pearson's chi-square over its degrees of freedom, of the topics in a batch against equal shares: 1 for
independent draws, less for draws that are more even, 1 + k where each topic comes in groups of about k + 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vqclip.data.draws import hash_integers
from vqclip.data.order import GlobalOrder

__all__ = ["simulate_mixing", "topic_variance"]


def topic_variance(samples: np.ndarray, size: int, topics: int) -> float:
    """Return the variance of the topic shares of some samples over that of independent draws.

    Args:
        samples: int64 in 0 ... size - 1.
        size: samples of the data, which are sorted: each topic is a run of about ``size / topics`` of them.
        topics: number of topics, at least 2.
    """
    edges = -(-np.arange(topics + 1) * size // topics)
    expected = np.diff(edges) * (len(samples) / size)
    counts = np.bincount(samples * topics // size, minlength=topics)
    return float(((counts - expected) ** 2 / expected).sum() / (topics - 1))


def simulate_mixing(
    order: GlobalOrder, batch_size: int, topics: int, seed: int, draws: int = 8, steps: int = 1
) -> float:
    """Return the mean `topic_variance` of some batches of the first epoch.

    Args:
        order: order of one source.
        batch_size: G, samples of a global batch.
        topics: number of topics in the data.
        seed: chooses the batches.
        draws: number of simulated batches.
        steps: successive batches that are taken as one; the topics of neighbouring batches may be correlated.
    """
    size, together = order.sizes[0], batch_size * steps
    places = max(1, order.epoch_size // together)
    chosen: Iterable[int] = (hash_integers(seed, np.arange(draws)) % np.uint64(places)).tolist()
    return float(np.mean([topic_variance(order.batch(place, together).sample, size, topics) for place in chosen]))
