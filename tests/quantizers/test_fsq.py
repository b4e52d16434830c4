from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_quantize_pytorch import FSQ as PeerFSQ

from vqclip.errors import ConfigError
from vqclip.quantizers import FSQ

LEVELS = [(8, 5, 5, 5), (8, 6, 5), (7, 5, 5, 5, 5), (4, 4, 4, 4), (3, 3), (16, 9, 33), (5,)]


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_agrees_with_vector_quantize_pytorch(levels: tuple[int, ...]) -> None:
    x = 2 * torch.randn(3, 20_000, len(levels), generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    ours, (vectors, ids) = FSQ(levels)(x), PeerFSQ(list(levels))(x)
    assert torch.equal(ours.ids.squeeze(-1), ids)
    torch.testing.assert_close(ours.vectors, vectors, rtol=0, atol=2e-7)  # the peer's straight-through rounds
    upstream = torch.randn_like(x)
    for a, b in zip(
        torch.autograd.grad(ours.vectors, x, upstream), torch.autograd.grad(vectors, x, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@given(levels=st.lists(st.integers(2, 12), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_every_code_is_reached_and_decodes_to_a_vector_of_its_own(levels: list[int]) -> None:
    quantizer = FSQ(levels)
    # Inputs at the middle of every level, and beyond the outermost ones.
    points = []
    for count in levels:
        x = torch.linspace(-8, 8, 4001)
        single = FSQ((count,))(x[:, None]).ids[:, 0]
        assert (single.diff() >= 0).all(), "a larger input never gets a smaller level"
        points.append([x[single == level].median().item() for level in range(count)])
    grid = torch.tensor(list(itertools.product(*points)))
    out = quantizer(grid)
    assert sorted(out.ids[:, 0].tolist()) == list(range(math.prod(levels)))
    assert len(out.vectors.unique(dim=0)) == math.prod(levels)


def test_ids_are_exact_where_floats_are_not() -> None:
    levels = (1000,) * 6
    quantizer = FSQ(levels)
    x = 3 * torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    out = quantizer(x)
    digits = [[round(v * (n // 2)) + n // 2 for v, n in zip(row, levels, strict=True)] for row in out.vectors.tolist()]
    expected = [sum(digit * 1000**place for place, digit in enumerate(row)) for row in digits]
    assert out.ids[:, 0].tolist() == expected
    assert max(expected) > 2**59


def test_two_levels_split_at_zero() -> None:
    out = FSQ((2,))(torch.tensor([[-5.0], [-0.1], [0.1], [5.0]]))
    assert out.vectors[:, 0].tolist() == [-1, -1, 0, 0]
    assert out.ids[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("levels", "message"), [((), "empty"), ((8, 1), r"levels\[1\] is 1"), ((1001,), "2 to 1000")])
def test_wrong_levels_are_refused(levels: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FSQ(levels)
