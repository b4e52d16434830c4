"""Layers between tower and embedding: padding changes nothing, and stored ids give the training embedding."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import FSQ, tiny_model
from vqclip import load_tokenizer
from vqclip.errors import ConfigError
from vqclip.model import ModelConfig
from vqclip.nn.dropout import KeyedDropout, set_dropout_keys
from vqclip.nn.layers import (
    Attention,
    AttentionPooling,
    AttentionProjectionConfig,
    MeanReductionConfig,
    QueryReductionConfig,
    normalize_channels,
)
from vqclip.nn.precision import autocast
from vqclip.tokenizer.stored import fingerprint

B, N, D, HEADS = 5, 7, 24, 3


@pytest.mark.parametrize("masked", [False, True])
def test_pooling_is_attention_of_one_query(masked: bool) -> None:
    torch.manual_seed(0)
    fast, plain = AttentionPooling(D, HEADS).double(), Attention(D, HEADS).double()
    plain.load_state_dict(fast.state_dict())
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
    if mask is not None:
        assert torch.equal(fast(query, tokens.masked_fill(~mask.unsqueeze(-1), 1e3), mask), found[0])


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
        *[("mlp", "linear", each, None) for each in ("none", "linf")],
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
    of_padding = torch.cat((x[:, :3], other[:, 3:]), dim=1)
    of_a_token = torch.cat((x[:, :2], other[:, 2:3], x[:, 3:]), dim=1)
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
    assert module(x, torch.zeros_like(mask)).isfinite().all()
    assert module(x[:0], None).shape == (0, module.num_tokens, 8)


def test_cast_weights_of_a_caller_are_neither_used_nor_kept():
    x, layer = torch.ones(2, 2), torch.nn.Linear(2, 2)
    with torch.autocast("cpu", torch.float16):
        layer(x)
        with torch.no_grad(), autocast(torch.device("cpu"), "bf16"):
            assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(), autocast(torch.device("cpu"), "bf16"):
            layer(x)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


# Keyed dropout: the masks' statistics, and what they depend on.


def masks(p=0.3, seed=0, step=0, samples=512, features=256) -> torch.Tensor:
    """1.0 where a feature is kept; of two layers in a row: ``(2, samples, features)``."""
    layers = nn.ModuleList([KeyedDropout(p), KeyedDropout(p)])
    set_dropout_keys(layers, seed, step, torch.arange(samples))
    return torch.stack([(layer(torch.ones(samples, features)) > 0).double() for layer in layers])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_p_for_samples_and_for_features(p):
    kept = masks(p)
    deviation = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * deviation / kept.numel() ** 0.5
    for dim in (1, 2):
        means = kept.mean(dim)
        standard = (means - (1 - p)).std() * kept.shape[dim] ** 0.5 / deviation
        assert 0.9 < standard < 1.1  # as of independent draws


def test_masks_of_layers_steps_seeds_samples_and_features_are_independent():
    one, other = masks()
    drawn = [one, other, masks(step=1)[0], masks(seed=1)[0], one.roll(1, 0), one.roll(1, 1), one.roll((1, 1), (0, 1))]
    for a, b in itertools.combinations(drawn, 2):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / a.numel() ** 0.5


def test_a_sample_has_its_mask_in_any_batch_order_and_dtype():
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    layer = KeyedDropout(0.5)
    set_dropout_keys(layer, 0, 7, torch.arange(8))
    whole = layer(x)
    for rows in ([5], [7, 0, 3], []):
        set_dropout_keys(layer, 0, 7, torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(layer(x[rows]), whole[rows])
    set_dropout_keys(layer, 0, 7, torch.arange(8))
    assert torch.equal(layer(x.bfloat16()) == 0, whole == 0)
    assert torch.equal(whole[whole != 0], (x * 2)[whole != 0])


def test_recomputation_and_compilation_draw_the_same():
    layer = KeyedDropout(0.5)
    set_dropout_keys(layer, 0, 0, torch.arange(4))
    x = torch.randn(4, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run in (lambda: checkpoint(layer, x, use_reentrant=False), lambda: compiled(x)):
        (found,) = torch.autograd.grad(run().square().sum(), x)
        assert torch.equal(found, expected)


def test_without_keys_it_is_the_dropout_of_torch_and_in_evaluation_nothing():
    x, layer = torch.randn(4, 6), KeyedDropout(0.5)
    torch.manual_seed(3)
    found = layer(x)
    torch.manual_seed(3)
    assert torch.equal(found, nn.functional.dropout(x, 0.5))
    set_dropout_keys(layer, 0, 0, torch.arange(3))
    set_dropout_keys(layer, 0, 0, None)  # as after a step
    assert layer(x).shape == x.shape
    assert layer.eval()(x) is x
    assert KeyedDropout(0.0)(x) is x


def patchy(**tower):
    tree = tiny_model(FSQ, FSQ).model_dump(mode="json")
    tree["image"]["tower"] |= {"patch_dropout": 0.5} | tower
    return type(tiny_model()).model_validate(tree)


def test_patches_that_are_left_out_change_nothing_and_have_no_codes():
    image = patchy().build().image
    pixels = torch.rand(6, 3, 16, 16, requires_grad=True)
    assert image(pixels).ids.min() >= 0  # without keys
    masks = []
    for places in (torch.arange(6), torch.arange(6).flip(0), torch.arange(6) + 6):
        set_dropout_keys(image, 0, 0, places)
        out = image(pixels)
        masks.append((out.ids >= 0).all(dim=-1))
        (gradient,) = torch.autograd.grad(out.embedding.square().mul(torch.rand_like(out.embedding)).sum(), pixels)
        of_patches = gradient.abs().unflatten(3, (2, 8)).unflatten(2, (2, 8)).sum(dim=(1, 3, 5)).flatten(1)
        assert torch.equal(of_patches > 0, masks[-1])
        assert masks[-1].sum(dim=1).eq(2).all()
    assert torch.equal(masks[0], masks[1].flip(0))
    assert not torch.equal(masks[0], masks[2])
    set_dropout_keys(image, 0, 0, places[:0])
    assert len(image(pixels[:0]).ids) == 0
    assert image.eval()(pixels).ids.min() >= 0


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"widths 12 and 4: got heads 5; expected a divisor of 12"):
        AttentionProjectionConfig(heads=5).layers(12, 4)
    with pytest.raises(ConfigError, match=r"reduce\.heads: got 3; expected a divisor of the tower's width 8"):
        QueryReductionConfig(heads=3).build(8)
    with pytest.raises(ValueError, match="got patch_dropout 0.5 for a tower that is frozen"):
        patchy(train="none")
    with pytest.raises(ConfigError, match="expected a VisionTransformer of timm"):
        patchy(name="convnext_atto", image_size=64, args={"depths": [1] * 4, "dims": [8] * 4}).build()
