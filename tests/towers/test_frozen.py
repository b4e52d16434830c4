"""Frozen towers: the same bits for a sample in every batch, without gradient and without dropout."""

from __future__ import annotations

import pytest
import torch

from tests.models import FSQ, tiny_model
from vqclip.towers import TimmTowerConfig
from vqclip.towers.frozen import chunk_size, frozen_features
from vqclip.towers.image import ConvolutionalTowerConfig
from vqclip.towers.text import TransformerTowerConfig

CHUNK = chunk_size(torch.device("cpu"))
TOWERS = {
    "vit": TimmTowerConfig(
        name="vit_tiny_patch16_224",
        image_size=32,
        args={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "proj_drop_rate": 0.5},
    ),
    "convolutional": ConvolutionalTowerConfig(image_size=32, channels=[8, 16, 32]),
    "text": TransformerTowerConfig(context_length=12, width=32, heads=2, layers=2),
    "text, not causal": TransformerTowerConfig(context_length=12, width=32, heads=2, layers=2, causal=False),
}


def tower_and_inputs(name, count):
    torch.manual_seed(0)
    config = TOWERS[name]
    tower = config.build().requires_grad_(False)
    if hasattr(config, "vocabulary"):
        return tower, config.vocabulary()([f"caption {n} of {'many ' * (n % 3)}words" for n in range(count)])
    return tower, torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)


@pytest.mark.parametrize("name", TOWERS)
def test_a_samples_features_do_not_depend_on_its_batch(name):
    count = 2 * CHUNK + 3
    tower, inputs = tower_and_inputs(name, count)
    expected = frozen_features(tower, inputs)
    assert expected.shape == (count, tower.num_tokens, tower.width)
    for sizes in ([1] * count, [count - 1, 1], [5, CHUNK, count - CHUNK - 5]):
        found = torch.cat([frozen_features(tower, part) for part in inputs.split(sizes)])
        assert torch.equal(found, expected)
    order = torch.randperm(count)
    assert torch.equal(frozen_features(tower, inputs[order]), expected[order])
    assert frozen_features(tower, inputs[:0]).shape == (0, tower.num_tokens, tower.width)


@pytest.mark.parametrize("name", TOWERS)
def test_runs_in_evaluation_mode_and_restores_the_mode(name):
    tower, inputs = tower_and_inputs(name, 3)
    part = next(module for module in tower.children())
    tower.train()
    part.eval()
    found = frozen_features(tower, inputs)
    assert tower.training
    assert not part.training
    assert not found.requires_grad
    assert torch.equal(frozen_features(tower.eval(), inputs), found)
    mask = tower.mask(inputs) if hasattr(tower, "mask") else slice(None)
    assert torch.allclose(tower(inputs)[mask], found[mask], atol=1e-5)


def test_captions_without_their_last_columns_have_the_same_features():
    tower, tokens = tower_and_inputs("text, not causal", 5)
    assert torch.equal(frozen_features(tower, tokens[:, :9]), frozen_features(tower, tokens)[:, :9])


def test_a_tokenizer_runs_its_tower_only_without_features():
    torch.manual_seed(0)
    model = tiny_model(FSQ, FSQ).build()
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    tokens = model.text.preprocess(["a", "a red star", "two"])
    trained = model(images, tokens)
    with torch.no_grad():
        features = [model.image.tower(images), model.text.tower(tokens)]
    assert not model.image.tower.is_frozen
    assert torch.equal(model.image.tower_features(images).detach(), features[0])
    model.image.tower = model.text.tower = None

    def mask(tokens):
        return tokens > 0

    model.text.mask = mask
    given = model(images[:, :, :0, :0], tokens, *features)
    assert torch.equal(given.image.embedding, trained.image.embedding)
    assert torch.equal(given.text.embedding, trained.text.embedding)


def test_pixels_get_their_gradient_through_a_frozen_tower():
    """A tokenizer without trainable weights can be part of a loss on images."""
    torch.manual_seed(0)
    tokenizer = tiny_model(FSQ, FSQ).build().image.eval().requires_grad_(False)
    images = torch.rand(3, 3, 16, 16, requires_grad=True)
    tokenizer.continuous(images)[:, 0].sum().backward()
    assert images.grad.abs().sum() > 0


def test_encoding_with_frozen_weights_costs_what_encoding_costs():
    """Chunks are for training: a caption alone is not padded to 16 of 12 tokens, and its ids stay the same."""
    torch.manual_seed(0)
    tokenizer = tiny_model(FSQ, FSQ).build().text.eval()
    shapes = []
    tokenizer.tower.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    ids = tokenizer.encode(["a red star"])
    assert torch.equal(tokenizer.requires_grad_(False).encode(["a red star"]), ids)
    assert shapes[0] == shapes[1]
