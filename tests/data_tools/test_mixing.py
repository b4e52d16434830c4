from __future__ import annotations

import numpy as np
import pytest
from benchmarks.order import blocks, buffers, simulate_mixing, topic_variance

from vqclip.data.order import FullOrder, WindowedOrder

Order = FullOrder | WindowedOrder

SIZE, TOPICS, BATCH = 1_000_000, 100, 2048
"""A million samples in 100 shards, each of which has one topic."""


def test_variance_of_independent_and_of_grouped_draws() -> None:
    rng = np.random.default_rng(0)
    independent = [topic_variance(rng.integers(SIZE, size=BATCH), SIZE, TOPICS) for _ in range(50)]
    assert np.mean(independent) == pytest.approx(1, abs=0.1)
    grouped = [topic_variance(np.repeat(rng.integers(SIZE, size=BATCH // 8), 8), SIZE, TOPICS) for _ in range(50)]
    assert np.mean(grouped) == pytest.approx(8, abs=0.8)
    assert topic_variance(np.arange(0, SIZE, 500), SIZE, TOPICS) == 0


def test_topics_may_not_divide_the_samples() -> None:
    assert topic_variance(np.arange(1000), 1000, 7) == pytest.approx(0)


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [(FullOrder(), 0.8, 1.2), (WindowedOrder(window=2048), 0.5, 2.2), (WindowedOrder(window=128), 8, 20)],
    ids=["full", "window as large as the batch", "window of a sixteenth of the batch"],
)
def test_orders_over_a_million_samples_sorted_by_topic(kind: Order, least: float, most: float) -> None:
    found = simulate_mixing(kind.build([SIZE], [1.0], 3), BATCH, TOPICS, seed=1, draws=16)
    assert least < found < most
    assert found == simulate_mixing(kind.build([SIZE], [1.0], 3), BATCH, TOPICS, seed=1, draws=16)


def test_other_loaders_mix_less() -> None:
    assert topic_variance(blocks(SIZE, TOPICS, BATCH, 8, 31_250, 1), SIZE, TOPICS) > 30
    assert topic_variance(buffers(SIZE, TOPICS, BATCH, 64, 312, 1), SIZE, TOPICS) > 5
