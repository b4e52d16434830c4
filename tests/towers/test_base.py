"""Which parts of a tower train, in which mode its modules run, and what a frozen one gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import built, tiny_model
from tests.towers.kinds import TOWERS, inputs, text
from vqclip.errors import ConfigError
from vqclip.towers.base import chunk_size, frozen_features
from vqclip.towers.image import TimmFeatures, TimmTowerConfig

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
    blocks = tuple(f"backbone.model.{name}" for name in ("blocks.1.", "blocks.2.", "norm.", "head_drop"))
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


def test_more_blocks_than_there_are_and_other_settings_are_refused():
    for train in ("some", {"last": 0}, {"from_step": -1}, {"last": 1, "from_step": 2}, {"lora": {}}):
        with pytest.raises(ValueError, match="train"):
            vit(train)
    assert trained(vit({"last": 3}))[0].startswith("backbone.model.blocks.0.")
    with pytest.raises(ConfigError, match=r"tower.train.last: got 4; this tower has 3 blocks .* expected at most 3"):
        vit({"last": 4})
    tower = tiny_model().text.tower.model_dump() | {"train": {"last": 2}}
    with pytest.raises(ConfigError, match=r"model.text.tower.train.last: got 2; this tower has 1 blocks"):
        tiny_model(text=tiny_model().text.model_dump() | {"tower": tower}).build()


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


def test_batch_norm_is_accepted_where_it_is_frozen_and_refused_elsewhere_with_the_way_out():
    for train in ("none", {"from_step": 0}, {"from_step": 3}, {"last": 16}):
        tower = lite(train).train()
        assert not any(module.training for module in tower.modules() if isinstance(module, nn.BatchNorm2d))
        assert not any(".bn" in name for name in trained(tower))
    with pytest.raises(ConfigError, match=r"first: model.bn1\).*train: none, \{last: 2\}, .* 0\}.*group_norm: 8"):
        lite("all")
    with pytest.raises(ConfigError, match="batch-normalisation"):
        TimmTowerConfig(name="fastvit_t8", image_size=64).build()


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


def adapting(seed=0, **lora):
    torch.manual_seed(seed)
    return vit({"lora": {"rank": 2, **lora}})


def adapted(tower):
    return [name for name, module in tower.named_modules() if hasattr(module, "lora_A")]


def test_every_linear_layer_of_the_blocks_is_adapted_and_nothing_else_trains():
    tower = adapting()
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert adapted(tower) == [f"backbone.model.blocks.{block}.{layer}" for block in range(3) for layer in layers]
    assert len(trained(tower)) == 2 * len(adapted(tower))
    assert all(".lora_" in name for name in trained(tower))
    assert tower.constants == set(tower.state_dict()) - set(trained(tower))


def test_new_adapters_change_nothing_and_are_equal_for_equal_seeds():
    torch.manual_seed(0)
    plain, images = vit("none").eval(), torch.rand(2, 3, 16, 16)
    assert torch.equal(adapting().eval()(images), plain(images))
    one, other, third = adapting(), adapting(), adapting(seed=1)
    name = "backbone.model.blocks.1.mlp.fc2.lora_A.default.weight"
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert not torch.equal(one.state_dict()[name], third.state_dict()[name])


def test_only_the_dropout_of_adapters_is_random():
    tower = adapting(dropout=0.2).train()
    dropouts = [n for n, m in tower.named_modules() if m.training and n]
    assert dropouts
    assert all(".lora_dropout" in name for name in dropouts)
    assert not any(isinstance(m, nn.Dropout) and m.p for m in adapting().train().modules() if m.training)
    tower.eval()
    assert not any(module.training for module in tower.modules())


def test_open_clips_attention_is_left_out():
    assert adapted(text(train={"lora": {"rank": 2}}).build()) == [
        f"transformer.transformer.resblocks.{block}.mlp.{layer}" for block in range(2) for layer in ("c_fc", "c_proj")
    ]
    with pytest.raises(ConfigError, match=r"got 'attn', which is in the name of no linear layer outside of nn.Multi"):
        text(train={"lora": {"rank": 2, "targets": ["attn"]}}).build()
    with pytest.raises(ConfigError, match=r"no linear layer that can be adapted .* use train: \{last: 2\}"):
        lite({"lora": {"rank": 2}})  # a network of convolutions


def test_targets_choose_layers_by_name():
    assert adapted(adapting(targets=[r"blocks\.1\..*qkv", "fc2"])) == [
        "backbone.model.blocks.0.mlp.fc2",
        "backbone.model.blocks.1.attn.qkv",
        "backbone.model.blocks.1.mlp.fc2",
        "backbone.model.blocks.2.mlp.fc2",
    ]
    with pytest.raises(ConfigError, match=r"tower.train.lora.targets: got '\(', no regular expression"):
        adapting(targets=["("])


def test_an_adapter_without_gradient_is_refused(monkeypatch):
    def build(self, *args, **kwargs):
        module = original(self, *args, **kwargs)
        self.unused = nn.Linear(4, 4)
        return module

    original = TimmFeatures.__init__
    monkeypatch.setattr(TimmFeatures, "__init__", build)
    assert "backbone.unused" not in adapted(adapting())
    for targets in (["unused", "fc1"], ["unused"]):
        with pytest.raises(ConfigError, match=r"targets: adapters of backbone.unused do not affect the features"):
            adapting(targets=targets)


CHUNK = chunk_size(torch.device("cpu"))
KINDS = ("vit", "convolutions", "any shape, last two", "text", "text, not causal", "text, options")


@pytest.mark.parametrize("name", KINDS)
def test_a_samples_features_depend_neither_on_its_batch_nor_on_the_mode_which_is_restored(name, tmp_path):
    torch.manual_seed(0)
    tower, count = TOWERS[name](tmp_path).build().requires_grad_(False), 2 * CHUNK + 3
    samples = inputs(tower, count)
    expected = frozen_features(tower, samples)
    assert expected.shape == (count, tower.num_tokens, tower.width)
    for sizes in ([1] * count, [count - 1, 1], [5, CHUNK, count - CHUNK - 5]):
        found = torch.cat([frozen_features(tower, part) for part in samples.split(sizes)])
        assert torch.equal(found, expected)
    order = torch.randperm(count)
    assert torch.equal(frozen_features(tower, samples[order]), expected[order])
    assert frozen_features(tower, samples[:0]).shape == (0, tower.num_tokens, tower.width)
    part, samples = next(module for module in tower.children()), samples[:3]
    tower.train()
    part.eval()
    found = frozen_features(tower, samples)
    assert tower.training
    assert not part.training
    assert not found.requires_grad
    assert torch.equal(frozen_features(tower.eval(), samples), found)
    mask = tower.mask(samples) if hasattr(tower, "mask") else slice(None)
    assert torch.allclose(tower(samples)[mask], found[mask], atol=1e-5)


def test_pixels_get_their_gradient_through_a_frozen_tower():
    """A tokenizer without trainable weights can be part of a loss on images."""
    tokenizer = built().image.eval().requires_grad_(False)
    images = torch.rand(3, 3, 16, 16, requires_grad=True)
    tokenizer.continuous(images)[:, 0].sum().backward()
    assert images.grad.abs().sum() > 0


def test_encoding_with_frozen_weights_costs_what_encoding_costs():
    """Chunks are for training: a caption alone is not padded to 16 of 12 tokens, and its ids stay the same."""
    tokenizer = built().text.eval()
    shapes = []
    tokenizer.tower.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    ids = tokenizer.encode(["a red star"])
    assert torch.equal(tokenizer.requires_grad_(False).encode(["a red star"]), ids)
    assert shapes[0] == shapes[1]
