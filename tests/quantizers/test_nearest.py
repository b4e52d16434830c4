"""The nearest code, and the gradient that is rotated towards it."""

from __future__ import annotations

import pytest
import torch

from vqclip.quantizers.nearest import _Rotation, nearest


def test_nearest_far_from_the_origin() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = 100 + 0.1 * torch.randn(1, 64, 32, generator=generator)
    x = 100 + 0.1 * torch.randn(2000, 1, 32, generator=generator)
    exact = torch.cdist(x[:, 0].double(), codes[0].double()).argmin(dim=1)
    assert (nearest(x, codes)[:, 0] != exact).double().mean() < 1e-3


@pytest.mark.parametrize("far", [3e3, 1e5])
def test_nearest_beside_a_code_far_out(far: float) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(1, 64, 8, generator=generator)
    codes[0, 0] = far
    x = torch.randn(4000, 1, 8, generator=generator)
    expected = torch.cdist(x[:, 0].double(), codes[0].double()).argmin(dim=1)
    assert torch.equal(nearest(x, codes)[:, 0], expected)


def test_the_rotation_turns_gradients_with_the_vector() -> None:
    x, q = torch.randn(2, 20, 1, 5, dtype=torch.float64)
    x.requires_grad_()
    upstream = torch.randn(20, 1, 5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(_Rotation.apply(x, q), x, upstream)
    scale = (q.norm(dim=-1) / x.norm(dim=-1)).squeeze(-1)
    # Its angle to the vector is what the upstream gradient's to the code is, and so is its length, but for the scale.
    torch.testing.assert_close((gradient * x).sum(-1), (upstream * q).sum(-1))
    torch.testing.assert_close(gradient.norm(dim=-1).squeeze(-1), upstream.norm(dim=-1).squeeze(-1) * scale)


def test_a_compiled_search_computes_a_limited_number_of_scores(monkeypatch) -> None:
    """As many at a time as an eager one, with its ids; the backend runs the graph as it is."""
    monkeypatch.setattr("vqclip.quantizers.nearest.CHUNK", 64 * 2 * 128)
    x, codes = torch.randn(300, 2, 4), torch.randn(2, 128, 4)
    expected, shapes, product = nearest(x, codes), [], torch.baddbmm

    def recording(*args, **kwargs):
        shapes.append(tuple((result := product(*args, **kwargs)).shape))
        return result

    monkeypatch.setattr(torch, "baddbmm", recording)
    assert torch.equal(torch.compile(nearest, fullgraph=True, backend="eager")(x, codes), expected)
    assert shapes == [(2, rows, 128) for rows in (64, 64, 64, 64, 44)]
