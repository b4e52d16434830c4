"""Small towers of every kind, and inputs for them."""

import torch

from tests.open_clip_models import save_open_clip
from tests.towers.transformers_models import make_image, make_text
from vqclip.nn.shapes import PatchBudget
from vqclip.towers.image import ConvolutionalTowerConfig, TimmTowerConfig
from vqclip.towers.naflex import NaFlexTowerConfig
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig
from vqclip.towers.text import TextTower, TransformerTowerConfig
from vqclip.towers.transformers import TransformersImageTowerConfig, TransformersTextTowerConfig

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "drop_path_rate": 0.4, "proj_drop_rate": 0.3}
CNN = {"depths": [1, 2, 1, 1], "dims": [8, 8, 16, 24], "drop_path_rate": 0.4}
SE = {"layers": [1, 2, 1, 1], "channels": [8, 8, 16, 16]}
NAFLEX = {"patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "pos_embed_grid_size": [3, 4]}
RESNET = {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "head_width": 64}


def vit(**changes):
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=32, args=VIT, **changes)


def resnet(folder):
    name = "vqclip-blocks-resnet"
    save_open_clip(folder, name, vision_cfg=RESNET)
    return OpenCLIPImageTowerConfig(model=name, train={"last": 3})


def open_clip_vit(folder):
    return OpenCLIPImageTowerConfig(model="vqclip-blocks", pretrained=save_open_clip(folder, "vqclip-blocks")[1])


def text(**changes):
    return TransformerTowerConfig(**{"context_length": 12, "width": 16, "heads": 2, "layers": 2} | changes)


def transformers_image(folder, name):
    make_image(folder, name)
    return TransformersImageTowerConfig(name=str(folder))


def transformers_text(folder, name):
    make_text(folder, name)
    return TransformersTextTowerConfig(name=str(folder), context_length=12, dropout=True)


TOWERS = {
    "vit": lambda folder: vit(),
    "vit, adapters": lambda folder: vit(train={"lora": {"rank": 2, "dropout": 0.5}}),
    "any shape, last two": lambda folder: NaFlexTowerConfig(
        max_tokens=12, args=NAFLEX | {"drop_path_rate": 0.4}, train={"last": 2}
    ),
    "convnext": lambda folder: TimmTowerConfig(name="convnext_atto", image_size=32, args=CNN),
    "convolutions": lambda folder: ConvolutionalTowerConfig(image_size=32, channels=[8, 16, 24]),
    "squeeze and excitation": lambda folder: TimmTowerConfig(name="seresnet18", image_size=32, args=SE, group_norm=4),
    "normalizer-free": lambda folder: TimmTowerConfig(name="test_nfnet", image_size=32),
    "open_clip": open_clip_vit,
    "open_clip's resnet": resnet,
    "text": lambda folder: text(layers=3),
    "text, not causal": lambda folder: text(causal=False),
    "text, options": lambda folder: text(pos_embed="rope", mlp_layer="swiglu", train={"lora": {"rank": 2}}),
    "swin": lambda folder: transformers_image(folder, "swin"),
    "bert": lambda folder: transformers_text(folder, "bert"),
    "t5": lambda folder: transformers_text(folder, "t5_encoder"),
}


def inputs(tower, samples=4):
    """Captions of several lengths, patches of images of several shapes, or squares of pixels."""
    if isinstance(tower, TextTower):
        return tower.vocabulary([f"caption {n} of {'many ' * (n % 3)}words" for n in range(samples)])
    if isinstance(tower.size, PatchBudget):
        images = torch.randint(0, 256, (samples, 3, 12, 16), dtype=torch.uint8)
        return torch.stack([tower.size.cut(image[:, :, : 4 + 4 * (n % 4)]) for n, image in enumerate(images)])
    return torch.rand(samples, 3, tower.image_size, tower.image_size)
