from __future__ import annotations

import pytest
import torch

from vqclip.errors import ConfigError, ShapeError
from vqclip.towers.image import OpenCLIPImageTowerConfig, TimmTowerConfig
from vqclip.towers.pixels import Normalize

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
CNN = {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 24], "output_stride": 16}


@pytest.mark.parametrize(
    ("name", "args", "tokens", "width"),
    [
        ("vit_tiny_patch16_224", VIT, 16, 16),
        ("convnext_atto", CNN, 4, 24),
        ("resnet10t", {"norm_layer": "layernorm2d", "channels": [8, 8, 16, 24]}, 1, 24),
        (
            "swin_tiny_patch4_window7_224",
            {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 2},
            16,
            16,
        ),
    ],
)
def test_a_timm_tower_gives_a_sequence_of_patch_features(name, args, tokens, width):
    extra = {"img_size": 32} if "swin" in name else {}
    tower = TimmTowerConfig(name=name, image_size=32, args=args | extra).build()
    assert (tower.num_tokens, tower.width) == (tokens, width)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert tower(images).shape == (2, tokens, width)
    assert tower(images[:0]).shape == (0, tokens, width)


def test_every_trained_parameter_of_a_tower_gets_a_gradient():
    """One without would make DDP wait for it."""
    for config in (
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT),
        TimmTowerConfig(name="convnext_atto", image_size=32, args=CNN),
    ):
        tower = config.build()
        tower(torch.rand(2, 3, tower.image_size, tower.image_size)).sum().backward()
        assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


def test_bytes_and_floats_are_the_same_pixels():
    tower = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build().eval()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(tower(images), tower(images / 255))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 16, 17), r"got shape \(2, 3, 16, 17\), expected \(B, 3, 16, 16\)"),
        (torch.zeros(3, 16, 16), r"got shape \(3, 16, 16\)"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int64), "got dtype torch.int64"),
    ],
)
def test_wrong_pixels_are_refused(images, message):
    with pytest.raises(ShapeError, match=message):
        Normalize(16)(images)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"batch-normalisation layers \(first: model.conv1.1\).*norm_layer"):
        TimmTowerConfig(name="resnet10t", image_size=32).build()


def test_an_unknown_timm_name_or_argument_is_refused():
    with pytest.raises(ConfigError, match="no model 'vit_tini_patch16'; did you mean one of: .*vit_tiny_patch16"):
        TimmTowerConfig(name="vit_tini_patch16", image_size=32).build()
    with pytest.raises(ConfigError, match="convnext_atto.*refuses.*dimz"):
        TimmTowerConfig(name="convnext_atto", image_size=32, args={"dimz": 3}).build()


def test_local_weights_are_loaded(tmp_path):
    first = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build()
    file = tmp_path / "weights.pt"
    torch.save(first.backbone.model.state_dict(), file)
    second = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT, checkpoint=file).build()
    images = torch.rand(1, 3, 16, 16)
    assert torch.equal(first.eval()(images), second.eval()(images))


@pytest.fixture(scope="module")
def tiny_open_clip(tmp_path_factory):
    """A small model configuration and a local file of its weights, as open_clip reads them."""
    import json

    import open_clip

    folder = tmp_path_factory.mktemp("open_clip")
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 16, "head_width": 16},
        "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    }
    (folder / "vqclip-test.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    model = open_clip.create_model("vqclip-test")
    torch.save(model.state_dict(), folder / "weights.pt")
    return model.eval(), "vqclip-test", str(folder / "weights.pt")


def test_an_open_clip_tower_has_the_weights_of_the_file(tiny_open_clip):
    model, name, weights = tiny_open_clip
    tower = OpenCLIPImageTowerConfig(model=name, pretrained=weights).build().eval()
    images = torch.rand(2, 3, 32, 32)
    expected = model.visual.forward_intermediates(tower.normalize(images), indices=1, output_fmt="NLC")
    features = model.visual.ln_post(expected["image_intermediates"][-1])
    assert tower(images).shape == (2, 4, 32)
    torch.testing.assert_close(tower(images), features)
    tower.train()(images).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


def test_an_open_clip_text_tower_has_the_weights_of_the_file(tiny_open_clip):
    from vqclip.towers.text import OpenCLIPTextTowerConfig

    model, name, weights = tiny_open_clip
    config = OpenCLIPTextTowerConfig(model=name, pretrained=weights)
    tower = config.build().eval()
    tokens = config.vocabulary()(["a cat", "a much longer caption about a dog"])
    features = model.ln_final(model.transformer(*_embedded(model, tokens)))
    torch.testing.assert_close(tower(tokens), features)
    tower(tokens).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.grad is None] == []


def _embedded(model, tokens):
    return model.token_embedding(tokens) + model.positional_embedding, model.attn_mask


def test_an_unknown_open_clip_model_or_tag_is_refused():
    with pytest.raises(ConfigError, match="no model 'ViT-B-61'; did you mean one of: ViT-B-16"):
        OpenCLIPImageTowerConfig(model="ViT-B-61").build()
    with pytest.raises(ConfigError, match="got 'laion', which is neither a file nor one of the tags.*laion400m_e31"):
        OpenCLIPImageTowerConfig(model="ViT-B-32", pretrained="laion").build()
    with pytest.raises(ConfigError, match="trained with QuickGELU.*expected ViT-B-32-quickgelu"):
        OpenCLIPImageTowerConfig(model="ViT-B-32", pretrained="openai").build()
