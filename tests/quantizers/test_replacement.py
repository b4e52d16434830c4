"""Draws without repetition, and tokens that take the place of dead codes."""

from __future__ import annotations

import pytest
import torch

from vqclip.quantizers.draws import keyed_integers
from vqclip.quantizers.replacement import replacements
from vqclip.quantizers.stats import Draw, Order, Stats


def drawn(count: int, keep: torch.Tensor, step: int = 0) -> list[int]:
    """The numbers of the tokens that `count` draws from samples ``(B, T)`` yield."""
    samples = len(keep)
    numbers = keyed_integers(3, torch.tensor(step), count)
    vectors = torch.arange(1.0, 1 + keep.numel()).view(-1, 1, 1)
    order = Order(torch.arange(samples), samples)
    sums = Stats({}, {"x": Draw(numbers, vectors, keep.flatten())}).synced(order)
    present = sums["x/present"].flatten() > 0
    return sums["x/vectors"].flatten()[present].long().sub(1).tolist()


@pytest.mark.parametrize("count", [1, 2, 7, 16, 40, 200])
@pytest.mark.parametrize(("samples", "tokens"), [(1, 30), (5, 6), (30, 1)])
def test_no_token_is_drawn_twice(count: int, samples: int, tokens: int) -> None:
    keep = torch.rand(samples, tokens, generator=torch.Generator().manual_seed(count)) < 0.7
    for step in range(5):
        found = drawn(count, keep, step)
        assert len(set(found)) == len(found) <= count
        assert keep.flatten()[found].all()
    if count == 200:
        assert len(found) > keep.sum() * 3 // 4


@pytest.mark.parametrize(("samples", "tokens"), [(1, 24), (4, 6), (24, 1)])
def test_every_token_has_the_same_chance(samples: int, tokens: int) -> None:
    rounds, count = 3000, 6
    found = torch.tensor([drawn(count, torch.ones(samples, tokens).bool(), step) for step in range(rounds)])
    expected = rounds * count / 24
    deviation = (found.flatten().bincount(minlength=24) - expected) / (expected * (1 - count / 24)) ** 0.5
    assert deviation.abs().max() < 4.5  # of standard deviations; 24 tokens exceed it once in 6,000 runs


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-2]))


def test_dead_codes_get_different_tokens_in_random_order() -> None:
    codes, tokens = fresh(2, 8, 3), fresh(2, 20, 3)
    dead = torch.zeros(2, 8).bool()
    dead[0, 1:6], dead[1, 7] = True, True
    chosen = set()
    for step in range(6):
        shuffle = keyed_integers(0, torch.tensor(step), 20)
        new, replaced = replacements(codes, dead, tokens, torch.ones(20).bool(), shuffle)
        assert torch.equal(replaced, dead)
        assert torch.equal(new[~dead], codes[~dead])
        where = (new[0, 1:6, None] == tokens[0]).all(-1).nonzero()[:, 1]
        assert len(set(where.tolist())) == 5
        chosen.add(tuple(where.tolist()))
    assert len(chosen) == 6


def test_a_token_that_equals_a_code_or_another_token_takes_no_place() -> None:
    codes = fresh(1, 8, 3)
    tokens = torch.cat((codes[:, [2, 5]], fresh(1, 3, 3).repeat(1, 4, 1)), dim=1)
    tokens = tokens * (1 + 1e-7 * fresh(1, 14, 1))  # as it comes from another process
    absent = torch.zeros(14).bool()
    dead = torch.ones(1, 8).bool()
    shuffle = keyed_integers(1, torch.tensor(0), 14)
    new, replaced = replacements(codes, dead, tokens, ~absent, shuffle)
    assert replaced.sum() == 3
    assert torch.cdist(new, new).add(torch.eye(8)).min() > 1e-3
    assert not replacements(codes, dead, tokens, absent, shuffle)[1].any()
