from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, ViTMAEConfig, ViTMAEModel

from tests.towers.huggingface.making import IMAGES, TEXT, VISION, make_image, make_network, make_text, word_pieces
from vqclip.errors import ConfigError
from vqclip.towers.huggingface import TransformersImageTowerConfig, TransformersTextTowerConfig


def config(folder, **settings):
    return TransformersImageTowerConfig(name=str(folder), **settings)


def expected_features(network, pixels, tokens, **arguments):
    out = network((pixels - 0.5) / 0.25, **arguments).last_hidden_state
    return out.flatten(2).transpose(1, 2) if out.ndim == 4 else out[:, -tokens:]


@pytest.mark.parametrize("name", IMAGES)
def test_features_of_patches_are_those_of_transformers(name, tmp_path):
    theirs = make_image(tmp_path, name)
    size = 32 if name == "convnext" else None
    tower = config(tmp_path, image_size=size).build()
    assert tower.image_size == 32
    tokens = {"convnext": 1, "swin": 16}.get(name, 16)
    assert tower.num_tokens == tokens
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(tower.eval()(pixels), expected_features(theirs, pixels, tokens))
        assert tower(pixels[:0]).shape == (0, tokens, tower.width)
    tower.train()(pixels).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip", "clip"])
def test_positions_are_interpolated_for_another_size(name, tmp_path):
    theirs = make_image(tmp_path, name)
    tower = config(tmp_path, image_size=48).build().eval()
    assert tower.num_tokens == 36
    pixels = torch.rand(2, 3, 48, 48)
    arguments = {} if name == "dinov2" else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        assert torch.equal(tower(pixels), expected_features(theirs, pixels, 36, **arguments))


def test_wrong_sizes_are_refused(tmp_path):
    make_image(tmp_path / "vit")
    with pytest.raises(ConfigError, match=r"tower.image_size: got 30 with patches of 8.*last 6 rows.*multiple of 8"):
        config(tmp_path / "vit", image_size=30).build()
    make_image(tmp_path / "convnext", "convnext")
    with pytest.raises(ConfigError, match=r"tower.image_size: the network cannot read images of 16 pixels"):
        config(tmp_path / "convnext", image_size=16).build()


def test_both_halves_of_clip(tmp_path):
    torch.manual_seed(0)
    theirs = CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT)).eval()
    with contextlib.redirect_stderr(io.StringIO()):
        theirs.save_pretrained(tmp_path)
    word_pieces().save(str(tmp_path / "tokenizer.json"))
    image = config(tmp_path, mean=[0.5] * 3, std=[0.25] * 3).build().eval()
    text = TransformersTextTowerConfig(name=str(tmp_path), context_length=12).build().eval()
    pixels, tokens = torch.rand(2, 3, 32, 32), text.vocabulary(["a red star", "two"])
    with torch.no_grad():
        expected = expected_features(theirs.vision_model, pixels, 16)
        torch.testing.assert_close(image(pixels), expected)
        numbers = tokens.clamp_min(0)
        real = text.mask(tokens)
        torch.testing.assert_close(text(tokens)[real], theirs.text_model(numbers).last_hidden_state[real])


def test_normalisation_is_the_models_or_ones_own(tmp_path):
    make_image(tmp_path, mean=0.4)
    assert config(tmp_path).build().normalize.mean.flatten().tolist() == pytest.approx([0.4] * 3)
    assert config(tmp_path, mean=[0.1, 0.2, 0.3]).resolve().mean == (0.1, 0.2, 0.3)
    path = tmp_path / "preprocessor_config.json"
    for settings, message in (
        ({"image_mean": [0.5], "image_std": [0.5]}, "lacks image_mean or image_std"),
        ({"image_mean": [0.5] * 3, "image_std": [0, 1, 1]}, "lacks image_mean or image_std"),
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 127.5}, "scales pixels by"),
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": None}, "scales pixels by None"),
        ({"image_mean": [float("nan")] * 3, "image_std": [0.5] * 3}, "lacks image_mean or image_std"),
    ):
        path.write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match=message):
            config(tmp_path).build()
    path.write_text(json.dumps({"do_normalize": False}))
    assert config(tmp_path).resolve().std == (1.0, 1.0, 1.0)
    path.unlink()
    with pytest.raises(ConfigError, match=r"tower.mean: .* has no preprocessor_config.json; expected mean and std"):
        config(tmp_path).build()
    config(tmp_path, pretrained=False).build()
    with pytest.raises(ValueError, match="expected numbers above 0"):
        config(tmp_path, std=[0.0, 1.0, 1.0])
    network = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(network | {"layer_norm_eps": float("nan")}))
    with pytest.raises(ConfigError, match=r"config\.json\.layer_norm_eps: got nan; expected a finite number"):
        config(tmp_path, pretrained=False).build()


def test_what_is_no_image_encoder_is_refused(tmp_path):
    make_text(tmp_path / "bert")
    with pytest.raises(ConfigError, match="'bert', which is no encoder of images; expected an encoder of images"):
        config(tmp_path / "bert", image_size=32, mean=[0.5] * 3, std=[0.5] * 3).build()
    with contextlib.redirect_stderr(io.StringIO()):
        ViTMAEModel(ViTMAEConfig(**VISION)).save_pretrained(tmp_path / "mae")
    with pytest.raises(ConfigError, match="gives 5 tokens for 32 pixels"):  # it hides most patches
        config(tmp_path / "mae", mean=[0.5] * 3, std=[0.5] * 3).build()
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    make_network(tmp_path / "resnet", ("ResNetModel", "ResNetConfig", resnet))
    settings = {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    with pytest.raises(ConfigError, match="batch-normalisation"):
        config(tmp_path / "resnet", **settings).build()
    assert config(tmp_path / "resnet", **settings, train="none").build().is_frozen
