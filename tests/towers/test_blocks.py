"""Recomputed activations of every kind of tower: the same features and gradients in less memory."""

from __future__ import annotations

import copy
from collections import Counter

import open_clip
import pytest
import timm
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.open_clip_models import save_open_clip
from tests.towers.transformers_models import CAPTIONS, make_image, make_text
from vqclip.errors import ConfigError
from vqclip.nn.shapes import PatchBudget
from vqclip.towers.blocks import block_names, layers, recompute_blocks
from vqclip.towers.image import ConvolutionalTowerConfig, TimmTowerConfig
from vqclip.towers.naflex import NaFlexTowerConfig
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig
from vqclip.towers.text import TextTower, TransformerTowerConfig
from vqclip.towers.transformers import TransformersImageTowerConfig, TransformersTextTowerConfig
from vqclip.train.step import ComputeConfig

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "drop_path_rate": 0.4, "proj_drop_rate": 0.3}
CNN = {"depths": [1, 2, 1, 1], "dims": [8, 8, 16, 24], "drop_path_rate": 0.4}
SE = {"layers": [1, 2, 1, 1], "channels": [8, 8, 16, 16]}
NAFLEX = {
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
    "pos_embed_grid_size": [3, 4],
    "drop_path_rate": 0.4,
}
RESNET = {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "head_width": 64}


def vit(**changes):
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=32, args=VIT, **changes)


def resnet(folder):
    name = "vqclip-blocks-resnet"
    save_open_clip(folder, name, vision_cfg=RESNET)
    return OpenCLIPImageTowerConfig(model=name, train={"last": 3})


def open_clip_vit(folder):
    return OpenCLIPImageTowerConfig(model="vqclip-blocks", pretrained=save_open_clip(folder, "vqclip-blocks")[1])


def transformers_image(folder, name):
    make_image(folder, name)
    return TransformersImageTowerConfig(name=str(folder))


def transformers_text(folder, name):
    make_text(folder, name)
    return TransformersTextTowerConfig(name=str(folder), context_length=12, dropout=True)


TOWERS = {
    "vit": lambda folder: vit(),
    "vit, adapters": lambda folder: vit(train={"lora": {"rank": 2, "dropout": 0.5}}),
    "any shape, last two": lambda folder: NaFlexTowerConfig(max_tokens=12, args=NAFLEX, train={"last": 2}),
    "convnext": lambda folder: TimmTowerConfig(name="convnext_atto", image_size=32, args=CNN),
    "convolutions": lambda folder: ConvolutionalTowerConfig(image_size=32, channels=[8, 16, 24]),
    "squeeze and excitation": lambda folder: TimmTowerConfig(name="seresnet18", image_size=32, args=SE, group_norm=4),
    "normalizer-free": lambda folder: TimmTowerConfig(name="test_nfnet", image_size=32),
    "open_clip": open_clip_vit,
    "open_clip's resnet": resnet,
    "text": lambda folder: TransformerTowerConfig(context_length=12, width=16, heads=2, layers=3),
    "text, options": lambda folder: TransformerTowerConfig(
        context_length=12,
        width=16,
        heads=2,
        layers=3,
        pos_embed="rope",
        mlp_layer="swiglu",
        train={"lora": {"rank": 2}},
    ),
    "swin": lambda folder: transformers_image(folder, "swin"),
    "bert": lambda folder: transformers_text(folder, "bert"),
    "t5": lambda folder: transformers_text(folder, "t5_encoder"),
}


def inputs(tower, samples=4):
    if isinstance(tower, TextTower):
        return tower.vocabulary([*CAPTIONS, "red"] * samples)
    if isinstance(tower.size, PatchBudget):
        images = torch.randint(0, 256, (samples, 3, 12, 16), dtype=torch.uint8)
        return torch.stack([tower.size.cut(image[:, :, : 4 + 4 * n]) for n, image in enumerate(images)])
    return torch.rand(samples, 3, tower.image_size, tower.image_size)


def results(tower, batch):
    """Features and gradients of weights that require one, with the random numbers of one seed."""
    torch.manual_seed(1)
    features = tower(batch)
    weights = [weight for weight in tower.parameters() if weight.requires_grad]
    return [features, *torch.autograd.grad(features.square().sum(), weights)]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made in the block that are still in memory, and the number of products of matrices."""

    def __init__(self):
        super().__init__()
        self.made, self.calls = {}, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls["products"] += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.made[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        return out

    @property
    def bytes(self):
        return sum(size for reference, size in self.made.items() if not reference.expired())


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
    batch = inputs(plain, 16)
    held, products = {}, {}
    for which in (False, 2, True):
        tower = copy.deepcopy(plain)
        recompute_blocks([tower], which)
        with LiveBytes() as live:
            features = tower(batch)
            held[which] = live.bytes
            before = live.calls["products"]
            features.sum().backward()
        products[which] = live.calls["products"] - before
    assert held[False] > 1.2 * held[2] > 1.4 * held[True]
    assert products[False] < products[2] < products[True]


@pytest.mark.slow
def test_a_compiled_tower_recomputes_its_blocks_in_one_graph():
    torch.manual_seed(0)
    plain = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build()
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


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def timm_model(name, **args):
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0, **args)


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
    "open_clip": (
        open_clip_vision,
        [f"transformer.resblocks.{n}" for n in range(3)],
        "class_embedding",
        "ln_post.bias",
    ),
    "bert": (bert, [f"encoder.layer.{n}" for n in range(3)], "embeddings.LayerNorm.weight", None),
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
