"""Towers from both halves of open_clip models."""

import logging
import math
from unittest import mock

import open_clip
import pytest
import torch
from torch import nn

from tests.data.hostile import Marker
from tests.open_clip_models import TRUNK, both_towers, save_open_clip
from tests.towers.kinds import RESNET
from vqclip.errors import ConfigError
from vqclip.model import CLIP, ModelConfig
from vqclip.nn.temperature import TemperatureConfig
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig, OpenCLIPTextTowerConfig, describe_inherited

NAME = "vqclip-test"
EVIL = object()
"""In place of a state dict: an object whose pickle runs code."""


def test_open_clip_models_that_give_no_patch_features_are_refused(monkeypatch):
    told = "tower.model: the vision half of 'coca_ViT-B-32'.*such as ViT-B-16"
    with pytest.raises(ConfigError, match=told), torch.device("meta"):
        OpenCLIPImageTowerConfig(model="coca_ViT-B-32").build()

    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("open_clip.create_model", offline)
    with pytest.raises(ConfigError, match="tower.model: open_clip cannot make roberta-ViT-B-32: OSError: no network"):
        OpenCLIPImageTowerConfig(model="roberta-ViT-B-32").build()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small model and a local file of its weights, as open_clip reads them."""
    return save_open_clip(tmp_path_factory.mktemp("open_clip"), NAME)


def test_an_open_clip_tower_with_a_timm_trunk(tmp_path):
    save_open_clip(tmp_path, "vqclip-trunk", vision_cfg=TRUNK)
    tower = OpenCLIPImageTowerConfig(model="vqclip-trunk").build()
    images = torch.rand(1, 3, 224, 224)
    trunk = tower.backbone.model
    torch.testing.assert_close(tower.eval()(images), trunk.forward_features(tower.normalize(images))[:, 1:])
    tower.train()(images).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.fixture
def resnet(tmp_path):
    """The name of a small relative of RN50."""
    save_open_clip(tmp_path, "vqclip-resnet", vision_cfg=RESNET)
    return "vqclip-resnet"


def test_a_resnet_gives_its_last_feature_map(resnet):
    tower = OpenCLIPImageTowerConfig(model=resnet, train="none").build()
    images = torch.rand(5, 3, 64, 64)
    visual = tower.backbone.visual
    for module in visual.modules():  # statistics and maps that are not those of a new layer
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.data.uniform_(0.5, 1.5)
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    maps = visual.forward_intermediates(tower.normalize(images), intermediates_only=True)["image_intermediates"]
    features = tower.train()(images)
    torch.testing.assert_close(features, maps[-1].flatten(2).transpose(1, 2))
    assert features.shape == (5, tower.num_tokens, tower.width) == (5, 4, 256)
    torch.testing.assert_close(features[:1], tower(images[:1]))  # no statistics of the batch
    assert all(torch.equal(before[name], tensor) for name, tensor in tower.state_dict().items())
    assert tower.constants == tower.state_dict().keys()


def test_the_last_blocks_of_a_resnet_train_without_their_batch_norm(resnet):
    tower = OpenCLIPImageTowerConfig(model=resnet, train={"last": 2}).build()
    tower.train()(torch.rand(2, 3, 64, 64)).sum().backward()
    trained = {name for name, weight in tower.named_parameters() if weight.grad is not None}
    assert {name.split(".")[2] for name in trained} == {"layer3", "layer4"}
    assert all("conv" in name or "downsample.0" in name for name in trained)
    with pytest.raises(ConfigError, match=r"tower\.train: got 'all' for a model with 22 batch-normalisation layers"):
        OpenCLIPImageTowerConfig(model=resnet).build()


def narrow(state):
    name = next(each for each in state if each.endswith("positional_embedding") and "visual" not in each)
    return {**state, name: state[name][:, :-2].clone()}


def with_nan(state):
    return {**state, "visual.conv1.weight": torch.full_like(state["visual.conv1.weight"], float("nan"))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda state: {"nothing": torch.zeros(1)}, r"weights.pt' cannot be loaded as weights of vqclip-test"),
        (with_nan, r"weights.pt' contain NaN or infinity: visual\.conv1"),
        (narrow, r"weights.pt' cannot be loaded .*expected a state dict of this model"),
        (lambda state: {"state_dict": [1]}, "expected a state dict"),
        (lambda state: EVIL, r"weights.pt cannot be read: it is damaged, .*code in it is never run"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_pickles_are_not_run(saved, tmp_path, content, message):
    path, made = tmp_path / "weights.pt", content(saved[0].state_dict())
    torch.save(Marker(tmp_path / "was here") if made is EVIL else made, path)
    with pytest.raises(ConfigError, match=rf"^tower.pretrained: .*{message}"):
        OpenCLIPImageTowerConfig(model=NAME, pretrained=str(path)).build()
    assert not (tmp_path / "was here").exists()


def test_an_unknown_open_clip_model_or_tag_is_refused():
    for name, pretrained, message in (
        ("ViT-B-61", None, "no model 'ViT-B-61'; did you mean one of: ViT-B-16"),
        ("zzzz", None, r"no model 'zzzz'; open_clip.list_models\(\) gives the names$"),
        ("local-dir:/nowhere", None, "open_clip has no model 'local-dir:/nowhere'"),
        ("hf-hub:nobody/nothing", None, "open_clip has no model 'hf-hub:nobody/nothing'"),
        ("ViT-B-32", "laion", "got 'laion', which is neither a file nor one of the tags.*laion400m_e31"),
        ("ViT-B-32", "openai", "trained with QuickGELU.*expected ViT-B-32-quickgelu"),
    ):
        with pytest.raises(ConfigError, match=message):
            OpenCLIPImageTowerConfig(model=name, pretrained=pretrained).build()


def build(weights, **changes):
    torch.manual_seed(1)
    return ModelConfig.model_validate(both_towers(NAME, weights, **changes)).build()


def test_one_line_initialises_both_towers_and_the_temperature_and_lists_what_was_not_taken(saved, tmp_path):
    theirs, weights = saved
    with mock.patch("open_clip.create_model", wraps=open_clip.create_model) as create:
        model = build(weights)
    assert create.call_count == 1
    torch.testing.assert_close(model.image.tower.backbone.visual.conv1.weight, theirs.visual.conv1.weight)
    torch.testing.assert_close(model.text.tower.transformer.token_embedding.weight, theirs.token_embedding.weight)
    assert OpenCLIPTextTowerConfig(model=NAME).vocabulary()(["a cat"]).shape == (1, 12)
    assert model.logit_scale.item() == 3.0
    assert model.config.temperature.init == pytest.approx(math.exp(3))
    assert model.inherited.splitlines() == [
        f"model.towers: took {len(theirs.state_dict()) - 2} tensors of {NAME} ({weights})",
        "model.towers: did not take 2 tensors: visual.proj, text.text_projection",
        "model.temperature.init: 20.0855, from the pretrained weights",
    ]
    model.eval().save_pretrained(tmp_path / "folder")
    loaded = CLIP.from_pretrained(tmp_path / "folder")  # a folder has numbers and no checkpoint
    assert loaded.config.temperature == model.config.temperature
    assert (loaded.logit_scale.item(), loaded.inherited) == (3.0, "")
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(loaded.image.continuous(images), model.image.continuous(images))


def test_the_temperature_is_the_weights_or_the_configurations(tmp_path, saved):
    model = build(saved[1], temperature={"init": 10.0})
    assert model.logit_scale.item() == pytest.approx(math.log(10))
    assert "did not take 3 tensors: logit_scale, visual.proj, text.text_projection" in model.inherited
    assert "10 as configured; the pretrained weights have 20.0855" in model.inherited
    random = build(None)
    assert (random.inherited, random.config.temperature.init) == ("", 1 / 0.07)
    with pytest.raises(ConfigError, match=r"model\.temperature\.bias: got 'pretrained', but the weights"):
        build(None, temperature={"bias": "pretrained"})
    _, weights = save_open_clip(tmp_path, NAME, math.log(117.3))
    with pytest.raises(ConfigError, match=r"model\.temperature\.max: got 100, below the scale 117\.3 .* at least 118"):
        build(weights)
    assert build(weights, temperature={"max": 120.0}).logit_scale.exp().item() == pytest.approx(117.3)
    _, weights = save_open_clip(tmp_path, NAME, 4.6052)  # OpenAI's
    assert build(weights).config.temperature.init == 100


def test_a_bias_is_taken_where_it_is_asked_for(tmp_path):
    _, weights = save_open_clip(tmp_path, "vqclip-with-bias", init_logit_bias=-7.0)
    tree = both_towers("vqclip-with-bias", weights)
    asked = ModelConfig.model_validate(tree | {"temperature": {"bias": "pretrained"}}).build()
    assert asked.logit_bias.item() == asked.config.temperature.bias == -7
    assert "logit_bias" not in asked.inherited
    plain = ModelConfig.model_validate(tree).build()
    assert plain.logit_bias is None
    assert "logit_bias" in plain.inherited.splitlines()[1]
    assert "no bias as configured; the pretrained weights have -7" in plain.inherited


def test_weights_that_do_not_affect_the_features_count_as_left():
    tower = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False))
    tensors = {"visual.trunk.proj": tower[0].weight, "visual.trunk.attn_pool": tower[1].weight}
    tower.unused = ("1.weight",)
    found = describe_inherited("x", tensors, [tower], TemperatureConfig().start({}))
    assert "took 1 tensors of x" in found
    assert "did not take 1 tensors: visual.trunk.attn_pool" in found


def test_the_start_of_a_run_lists_it(saved, caplog):
    from vqclip.train import TrainConfig
    from vqclip.train.main import build_task

    tree = {"data": {"sources": [{"kind": "shards", "path": "x"}]}, "loss": {"kind": "contrastive"}}
    config = TrainConfig.model_validate(tree | {"model": both_towers(NAME, saved[1])})
    with caplog.at_level(logging.INFO):
        build_task(config, torch.device("cpu"))
    assert "did not take 2 tensors" in caplog.text
