"""Layers between tower and embedding: padding changes nothing, and stored ids give the training embedding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import FSQ, tiny_model
from vqclip import load_tokenizer
from vqclip.errors import ConfigError
from vqclip.model import ModelConfig
from vqclip.nn.layers import (
    Attention,
    AttentionPooling,
    AttentionProjectionConfig,
    MeanReductionConfig,
    MLPProjectionConfig,
    PooledEmbedding,
    QueryReductionConfig,
    isometric_,
    normalize_channels,
)
from vqclip.tokenizer.stored import fingerprint

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


KINDS = {"linear": {"kind": "linear"}, "mlp": {"kind": "mlp"}, "attention": {"kind": "attention", "heads": 2}}
CAPTIONS = ["a red star", "two small blue circles on a grey background", "x"]


REDUCTIONS = [None, MeanReductionConfig(), QueryReductionConfig(count=3, heads=2)]


def built(into: str = "linear", back: str = "linear", normalize: str = "none", reduce=None):
    torch.manual_seed(0)
    tree = tiny_model(FSQ, FSQ).model_dump()
    for part in (tree["image"], tree["text"]):
        part |= {"project_in": KINDS[into], "project_out": KINDS[back], "normalize": normalize}
        part |= {} if reduce is None else {"reduce": reduce.model_dump()}
    return ModelConfig.model_validate(tree).build()


@pytest.mark.parametrize(
    ("into", "back", "normalize", "reduce"),
    [
        *[("mlp", "linear", each, None) for each in ("none", "layer", "l2", "linf")],
        ("linear", "attention", "layer", None),
        ("attention", "mlp", "l2", None),
        *[("linear", "mlp", "none", each) for each in REDUCTIONS[1:]],
    ],
)
def test_stored_ids_give_the_training_embedding(into, back, normalize, reduce, tmp_path):
    model = built(into, back, normalize, reduce)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    model.save_pretrained(tmp_path)
    for tokenizer, inputs in ((model.image, images), (model.text, model.text.preprocess(CAPTIONS))):
        out = tokenizer(inputs)
        loaded = load_tokenizer(tmp_path, tokenizer.modality)
        assert fingerprint(loaded) == fingerprint(tokenizer)
        loaded.pool.query.data[0, 0, 0] += 1e-6
        assert fingerprint(loaded) != fingerprint(tokenizer)
        loaded.pool.query.data.copy_(tokenizer.pool.query)
        assert loaded.encode(inputs).equal(out.ids)
        assert loaded.embed(out.ids).equal(out.embedding)
        assert load_tokenizer(tmp_path, tokenizer.modality, encode=False).embed(out.ids).equal(out.embedding)
        (out.embedding * torch.randn(16)).sum().backward()
        for part in (tokenizer.project_in, tokenizer.project_out):
            assert all(parameter.grad.any() for parameter in part.parameters() if parameter.ndim > 1)
        if reduce is not None:
            assert tokenizer.num_tokens == tokenizer.fewest_tokens == out.ids.shape[1] == reduce.build(16).num_tokens
            assert (out.ids >= 0).all()
    tokens = model.text.preprocess(["x"])
    assert model.text.needed_tokens(tokens) == 8
    assert model.text(tokens[:, :8]).ids.equal(model.text(tokens).ids[:, : model.text(tokens[:, :8]).ids.shape[1]])


def test_attention_mixes_tokens_but_not_padding() -> None:
    project = built("attention", "attention").text.project_in
    x, other = torch.randn(2, 1, 5, 16)
    mask = torch.tensor([[True, True, True, False, False]])
    of_padding, of_a_token = x.clone(), x.clone()
    of_padding[:, 3:] = other[:, 3:]
    of_a_token[:, 2] = other[:, 2]
    assert torch.equal(project(x, mask)[:, :3], project(of_padding, mask)[:, :3])
    assert not torch.allclose(project(x, mask)[:, :2], project(of_a_token, mask)[:, :2])


def test_normalization() -> None:
    x = 3 * torch.randn(4, 7, 16) + 1
    torch.testing.assert_close(normalize_channels(x, "l2").norm(dim=-1), torch.full((4, 7), 4.0))
    largest = normalize_channels(x, "linf").abs().amax(dim=-1)
    torch.testing.assert_close(largest, torch.full((4, 7), 2.0))
    assert normalize_channels(torch.zeros(2, 3), "linf").equal(torch.zeros(2, 3))
    layer = normalize_channels(x, "layer")
    torch.testing.assert_close(layer.mean(-1), torch.zeros(4, 7), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.std(-1, unbiased=False), torch.ones(4, 7), atol=1e-3, rtol=0)
    assert normalize_channels(x, "none") is x
    assert normalize_channels(x.bfloat16(), "l2").dtype == torch.float32


def test_widths() -> None:
    layers = MLPProjectionConfig(hidden=6).layers(12, 4)
    assert [layer.weight.shape for layer in layers if isinstance(layer, nn.Linear)] == [(6, 12), (4, 6)]
    with pytest.raises(ConfigError, match=r"widths 12 and 4: got heads 5; expected a divisor of 12"):
        AttentionProjectionConfig(heads=5).layers(12, 4)


@pytest.mark.parametrize("config", REDUCTIONS[1:], ids=lambda config: config.kind)
def test_padding_changes_nothing(config):
    module = config.build(8).double()
    x, mask = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5) < torch.tensor([[3], [5]])
    out = module(x, mask)
    assert out.shape == (2, module.num_tokens, 8)
    torch.testing.assert_close(out[:1], module(x[:1, :3], None))
    torch.testing.assert_close(out[1:], module(x[1:], None))
    poisoned = x.masked_fill(~mask.unsqueeze(-1), torch.nan)  # features of padding are undefined
    assert module(poisoned, mask).equal(out)


@pytest.mark.parametrize("config", REDUCTIONS[1:], ids=lambda config: config.kind)
def test_reductions_of_no_tokens_and_no_samples(config):
    module = config.build(8)
    assert module(torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)).isfinite().all()
    assert module(torch.randn(0, 5, 8), None).shape == (0, module.num_tokens, 8)


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match=r"reduce\.heads: got 3; expected a divisor of the tower's width 8"):
        QueryReductionConfig(heads=3).build(8)
