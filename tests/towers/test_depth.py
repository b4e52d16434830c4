"""The order of a tower's parameters from input to output, for every kind of network."""

from __future__ import annotations

import open_clip
import pytest
import timm
import torch
import transformers
from torch import nn

from vqclip.towers.blocks import block_names, depth_of, layers
from vqclip.towers.image import ConvolutionalTowerConfig, TimmTowerConfig
from vqclip.towers.text import TransformerTowerConfig

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def timm_model(name, **args):
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0, **args)


def t5_encoder():
    with torch.device("meta"):
        config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=50)
        return transformers.AutoModel.from_config(config).encoder


def bert():
    with torch.device("meta"):
        return transformers.AutoModel.from_config(
            transformers.BertConfig(num_hidden_layers=3, vocab_size=50, add_pooling_layer=False, **SMALL)
        )


def open_clip_vision():
    return open_clip.transformer.VisionTransformer(16, 8, 32, 3, 2, 4.0, output_dim=8)


CASES = {
    "vit": (
        lambda: timm_model("vit_tiny_patch16_224", depth=3),
        [f"blocks.{n}" for n in range(3)],
        "pos_embed",
        "norm.bias",
    ),
    "convnext": (
        lambda: timm_model("convnext_atto", depths=(1, 2, 1, 1)),
        [f"stages.{s}.blocks.{b}" for s, b in ((0, 0), (1, 0), (1, 1), (2, 0), (3, 0))],
        "stem.0.weight",
        "head.norm.weight",
    ),
    "efficientnet": (
        lambda: timm_model("tf_efficientnet_lite0"),
        [f"blocks.{s}.{b}" for s, many in enumerate((1, 2, 2, 3, 3, 4, 1)) for b in range(many)],
        "conv_stem.weight",
        "conv_head.weight",
    ),
    "resnet": (lambda: timm_model("resnet10t"), [f"layer{n}.0" for n in range(1, 5)], "conv1.0.weight", None),
    "densenet": (lambda: timm_model("densenet121"), None, None, None),
    "open_clip": (
        open_clip_vision,
        [f"transformer.resblocks.{n}" for n in range(3)],
        "class_embedding",
        "ln_post.bias",
    ),
    "bert": (bert, [f"encoder.layer.{n}" for n in range(3)], "embeddings.LayerNorm.weight", None),
    "t5": (t5_encoder, [f"block.{n}" for n in range(3)], "embed_tokens.weight", "final_layer_norm.weight"),
    "text": (
        lambda: TransformerTowerConfig(width=16, heads=2, layers=3).build(),
        [f"transformer.transformer.resblocks.{n}" for n in range(3)],
        "transformer.token_embedding.weight",
        "transformer.ln_final.weight",
    ),
    "convolutional": (
        lambda: ConvolutionalTowerConfig(image_size=32).build(),
        [f"backbone.stages.{n}" for n in range(4)],
        None,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_found_from_input_to_output(case):
    make, blocks, first, last = CASES[case]
    tower = make()
    found = layers(tower)
    assert sorted(name for each in found for name in each) == sorted(name for name, _ in tower.named_parameters())
    names = block_names(tower)
    assert len(found) == len(names) + 2
    if blocks is not None:
        assert names == blocks
    for name, parameters in zip(names, found[1:-1], strict=True):
        assert any(each.startswith(f"{name}.") for each in parameters)
    assert first is None or first in found[0]
    assert last is None or last in found[-1]


def test_downsampling_belongs_to_the_block_after_it():
    found = layers(timm_model("convnext_atto", depths=(1, 1, 1, 1)))
    assert [any(".downsample." in name for name in each) for each in found] == [False, False, True, True, True, False]


def test_modules_have_a_depth_too():
    tower = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=32, args={"depth": 2}).build()
    names = [name for name, _ in tower.named_modules()]
    depths = depth_of(tower, names, block_names(tower))
    model = "backbone.model"
    expected = {"patch_embed.proj": 0, "pos_drop": 0, "blocks.0.attn.qkv": 1, "blocks.1": 2, "norm": 3}
    assert {name: depths[f"{model}.{name}"] for name in expected} == expected


def test_embeddings_registered_last_are_still_first():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(2))
            self.norm = nn.LayerNorm(8)
            self.positions = nn.Embedding(4, 8)

    found = layers(Late())
    assert found[0] == ["positions.weight"]
    assert found[-1] == ["norm.weight", "norm.bias"]


def test_an_adapted_layer_is_one_layer():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer, self.lora_A, self.lora_B = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)

    block = nn.Module()
    block.mlp = nn.Sequential(Adapted(), nn.GELU(), Adapted())
    block.norm = nn.LayerNorm(8)
    tower = nn.Module()
    tower.blocks = nn.Sequential(block)
    assert block_names(tower) == ["blocks.0"]
