"""Frozen networks: their layers, their weights, and what a user can get wrong."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import vqclip
from tests.models import tiny_model
from tests.pixels.losses.test_contract import L1, PATCH, TIMM, TOKENIZER, build, images
from tests.ranks import for_each
from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.io.tensors import save_tensors
from vqclip.pixels.networks import FeatureNetwork, TokenizerNetworkConfig, build_network
from vqclip.towers.image import TimmTowerConfig

HEADS = PATCH | {"discriminator": {"kind": "features", "network": TOKENIZER, "width": 8}}


def test_features_are_those_of_the_towers_blocks():
    config, pixels = TimmTowerConfig.model_validate(TIMM), torch.rand(2, 3, 24, 24)
    network, model = build_network(config, [0, -1]), config.build().eval().backbone.model
    normal = (pixels - network.tower.normalize.mean) / network.tower.normalize.std
    expected = model.get_intermediate_layers(normal, n=[0, 2], return_prefix_tokens=True)
    assert network.widths == [16, 16]
    for one, (patches, prefix) in zip(network(pixels), expected, strict=True):
        torch.testing.assert_close(one, torch.cat([prefix, patches], dim=1))


@pytest.mark.parametrize(
    ("name", "size", "args", "wanted"),
    [
        ("resnet18", 32, {}, [64, 64, 128, 128, 256, 256, 512, 512]),
        ("swin_tiny_patch4_window7_224", 224, {"embed_dim": 8, "depths": [1, 1, 1, 1]}, [8, 16, 32, 64]),
    ],
)
def test_channels_are_last_in_any_layout(name, size, args, wanted):
    network = FeatureNetwork(TimmTowerConfig(name=name, image_size=size, args=args, train="none").build())
    assert network.widths == wanted
    assert [each.shape[2] for each in network(torch.rand(1, 3, 16, 16))] == wanted


def test_value_by_hand():
    losses, (made, real) = build([{"kind": "perceptual", "network": TOKENIZER, "layers": [1]}]), images(3)
    tower = vqclip.load_tokenizer("tokenizer", "image").tower.double()
    one, other = (tower(each).detach() for each in (made, real))
    expected = 1 - F.cosine_similarity(one, other, dim=2).mean()
    torch.testing.assert_close(losses.terms(losses(made, real, 0), 0)[0]["perceptual"], expected)


def test_features_of_a_folder_in_half_precision_are_computed_in_fp32():
    tiny_model().build().image.bfloat16().save_pretrained("half")
    network = build_network(TokenizerNetworkConfig(folder="half"), None)
    assert [each.dtype for each in network(torch.rand(1, 3, 16, 16))] == [torch.float32] * 2


def test_networks_are_constants():
    losses = build([L1, {"kind": "perceptual", "network": TIMM}, HEADS])
    judge = losses.adversaries["adversarial"]
    assert [name for name, _ in losses.named_parameters()] == list(losses.state_dict())
    assert all(".heads." in name for name in losses.state_dict())
    assert not any(each.training for each in losses.train().distances["perceptual"].network.modules())
    assert {each.dtype for each in judge.buffers()} == {torch.float64}
    losses.load_state_dict(copy.deepcopy(losses).state_dict())


def test_identity_names_weights_not_their_place():
    terms = [L1, {"kind": "perceptual", "network": TOKENIZER}, HEADS]
    shutil.copytree("tokenizer", "elsewhere", dirs_exist_ok=True)
    moved = [L1, terms[1] | {"network": TOKENIZER | {"folder": "elsewhere"}}, HEADS]
    one, other = build(terms).identity, build(moved).identity
    assert one == other
    assert one[0] == {"kind": "l1", "weight": 1.0, "start_step": 0}
    assert len(one[1]["digest"]) == len(one[2]["digest"]) == 64
    assert "network" not in one[1]
    assert "network" not in one[2]["discriminator"]
    first_layer = build([terms[1] | {"layers": [0]}]).identity[0]
    assert first_layer["digest"] != one[1]["digest"]


@pytest.mark.parametrize(
    ("network", "layers", "message"),
    [
        (TOKENIZER | {"folder": "nowhere"}, None, r"losses\[0\].*network\.folder: nowhere"),
        (TIMM | {"checkpoint": "nothing.safetensors"}, None, r"losses\[0\].*network\.checkpoint: nothing"),
        (TIMM | {"checkpoint": None}, None, r"losses\[0\].*network: got random weights"),
        (TIMM | {"train": {"last": 1}}, None, r"losses\[0\].*network\.train: got parts that train"),
        (TIMM | {"name": "vit_tony"}, None, r"losses\[0\].*network\.name: timm has no model 'vit_tony'"),
        (TIMM, [3], r"losses\[0\].*layers: got 3; this network has 3 blocks, backbone.model.blocks.0 to"),
        (TIMM | {"checkpoint": "bad.safetensors"}, None, r"network\.checkpoint: .*norm.weight: contains NaN"),
    ],
)
def test_mistakes_name_their_key(network, layers, message):
    vit = TimmTowerConfig.model_validate(TIMM).build().backbone.model.state_dict()
    vit["norm.weight"][0] = float("nan")
    save_tensors(vit, Path("bad.safetensors"))
    with pytest.raises(ConfigError, match=message):
        build([{"kind": "perceptual", "network": network, "layers": layers}])
    heads = {"kind": "features", "network": network, "layers": layers}
    with pytest.raises(ConfigError, match=message.replace(r"losses\[0\]", r"losses\[1\].*discriminator")):
        build([L1, PATCH | {"discriminator": heads}])


def error_of_folders(folders):
    try:
        build([{"kind": "perceptual", "network": TOKENIZER | {"folder": folders[dist.rank()]}}])
    except ConfigError as error:
        return str(error)


def test_every_rank_hears_of_another_ranks_weights(ranks, networks):
    good, other = f"{networks}/tokenizer", f"{networks}/another"
    tokenizer = vqclip.load_tokenizer(good, "image")
    next(tokenizer.tower.parameters()).data *= 2
    tokenizer.save_pretrained(other)
    jobs = [([good, folder],) for folder in (good, other, "nowhere")]
    for equal, different, missing in ranks(2, for_each, error_of_folders, jobs):
        assert equal is None
        assert different == "losses: rank 1 loaded other weights than rank 0; expected equal files"
        assert "nowhere" in missing
