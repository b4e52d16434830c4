from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from vqclip.evaluation import ranking
from vqclip.evaluation.ranking import rank
from vqclip.process import progress


def hit_rates(queries, candidates, query_group, group, ks):
    """Share of queries with a right candidate among their k nearest."""
    return rank(queries, candidates, query_group, group).hits(ks).mean(dim=1).tolist()


def brute_force(queries, candidates, query_group, group, k):
    """The mean over all orders of tied candidates, one by one."""
    total = 0.0
    for query, right in zip(queries, query_group, strict=True):
        scores = [float(query @ candidate) for candidate in candidates]
        hits = []
        for order in itertools.permutations(range(len(scores))):
            if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
                hits.append(any(group[place] == right for place in order[:k]))
        total += sum(hits) / len(hits)
    return total / len(queries)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_mean_over_all_orders_of_ties_with_several_right_ones(seed):
    generator = torch.Generator().manual_seed(seed)
    # Few different values: many ties, all of them exact.
    queries = torch.randint(-1, 2, (5, 2), generator=generator).float()
    candidates = torch.randint(-1, 2, (6, 2), generator=generator).float()
    group = torch.tensor([0, 0, 1, 2, 2, 2])
    query_group = torch.randint(0, 3, (5,), generator=generator)
    ks = [1, 2, 3, 10]
    expected = [brute_force(queries, candidates, query_group, group, k) for k in ks]
    assert hit_rates(queries, candidates, query_group, group, ks) == pytest.approx(expected, abs=1e-12)


def test_rounding_does_not_break_a_tie():
    queries, candidates = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.0], [0.5 + 1e-6, 0.0], [0.4, 0.0]])
    for right in (0, 1):
        assert hit_rates(queries, candidates, torch.tensor([right]), torch.arange(3), [1]) == [0.5]


def test_blocks_change_nothing_bound_the_scores_and_show_that_the_work_goes_on(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(torch.randn(101, 8, generator=generator), dim=-1)
    noisy = F.normalize(x + 0.6 * torch.randn(101, 8, generator=generator), dim=-1)
    each = torch.arange(101)
    whole = hit_rates(x, noisy, each, each, [1, 5])
    monkeypatch.setattr(ranking, "BLOCK", 101 * 7)
    seen = []
    rank = ranking.rank_scores
    monkeypatch.setattr(ranking, "rank_scores", lambda a, *rest: (seen.append(len(a)), rank(a, *rest))[1])
    beats = []
    with progress.report_to(lambda: beats.append(1)):
        assert hit_rates(x, noisy, each, each, [1, 5]) == whole
    assert max(seen) == 7
    assert len(beats) == len(seen) == 15
    assert 0.1 < whole[0] < whole[1] < 1
