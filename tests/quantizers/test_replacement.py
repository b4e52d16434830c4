"""Draws without repetition, and tokens that take the place of dead codes."""

from __future__ import annotations

import pytest
import torch

from vqclip.quantizers import VQ
from vqclip.quantizers.new_codes import find_new, kmeans, replacements
from vqclip.quantizers.stats import Draw, Order, Stats, stream


def drawn(count: int, keep: torch.Tensor, step: int = 0, flat: bool = False) -> list[int]:
    """The numbers of the tokens that `count` draws from samples ``(B, T)`` yield."""
    samples = len(keep)
    vectors = torch.arange(1.0, 1 + keep.numel()).view(-1, 1, 1)
    draw = Draw(stream(3, torch.tensor(step)), count, vectors, keep.flatten())
    sums = Stats({}, {"x": draw}).sync(None if flat else Order(torch.arange(samples), samples))
    present = sums["x/present"].flatten() > 0
    return sums["x/vectors"].flatten()[present].long().sub(1).tolist()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 16, 40, 200])
@pytest.mark.parametrize(("samples", "tokens"), [(1, 30), (5, 6), (30, 1)])
def test_no_token_is_drawn_twice(count: int, samples: int, tokens: int, flat: bool) -> None:
    keep = torch.rand(samples, tokens, generator=torch.Generator().manual_seed(count)) < 0.7
    real = keep.flatten().nonzero().flatten().tolist()
    for step in range(5):
        found = drawn(count, keep, step, flat)
        assert len(set(found)) == len(found) <= count
        assert set(found) <= set(real)
        if flat or count == 200:
            assert len(found) == min(count, len(real))


@pytest.mark.parametrize(
    ("samples", "tokens", "count"), [(1, 24, 6), (4, 6, 6), (24, 1, 6), (3, 8, 7), (8, 3, 19), (5, 5, 12)]
)
def test_every_token_has_the_same_chance(samples: int, tokens: int, count: int) -> None:
    rounds, size = 2000, samples * tokens
    found = torch.tensor([drawn(count, torch.ones(samples, tokens).bool(), step) for step in range(rounds)])
    chance = count / size
    deviation = (found.flatten().bincount(minlength=size) - rounds * chance) / (rounds * chance * (1 - chance)) ** 0.5
    assert deviation.abs().max() < 4.5  # of standard deviations: a fair draw exceeds it once in 6,000 runs


def fresh(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_dead_codes_get_different_tokens() -> None:
    codes, tokens = fresh(2, 8, 3), fresh(2, 20, 3, seed=1)
    dead = torch.zeros(2, 8).bool()
    dead[0, 1:6], dead[1, 7] = True, True
    new, replaced = replacements(codes, dead, tokens, torch.ones(20).bool())
    assert torch.equal(replaced, dead)
    assert torch.equal(new[~dead], codes[~dead])
    where = (new[0, 1:6, None] == tokens[0]).all(-1).nonzero()[:, 1]
    assert len(set(where.tolist())) == 5


def test_a_token_that_equals_a_code_or_another_token_takes_no_place() -> None:
    codes = fresh(1, 8, 3)
    tokens = torch.cat((codes[:, [2, 5]], fresh(1, 3, 3, seed=1).repeat(1, 4, 1)), dim=1)
    tokens = tokens * (1 + 1e-7 * fresh(1, 14, 1, seed=2))  # as it comes from another process
    present, dead = torch.ones(14).bool(), torch.ones(1, 8).bool()
    new, replaced = replacements(codes, dead, tokens, present)
    assert replaced.sum() == 3
    assert torch.cdist(new, new).add(torch.eye(8)).min() > 1e-3
    assert not replacements(codes, dead, tokens, ~present)[1].any()


@pytest.mark.parametrize(("width", "offset"), [(1, 0.0), (16, 10.0), (64, 0.0), (64, 10.0)])
def test_the_same_among_thousands_is_found(width: int, offset: float) -> None:
    """Off the middle as well, where a third vector comes between two on a line."""
    once = offset + fresh(1, 4096, width)
    if width == 1:
        once = torch.linspace(1, 2, 4096).view(1, -1, 1)
    again = once * (1 + 1e-7 * fresh(1, 4096, 1, seed=1))
    tokens = torch.cat((once, again), dim=1)[:, torch.randperm(8192, generator=torch.Generator().manual_seed(2))]
    found = find_new(tokens, torch.ones(8192).bool(), tokens[:, :0])
    assert found.sum() == 4096


@pytest.mark.parametrize("distinct", [5, 10])
def test_rounding_does_not_decide_where_codes_outnumber_tokens(distinct: int) -> None:
    """K-means, too, makes no two codes of one token, which another number of processes rounds differently."""
    x = fresh(1, distinct, 4).repeat(6, 1, 1).flatten(0, 1)
    noise = 1 + 6e-8 * fresh(len(x), 1, seed=1)
    _, members, placed = kmeans(x[None], 16)
    assert placed.sum() == distinct
    assert (members[placed] == 6).all()
    both = [VQ(4, 16, decay=0.8, dead_below=0.5) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    for _ in range(5):
        for quantizer, tokens in zip(both, (x, x * noise), strict=True):
            quantizer.update(quantizer(tokens).stats)
        torch.testing.assert_close(both[0].sizes, both[1].sizes)
        torch.testing.assert_close(both[0].codebook, both[1].codebook)
