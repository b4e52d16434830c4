"""Tiny model configurations for tests."""

import copy
import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vqclip.io.atomic import digest_file
from vqclip.io.json_files import add_checksum
from vqclip.model import CLIP, ModelConfig
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

FSQ = {"kind": "fsq", "levels": [4, 4, 4]}
ONE_CHANNEL = {"kind": "fsq", "levels": [4]}
LFQ = {"kind": "lfq", "bits": 6}
WIDE_LFQ = {"kind": "lfq", "bits": 32, "loss_weights": {"codebook_entropy_gap": 0}}
IDENTITY = {"kind": "identity", "dim": 6}
PRODUCT = {"kind": "product", "layer": FSQ, "codebooks": 2}
VQ = {"kind": "vq", "dim": 6, "codebook_size": 16}
SIMVQ = {"kind": "simvq", "dim": 6, "codebook_size": 16}
BUSY_VQ = {"kind": "vq", "dim": 6, "codebook_size": 16, "decay": 0.8, "dead_below": 0.5}
"""Whose codes come and go all the time."""
BUSY_RESIDUAL = {"kind": "residual", "layer": BUSY_VQ, "depth": 3, "dropout": True}
RESIDUAL_FSQ = {"kind": "residual", "layer": FSQ | {"layout": "uniform"}, "depth": 3, "dropout": True}
RESIDUAL = {"kind": "residual", "layer": VQ, "depth": 3}
NESTED: dict[str, Any] = {
    "kind": "product",
    "codebooks": 2**16,
    "layer": {"kind": "residual", "depth": 1, "layer": {"kind": "product", "codebooks": 2**16, "layer": ONE_CHANNEL}},
}
"""More codebooks than memory has room for."""


def change(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with other values of some keys, which are written ``section__key``."""
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *parents, last = path.split("__")
        functools.reduce(operator.getitem, parents, tree)[last] = value
    return tree


def tiny_model(
    image_quantizer: dict[str, Any] = FSQ, text_quantizer: dict[str, Any] = FSQ, **changes: Any
) -> ModelConfig:
    """A ViT of two blocks at 16 px (4 patches) and a text transformer of one block and 12 positions; see `change`."""
    tree = {
        "embed_dim": 16,
        "image": {
            "tower": {
                "kind": "timm",
                "name": "vit_tiny_patch16_224",
                "image_size": 16,
                "args": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
            },
            "quantizer": image_quantizer,
            "width": 16,
            "heads": 2,
            "depth": 1,
        },
        "text": {
            "tower": {"kind": "transformer", "context_length": 12, "width": 16, "heads": 2, "layers": 1},
            "quantizer": text_quantizer,
            "width": 16,
            "heads": 2,
            "depth": 1,
        },
    }
    return ModelConfig.model_validate(change(tree, changes))


def built(image_quantizer: dict[str, Any] = FSQ, text_quantizer: dict[str, Any] | None = None, **changes: Any) -> CLIP:
    """A tiny model with the weights of seed 0, in training mode; the quantizer of images is also that of texts."""
    torch.manual_seed(0)
    return tiny_model(image_quantizer, text_quantizer or image_quantizer, **changes).build()


def on_the_border(tower: str) -> tuple[ImageTokenizer | TextTokenizer, Tensor]:
    """A tokenizer of 32 bits with the tower ``vit``, ``convolutional`` or ``text``, and a batch of 8 on its borders."""
    torch.manual_seed(0)
    config = tiny_model(WIDE_LFQ, WIDE_LFQ)
    if tower == "convolutional":
        layers = {"kind": tower, "image_size": 16, "channels": [8, 8, 16, 16], "channels_per_group": 4}
        config = tiny_model(WIDE_LFQ, WIDE_LFQ, image={**config.image.model_dump(), "tower": layers})
    model = config.build().eval()
    if tower == "text":
        words = ["a red star", "two small blue circles on a grey background", "x", "", "seven", "one of many", "7", "#"]
        batch = model.text.preprocess(words)
        put_on_the_border(model.text, batch)
        return model.text, batch
    batch = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    put_on_the_border(model.image, batch)
    return model.image, batch


@torch.no_grad()
def put_on_the_border(tokenizer: ImageTokenizer | TextTokenizer, batch: Tensor) -> None:
    """Move the bias so that each channel of a tokenizer with LFQ is 0 up to rounding in some token of the batch."""
    features, mask = copy.deepcopy(tokenizer).double().features(batch)
    real = features.flatten(0, 1) if mask is None else features[mask]
    channels = torch.arange(features.shape[-1])
    tokenizer.project_in[1].bias -= real[channels % len(real), channels].float()


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda config: None) -> None:
    """Change a tokenizer folder's configuration; give it the hashes that fit, as whoever changes weights can."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    config.pop("sha256", None)
    config["weights"] = digest_file(folder / "model.safetensors").model_dump()
    if (pixels := folder / "pixels.safetensors").exists() and "pixels" in config:
        config["pixels"]["weights"] = digest_file(pixels).model_dump()
    (folder / "config.json").write_bytes(add_checksum(config))
