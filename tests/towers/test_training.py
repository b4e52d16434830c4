"""Which parameters of a tower train, and in which mode its modules run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import tiny_model
from vqclip.errors import ConfigError
from vqclip.towers.image import TimmTowerConfig
from vqclip.towers.text import TransformerTowerConfig

DROPOUT = {"drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.2}
VIT = {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2} | DROPOUT


def vit(train):
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT, train=train).build()


def lite(train):
    return TimmTowerConfig(name="tf_efficientnet_lite0", image_size=32, train=train).build()


def trained(tower):
    return [name for name, parameter in tower.named_parameters() if parameter.requires_grad]


def randomness(tower):
    """Names of the modules that draw random numbers in training mode."""
    return [
        name
        for name, module in tower.named_modules()
        if module.training and (getattr(module, "p", None) or getattr(module, "drop_prob", None))
    ]


def test_a_frozen_tower_has_no_gradient_and_stays_in_evaluation_mode():
    tower = vit("none")
    assert tower.is_frozen
    assert tower.constants == set(tower.state_dict())
    assert tower.train().training  # its own flag is what callers have set
    assert [name for name, module in tower.named_modules() if module.training] == [""]
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(tower(images), tower(images))
    assert not tower(images).requires_grad


def test_the_last_blocks_train_and_the_others_do_not():
    tower = vit({"last": 2}).train()
    blocks = (
        "backbone.model.blocks.1.",
        "backbone.model.blocks.2.",
        "backbone.model.norm.",
        "backbone.model.head_drop",
    )
    assert trained(tower) == [name for name, _ in tower.named_parameters() if name.startswith(blocks)]
    assert tower.constants == set(tower.state_dict()) - set(trained(tower))
    assert randomness(tower)
    assert all(name.startswith(blocks) for name in randomness(tower))
    tower(torch.rand(2, 3, 16, 16)).sum().backward()
    assert [name for name, each in tower.named_parameters() if each.grad is not None] == trained(tower)
    assert not any(module.training for module in tower.eval().modules())


def test_frozen_blocks_hold_no_activations():
    """The graph begins with the first trainable block."""
    kept: list[int] = []
    saved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t)
    sizes = {}
    for train in ("all", "last", "none"):
        tower = vit({"last": 1} if train == "last" else train)
        kept.clear()
        with saved:
            tower(torch.rand(2, 3, 16, 16))
        sizes[train] = sum(kept)
    assert sizes["none"] == 0
    assert 0 < sizes["last"] < 0.5 * sizes["all"]


def test_more_blocks_than_there_are():
    assert trained(vit({"last": 3}))[0].startswith("backbone.model.blocks.0.")
    with pytest.raises(ConfigError, match=r"tower.train.last: got 4; this tower has 3 blocks .* expected at most 3"):
        vit({"last": 4})
    with pytest.raises(ConfigError, match=r"model.text.tower.train.last: got 2; this tower has 1 blocks"):
        tiny_model(text=tiny_model().text.model_dump() | {"tower": {**TEXT, "train": {"last": 2}}}).build()


TEXT = {"kind": "transformer", "context_length": 12, "width": 16, "heads": 2, "layers": 1}


def test_a_text_tower():
    tower = TransformerTowerConfig(width=16, heads=2, layers=2, train={"last": 1}).build()
    assert {name.removeprefix("transformer.").split(".")[0] for name in trained(tower)} == {"transformer", "ln_final"}
    assert all("resblocks.1" in name or "ln_final" in name for name in trained(tower))
    assert TransformerTowerConfig(width=16, heads=2, layers=2, train="none").build().is_frozen


def test_batch_norm_stays_as_it_is_while_convolutions_train():
    tower = lite({"last": 2}).train()
    norms = {n: m for n, m in tower.named_modules() if isinstance(m, nn.BatchNorm2d)}
    before = {n: v.clone() for n, v in tower.state_dict().items() if n.rpartition(".")[0] in norms}
    assert len(before) == 5 * len(norms)
    assert not any(module.training for module in norms.values())
    optimizer = torch.optim.AdamW((p for p in tower.parameters() if p.requires_grad), lr=1.0)
    features = tower(torch.rand(4, 3, 32, 32))
    features.sum().backward()
    optimizer.step()
    assert all(torch.equal(tower.state_dict()[name], value) for name, value in before.items())
    assert {name.split(".")[2] for name in trained(tower)} == {"blocks", "conv_head"}
    assert "backbone.model.blocks.6.0.conv_dw.weight" in trained(tower)
    torch.testing.assert_close(lite({"last": 2})(torch.zeros(4, 3, 32, 32)).std(dim=0).max(), torch.tensor(0.0))


@pytest.mark.parametrize("train", ["none", {"from_step": 0}, {"from_step": 3}, {"last": 16}])
def test_batch_norm_is_accepted_where_it_is_frozen(train):
    tower = lite(train).train()
    assert not any(module.training for module in tower.modules() if isinstance(module, nn.BatchNorm2d))
    assert not any(".bn" in name for name in trained(tower))


def test_trainable_batch_norm_is_refused_with_the_way_out():
    with pytest.raises(
        ConfigError, match=r"first: model.bn1\).*train: none, \{last: 2\}, \{from_step: 0\}.*group_norm: 8"
    ):
        lite("all")


def test_a_tower_that_waits_for_its_step():
    tower = vit({"from_step": 3}).train()
    names = trained(tower)
    assert not tower.constants
    assert not tower.move_to_step(3)
    assert tower.move_to_step(0)
    assert tower.is_frozen
    assert not randomness(tower.train())
    assert not tower.move_to_step(2)
    with tower.unfrozen():
        assert randomness(tower)
        assert trained(tower) == names
    assert tower.is_frozen
    assert tower.move_to_step(3)
    assert trained(tower) == names
    assert randomness(tower)
    assert tower.move_to_step(1)
    assert tower.is_frozen


@pytest.mark.parametrize("train", ["some", {"last": 0}, {"from_step": -1}, {"last": 1, "from_step": 2}, {"lora": {}}])
def test_other_settings_are_refused(train):
    with pytest.raises(ValueError, match="train"):
        vit(train)
