from __future__ import annotations

import numpy as np
import pytest
import torch

from vqclip.evaluation.intervals import (
    bootstrap,
    class_intervals,
    class_mean_intervals,
    ratio_intervals,
    wilson,
)


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"),  # Newcombe (1998), table I, method 3
    [
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(rate, count, low, high):
    assert wilson(rate, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - rate, count) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_without_images_nothing_is_known():
    assert wilson(float("nan"), 0) == (0, 1)
    assert class_intervals(("a", "b", "c"), {}, torch.empty(0, dtype=torch.int64)) == {}


def test_one_hit_an_image_needs_no_draws():
    hits = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    assert ratio_intervals(hits, torch.ones(4, dtype=torch.int64)) == [wilson(0.75, 4), wilson(0.5, 4)]


def test_captions_of_one_image_count_together():
    counts = torch.full((100,), 5)
    image_hits = (torch.arange(100) % 2).double()
    together = image_hits.repeat_interleave(5)[None]  # all captions of an image are hit or none
    apart = (torch.arange(500) % 2).double()[None]
    (wide,), (narrow,) = ratio_intervals(together, counts), ratio_intervals(apart, counts)
    low, high = wilson(0.5, 100)
    assert wide == pytest.approx((low, high), abs=0.03)
    assert narrow[1] - narrow[0] < 0.2 * (high - low)
    assert ratio_intervals(together, counts) == [wide]  # the draws are keyed


def test_images_with_more_captions_weigh_more():
    counts = torch.tensor([1, 3] * 50)
    hits = torch.tensor([[1.0, 0, 0, 0] * 50], dtype=torch.float64)
    ((low, high),) = ratio_intervals(hits, counts)
    assert low < 0.25 < high
    assert high < 0.4


def test_mean_over_classes_against_its_standard_error():
    labels = torch.arange(400) % 4
    hits = torch.zeros(1, 400, dtype=torch.float64)
    hits[0, (labels == 0) | ((labels == 1) & (torch.arange(400) % 8 == 1))] = 1
    ((low, high),) = class_mean_intervals(hits, labels)
    error = (0.5 * 0.5 / 100) ** 0.5 / 4  # one class of 100 images varies
    assert (low, high) == pytest.approx((0.375 - 1.96 * error, 0.375 + 1.96 * error), abs=0.006)


def test_draws_that_are_all_equal_do_not_claim_certainty():
    assert class_mean_intervals(torch.ones(1, 30, dtype=torch.float64), torch.arange(30) % 3) == [wilson(1, 30)]


def test_blocks_change_nothing(monkeypatch):
    values = np.random.default_rng(0).random((50, 2))
    whole = bootstrap(50, lambda drawn: drawn @ values / 50)
    monkeypatch.setattr("vqclip.evaluation.intervals._BLOCK", 70)
    assert bootstrap(50, lambda drawn: drawn @ values / 50) == pytest.approx(np.array(whole))
