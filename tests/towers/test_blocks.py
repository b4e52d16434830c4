"""Recomputed activations of every kind of tower: the same features and gradients in less memory."""

from __future__ import annotations

import copy

import open_clip
import pytest
import timm
import torch
import transformers

from tests.towers.kinds import TOWERS, inputs, vit
from vqclip.errors import ConfigError
from vqclip.towers.blocks import block_names, layers, recompute_blocks
from vqclip.train.step import ComputeConfig


def results(tower, batch):
    """Features and gradients of weights that require one, with the random numbers of one seed."""
    torch.manual_seed(1)
    features = tower(batch)
    weights = [weight for weight in tower.parameters() if weight.requires_grad]
    return [features, *torch.autograd.grad(features.square().sum(), weights)]


@pytest.mark.parametrize("name", TOWERS)
def test_recomputed_blocks_change_no_bit(name, tmp_path):
    torch.manual_seed(0)
    plain = TOWERS[name](tmp_path).build()
    batch = inputs(plain)
    expected = results(plain, batch)
    names = list(plain.state_dict())
    for which in (True, 2):
        tower = copy.deepcopy(plain)
        recompute_blocks([tower], which)
        copied = copy.deepcopy(tower)  # as for the task that evaluates weights in shards
        for weight in tower.parameters():
            weight.data = weight.data.clone()
        assert list(tower.state_dict()) == names
        assert all(torch.equal(a, b) for a, b in zip(results(tower, batch), expected, strict=True)), which
        with torch.no_grad():
            torch.manual_seed(1)
            torch.testing.assert_close(tower(batch), expected[0])  # attention has another kernel then
        with torch.no_grad():
            for weight in tower.parameters():
                weight.zero_()
        assert torch.equal(results(copied, batch)[0], expected[0])


@pytest.mark.parametrize("name", ["vit", "text", "bert", "open_clip"])
def test_memory_for_the_backward_falls_with_the_blocks_that_are_recomputed(name, tmp_path):
    plain = TOWERS[name](tmp_path).build()
    batch, held = inputs(plain, 16), {}
    for which in (False, 2, True):
        tower, sizes = copy.deepcopy(plain), []
        recompute_blocks([tower], which)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            tower(batch)
        held[which] = sum(sizes)
    assert held[False] > 1.2 * held[2] > 1.4 * held[True]


@pytest.mark.slow
def test_a_compiled_tower_recomputes_its_blocks_in_one_graph():
    torch.manual_seed(0)
    plain = vit().build()
    batch = inputs(plain, 2)
    expected = results(plain, batch)
    tower = copy.deepcopy(plain)
    recompute_blocks([tower], True)
    compiled = torch.compile(tower, backend="aot_eager", fullgraph=True)
    for one, other in zip(results(compiled, batch), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_more_blocks_than_there_are_and_wrong_values_are_refused():
    with pytest.raises(ConfigError, match=r"got 5, but no tower .* more than 4 blocks; expected at most 4"):
        recompute_blocks([vit().build(), TOWERS["text"](None).build()], 5)
    for value in (0, -1, 1.5, "blocks", "true", None):
        with pytest.raises(ValueError, match="activation_checkpointing"):
            ComputeConfig(activation_checkpointing=value)
    assert [ComputeConfig(activation_checkpointing=v).activation_checkpointing for v in (True, 1)] == [True, 1]
    assert type(ComputeConfig(activation_checkpointing=1).activation_checkpointing) is int


def timm_model(name, **args):
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0, **args)


def bert():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3}
    config = transformers.BertConfig(vocab_size=50, add_pooling_layer=False, **sizes)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


CASES = {
    "convnext": (
        lambda: timm_model("convnext_atto", depths=(1, 2, 1, 1)),
        [f"stages.{s}.blocks.{b}" for s, b in ((0, 0), (1, 0), (1, 1), (2, 0), (3, 0))],
        "stem.0.weight",
    ),
    "efficientnet": (
        lambda: timm_model("tf_efficientnet_lite0"),
        [f"blocks.{s}.{b}" for s, many in enumerate((1, 2, 2, 3, 3, 4, 1)) for b in range(many)],
        "conv_stem.weight",
    ),
    "open_clip": (
        lambda: open_clip.transformer.VisionTransformer(16, 8, 32, 3, 2, 4.0, output_dim=8),
        [f"transformer.resblocks.{n}" for n in range(3)],
        "class_embedding",
    ),
    "bert": (bert, [f"encoder.layer.{n}" for n in range(3)], "embeddings.LayerNorm.weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_found_from_input_to_output(case):
    make, blocks, first = CASES[case]
    tower = make()
    found = layers(tower)
    assert sorted(name for each in found for name in each) == sorted(name for name, _ in tower.named_parameters())
    assert block_names(tower) == blocks
    assert len(found) == len(blocks) + 2
    assert first in found[0]
    for name, parameters in zip(blocks, found[1:-1], strict=True):
        assert any(each.startswith(f"{name}.") for each in parameters)
    if case == "convnext":  # downsampling belongs to the block after it
        of_downsampling = [any(".downsample." in name for name in each) for each in found]
        assert of_downsampling == [False, False, True, False, True, True, False]
