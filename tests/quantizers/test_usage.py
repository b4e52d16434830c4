from __future__ import annotations

import pytest
import torch

from vqclip.quantizers.vectors import histogram, perplexity, usage


def test_histogram_counts_every_codebook_and_no_masked_token() -> None:
    ids = torch.tensor([[0, 2], [1, 2], [-1, -1], [1, 0]])
    assert histogram(ids, 3).tolist() == [[1, 2, 0], [1, 0, 2]]


def test_counts_are_exact_beyond_float32() -> None:
    counts = histogram(torch.zeros(3, 1, dtype=torch.int64), 2) + 2**24
    assert counts[0, 0] == 2**24 + 3


@pytest.mark.parametrize(
    ("counts", "used", "effective"), [([5, 5, 5, 5], 1, 4), ([9, 0, 0, 0], 0.25, 1), ([0] * 4, 0, 1)]
)
def test_usage_and_perplexity(counts: list[int], used: float, effective: float) -> None:
    assert usage(torch.tensor([counts])).item() == used
    assert perplexity(torch.tensor([counts])).item() == pytest.approx(effective)
