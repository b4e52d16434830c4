"""Small open_clip models with random weights, saved as open_clip saves them."""

import json
from pathlib import Path
from typing import Any

import open_clip
import torch

VIT = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 16, "head_width": 16}
TEXT = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
TRUNK = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "avg", "timm_proj": "linear"}


def save_open_clip(folder: Path, name: str, log_scale: float = 3.0, seed: int = 0, **changes: Any) -> tuple[Any, str]:
    """Register a model configuration under ``name`` and save random weights of it.

    Returns:
        The model, as open_clip makes it by default, in evaluation mode; and the path of its weights.
    """
    config = {"embed_dim": 16, "vision_cfg": VIT, "text_cfg": TEXT} | changes
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    torch.manual_seed(seed)
    model = open_clip.create_model(name)
    with torch.no_grad():
        model.logit_scale.fill_(log_scale)
    path = folder / f"{name}-{seed}.pt"
    torch.save(model.state_dict(), path)
    return model.eval(), str(path)


def both_towers(name: str, weights: str | None, **changes: Any) -> dict[str, Any]:
    """The ``model`` section of a configuration with both towers from an open_clip model."""
    part = {"quantizer": {"kind": "fsq", "levels": [4, 4, 4]}, "width": 16, "heads": 2, "depth": 0}
    towers = {"kind": "open_clip", "model": name, "pretrained": weights}
    return {"towers": towers, "embed_dim": 16, "image": part, "text": part} | changes
