"""Keyed dropout: the masks' statistics, and what they depend on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import FSQ, tiny_model
from vqclip.errors import ConfigError
from vqclip.nn.dropout import KeyedDropout, hash32, set_dropout_keys


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


def test_the_hash_is_one_to_one():
    numbers = torch.cat([torch.arange(1 << 18), (1 << 32) - 1 - torch.arange(1 << 18)])
    assert len(hash32(numbers).unique()) == len(numbers)
    assert hash32(numbers).min() >= 0
    assert hash32(numbers).max() < 1 << 32


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


def test_patch_dropout_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="got patch_dropout 0.5 for a tower that is frozen"):
        patchy(train="none")
    with pytest.raises(ConfigError, match="expected a VisionTransformer of timm"):
        patchy(name="convnext_atto", image_size=64, args={"depths": [1] * 4, "dims": [8] * 4}).build()
