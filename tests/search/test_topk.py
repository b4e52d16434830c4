from __future__ import annotations

import torch

from vqclip.search.topk import MOST_ITEMS, rank_keys, scores_and_items, top_keys


class TestTopK:
    def test_order_and_ties(self):
        scores = torch.tensor([[0.5, -0.25, 0.5, -0.0, 0.0, -1.0, 1.0]])
        found, items = scores_and_items(top_keys(rank_keys(scores, torch.arange(7)), 7))
        assert items.tolist() == [[6, 0, 2, 3, 4, 1, 5]]
        assert torch.equal(found, scores[0, items[0]][None])

    def test_any_float_comes_back(self):
        scores = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-30, 30, 1000)
        found, items = scores_and_items(top_keys(rank_keys(scores, torch.arange(1000)), 1000))
        assert torch.equal(found, scores.sort(dim=1, descending=True).values)
        assert torch.equal(found, scores.gather(1, items))


def test_items_are_no_more_than_int32_counts():
    assert torch.iinfo(torch.int32).max == MOST_ITEMS
