"""Both towers and the temperature from one open_clip checkpoint."""

from __future__ import annotations

import logging
import math
from unittest import mock

import open_clip
import pytest
import torch
from torch import nn

from tests.open_clip_models import both_towers, save_open_clip
from vqclip.errors import ConfigError
from vqclip.model import CLIP, ModelConfig
from vqclip.towers.open_clip import find_inherited


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_open_clip(tmp_path_factory.mktemp("open_clip"), "vqclip-inherited")


def build(weights, **changes):
    torch.manual_seed(1)
    return ModelConfig.model_validate(both_towers("vqclip-inherited", weights, **changes)).build()


def test_one_line_initialises_both_towers_and_the_temperature(saved):
    theirs, weights = saved
    with mock.patch("open_clip.create_model", wraps=open_clip.create_model) as create:
        model = build(weights)
    assert create.call_count == 1
    torch.testing.assert_close(model.image.tower.backbone.visual.conv1.weight, theirs.visual.conv1.weight)
    torch.testing.assert_close(model.text.tower.transformer.token_embedding.weight, theirs.token_embedding.weight)
    assert model.logit_scale.item() == 3.0
    assert model.config.temperature.init == pytest.approx(math.exp(3))


def test_what_was_not_taken_is_listed(saved):
    model = build(saved[1])
    inherited = model.inherited
    assert inherited.left == {"visual.proj": (32, 16), "text.text_projection": (32, 16)}
    assert {"visual.class_embedding", "text.positional_embedding", "logit_scale"} <= inherited.taken.keys()
    assert len(inherited.taken) + len(inherited.left) == len(saved[0].state_dict())
    assert "did not take 2 tensors (1,024 numbers): visual.proj, text.text_projection" in inherited.describe()
    assert "model.temperature.init: 20.0855, from the pretrained weights" in inherited.describe()


def test_a_temperature_in_the_configuration_wins(saved):
    model = build(saved[1], temperature={"init": 10.0})
    assert model.logit_scale.item() == pytest.approx(math.log(10))
    assert "logit_scale" in model.inherited.left
    assert "10 as configured; the pretrained weights have 20.0855" in model.inherited.describe()


def test_random_towers_have_no_checkpoint(saved):
    model = build(None)
    assert model.inherited is None
    assert model.config.temperature.init == 1 / 0.07
    with pytest.raises(ConfigError, match=r"model\.temperature\.bias: got 'pretrained', but the weights"):
        build(None, temperature={"bias": "pretrained"})


def test_a_scale_above_the_maximum_is_refused(tmp_path, saved):
    _, weights = save_open_clip(tmp_path, "vqclip-inherited", math.log(117.3))
    with pytest.raises(ConfigError, match=r"model\.temperature\.max: got 100, below the scale 117\.3 .* at least 118"):
        build(weights)
    assert build(weights, temperature={"max": 120.0}).logit_scale.exp().item() == pytest.approx(117.3)
    _, weights = save_open_clip(tmp_path, "vqclip-inherited", 4.6052)  # OpenAI's
    assert build(weights).config.temperature.init == 100


def test_a_bias_is_taken_where_it_is_asked_for(tmp_path):
    _, weights = save_open_clip(tmp_path, "vqclip-with-bias", init_logit_bias=-7.0)
    tree = both_towers("vqclip-with-bias", weights)
    asked = ModelConfig.model_validate(tree | {"temperature": {"bias": "pretrained"}}).build()
    assert asked.logit_bias.item() == asked.config.temperature.bias == -7
    assert "logit_bias" in asked.inherited.taken
    plain = ModelConfig.model_validate(tree).build()
    assert plain.logit_bias is None
    assert "logit_bias" in plain.inherited.left
    assert "no bias as configured; the pretrained weights have -7" in plain.inherited.describe()


def test_a_trunk_is_taken_without_its_head(tmp_path):
    vision = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "avg", "timm_proj": "linear"}
    _, weights = save_open_clip(tmp_path, "vqclip-trunk", vision_cfg=vision)
    model = ModelConfig.model_validate(both_towers("vqclip-trunk", weights)).build()
    assert "visual.head.proj.weight" in model.inherited.left
    assert not any(name.startswith("visual.trunk.blocks") for name in model.inherited.left)


def test_weights_that_do_not_affect_the_features_count_as_left():
    tower = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False))
    tensors = {"visual.trunk.proj": tower[0].weight, "visual.trunk.attn_pool": tower[1].weight}
    tower.unused = ("1.weight",)
    found = find_inherited("x", tensors, [tower], ())
    assert (found.taken, found.left) == ({"visual.trunk.proj": (3, 2)}, {"visual.trunk.attn_pool": (4, 3)})


def test_a_folder_has_numbers_and_no_checkpoint(tmp_path, saved):
    model = build(saved[1]).eval()
    model.save_pretrained(tmp_path / "folder")
    loaded = CLIP.from_pretrained(tmp_path / "folder")
    assert loaded.config.temperature == model.config.temperature
    assert loaded.logit_scale.item() == 3.0
    assert loaded.inherited is None
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(loaded.image.continuous(images), model.image.continuous(images))


def test_the_start_of_a_run_lists_it(saved, caplog):
    from vqclip.train import TrainConfig
    from vqclip.train.main import build_task

    tree = {"data": {"sources": [{"kind": "shards", "path": "x"}]}, "loss": {"kind": "contrastive"}}
    config = TrainConfig.model_validate(tree | {"model": both_towers("vqclip-inherited", saved[1])})
    with caplog.at_level(logging.INFO):
        build_task(config, torch.device("cpu"))
    assert "did not take 2 tensors" in caplog.text
