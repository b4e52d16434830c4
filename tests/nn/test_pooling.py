from __future__ import annotations

import pytest
import torch

from vqclip.nn.attention import Attention
from vqclip.nn.pooling import AttentionPooling, PooledEmbedding, isometric_

B, N, D, HEADS = 5, 7, 24, 3


def _pair() -> tuple[AttentionPooling, Attention]:
    torch.manual_seed(0)
    fast, plain = AttentionPooling(D, HEADS).double(), Attention(D, HEADS).double()
    plain.load_state_dict(fast.state_dict())
    return fast, plain


@pytest.mark.parametrize("masked", [False, True])
def test_pooling_is_attention_of_one_query(masked: bool) -> None:
    fast, plain = _pair()
    query = torch.randn(D, dtype=torch.float64)
    tokens = torch.randn(B, N, D, dtype=torch.float64)
    mask = torch.rand(B, N) > 0.3 if masked else None
    weights = torch.randn(B, D, dtype=torch.float64)

    found, gradients = [], []
    for module in (fast, plain):
        x = tokens.clone().requires_grad_()
        out = fast(query, x, mask) if module is fast else plain(query.expand(B, 1, D), x, mask).squeeze(1)
        (out * weights).sum().backward()
        found.append(out)
        gradients.append([x.grad, *(weight.grad for weight in module.parameters())])

    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_masked_tokens_are_absent_bit_for_bit() -> None:
    fast, _ = _pair()
    query, tokens = torch.randn(D, dtype=torch.float64), torch.randn(B, N, D, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[:, 4:] = False
    other = tokens.masked_fill(~mask.unsqueeze(-1), 1e3)

    assert torch.equal(fast(query, tokens, mask), fast(query, other, mask))


def test_no_tokens_and_no_samples() -> None:
    pool = PooledEmbedding(N, D, 16, HEADS, depth=1)
    vectors = torch.randn(B, N, D)

    assert pool(vectors, torch.zeros(B, N, dtype=torch.bool)).isfinite().all()
    assert pool(vectors[:0], torch.zeros(0, N, dtype=torch.bool)).shape == (0, 16)


def test_isometric_layers_keep_the_size_of_what_they_carry():
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(32, 96), torch.nn.Linear(32, 8)
    for layer in (wide, narrow):
        isometric_(layer)
        assert not layer.bias.any()
    for rows in (*wide.weight.split(32), narrow.weight):
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-5, rtol=0)
