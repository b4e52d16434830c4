"""Low-rank adapters of towers."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from vqclip.errors import ConfigError
from vqclip.towers.image import TimmTowerConfig
from vqclip.towers.text import TransformerTowerConfig

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_rate": 0.1, "proj_drop_rate": 0.1}


def vit(seed=0, **lora):
    torch.manual_seed(seed)
    train = {"lora": {"rank": 2, **lora}} if lora is not None else "none"
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT, train=train).build()


def text(**lora):
    return TransformerTowerConfig(width=16, heads=2, layers=2, train={"lora": {"rank": 2, **lora}}).build()


def adapted(tower):
    return [name for name, module in tower.named_modules() if hasattr(module, "lora_A")]


def test_every_linear_layer_of_the_blocks_is_adapted_and_nothing_else_trains():
    tower = vit()
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert adapted(tower) == [f"backbone.model.blocks.{block}.{layer}" for block in range(2) for layer in layers]
    trained = [name for name, each in tower.named_parameters() if each.requires_grad]
    assert len(trained) == 2 * len(adapted(tower))
    assert all(".lora_" in name for name in trained)
    assert tower.constants == set(tower.state_dict()) - set(trained)


def test_new_adapters_change_nothing_and_are_equal_for_equal_seeds():
    plain = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT, train="none")
    torch.manual_seed(0)
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(vit().eval()(images), (torch.manual_seed(0), plain.build().eval())[1](images))
    one, other, third = vit(), vit(), vit(seed=1)
    name = "backbone.model.blocks.1.mlp.fc2.lora_A.default.weight"
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert not torch.equal(one.state_dict()[name], third.state_dict()[name])


def test_only_the_dropout_of_adapters_is_random():
    tower = vit(dropout=0.2).train()
    dropouts = [n for n, m in tower.named_modules() if m.training and n]
    assert dropouts
    assert all(".lora_dropout" in name for name in dropouts)
    assert not any(isinstance(m, nn.Dropout) and m.p for m in vit().train().modules() if m.training)
    tower.eval()
    assert not any(module.training for module in tower.modules())


def test_open_clips_attention_is_left_out():
    assert adapted(text()) == [
        f"transformer.transformer.resblocks.{block}.mlp.{layer}" for block in range(2) for layer in ("c_fc", "c_proj")
    ]
    with pytest.raises(
        ConfigError, match=r"got 'attn', which is in the name of no linear layer outside of nn.Multihead"
    ):
        text(targets=["attn"])


def test_targets_choose_layers_by_name():
    assert adapted(vit(targets=[r"blocks\.1\..*qkv", "fc2"])) == [
        "backbone.model.blocks.0.mlp.fc2",
        "backbone.model.blocks.1.attn.qkv",
        "backbone.model.blocks.1.mlp.fc2",
    ]
    with pytest.raises(ConfigError, match=r"tower.train.lora.targets: got '\(', no regular expression"):
        vit(targets=["("])


def test_an_adapter_without_gradient_is_refused(monkeypatch):
    def build(self, *args, **kwargs):
        module = original(self, *args, **kwargs)
        self.unused = nn.Linear(4, 4)
        return module

    from vqclip.towers.image import TimmFeatures

    original = TimmFeatures.__init__
    monkeypatch.setattr(TimmFeatures, "__init__", build)
    assert "backbone.unused" not in adapted(vit())
    with pytest.raises(ConfigError, match=r"targets: adapters of backbone.unused do not affect the features"):
        vit(targets=["unused", "fc1"])
    with pytest.raises(ConfigError, match=r"targets: adapters of backbone.unused do not affect the features"):
        vit(targets=["unused"])


def test_a_network_of_convolutions_has_nothing_to_adapt():
    train = {"lora": {"rank": 2}}
    with pytest.raises(ConfigError, match=r"no linear layer that can be adapted .* use train: \{last: 2\}"):
        TimmTowerConfig(name="tf_efficientnet_lite0", image_size=32, train=train).build()


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ConfigError, match=r"tower.train.lora: adapters need the package peft .*pip install 'vqclip\[lora\]'"
    ):
        vit()
