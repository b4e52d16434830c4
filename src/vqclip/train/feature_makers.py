"""Networks whose features are stored, and fingerprints of everything that determines the values."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vqclip.data import TrainData
from vqclip.data.features import FeatureSettings, Modality
from vqclip.data.features.settings import TORCH_DTYPES, choose_shard_samples
from vqclip.io.tensors import add_tensors
from vqclip.seeds import derive_seed
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers.frozen import chunk_size
from vqclip.towers.training import TowerConfig

if TYPE_CHECKING:
    from vqclip.train.config import TrainConfig

_MADE_WITH = (
    *("vqclip", "torch", "torchvision", "pillow", "timm", "open_clip_torch", "transformers"),
    *("tokenizers", "ftfy", "regex"),  # they decide the token numbers of a caption
)


@dataclass(frozen=True)
class FeatureMaker:
    """A frozen network whose features are stored."""

    modality: Modality
    network: str
    """Name of the network, for messages, such as "image tower"."""
    compute: Callable[[Tensor], Tensor]
    """Images ``(R, 3, S, S)`` or token numbers ``(R, T)`` → features ``(R, N, D)``, the same bits in every batch."""
    tokens: int
    """N, tokens of a sample."""
    width: int
    """D, features of a token."""
    device: torch.device
    origin: dict[str, Any]
    """Everything about the network and its input that determines the features."""
    tokenize: Callable[[list[str]], Tensor] | None = None
    """Captions → token numbers; None for images."""


def tower_maker(tokenizer: Tokenizer) -> FeatureMaker:
    """Return the maker of a frozen tower's features, reduced if `Tokenizer.reduces_early`."""
    tower, reduction = tokenizer.tower, tokenizer.reduce if tokenizer.reduces_early else None
    reduced = {} if reduction is None else {"reduce": tokenizer.config.reduce.model_dump(mode="json")}
    return FeatureMaker(
        modality="image" if tokenizer.modality == "image" else "text",
        network=f"{tokenizer.modality} tower",
        compute=tokenizer.tower_features,
        tokens=tower.num_tokens if reduction is None else reduction.num_tokens,
        width=tower.width,
        device=tokenizer.device,
        origin=tower_origin(tower, tokenizer.config.tower) | reduced | vocabulary_origin(tokenizer),
        tokenize=tokenizer.preprocess if isinstance(tokenizer, TextTokenizer) else None,
    )


def feature_settings(config: TrainConfig, maker: FeatureMaker, data: TrainData) -> FeatureSettings:
    """Return the settings of stored features.

    They are the same on any number of processes and of threads; the number of threads may change the last bits.
    """
    cache, chunk, is_image = config.data.feature_cache, chunk_size(maker.device), maker.modality == "image"
    assert cache is not None
    views = config.data.views or 1 if is_image else 1
    sample_bytes = views * maker.tokens * maker.width * TORCH_DTYPES[cache.dtype].itemsize
    return FeatureSettings(
        modality=maker.modality,
        samples=len(data),
        shard_samples=choose_shard_samples(len(data), sample_bytes, chunk),
        tokens=maker.tokens,
        width=maker.width,
        dtype=cache.dtype,
        origin={
            "data": [source.fingerprint for source in data.samples.sources],
            "precision": config.train.precision,
            "device": _device_name(maker.device),
            "chunk": chunk,
            "made_with": _versions(),
            **(_image_origin(config) if is_image else {}),
            **maker.origin,
        },
    )


def tower_origin(tower: nn.Module, config: TowerConfig) -> dict[str, Any]:
    """Return the SHA-256 of the configuration of a tower, but for what trains, and of all its tensors."""
    digest = hashlib.sha256(f"{type(tower).__name__} {config.model_dump_json(exclude={'train'})}".encode())
    add_tensors(digest, {**dict(tower.named_parameters()), **dict(tower.named_buffers())})
    return {"tower": digest.hexdigest()}


def vocabulary_origin(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what determines the token numbers of a caption; nothing for images."""
    if not isinstance(tokenizer, TextTokenizer):
        return {}
    vocabulary = tokenizer.preprocess
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(vocabulary.files().items())}
    return {
        "vocabulary": vocabulary.describe(),
        "vocabulary_files": files,
        "context_length": vocabulary.context_length,
    }


def _image_origin(config: TrainConfig) -> dict[str, Any]:
    return {
        "transform": config.data.transform.model_dump(mode="json"),
        "views": config.data.views,
        "augmentation_seed": derive_seed(config.run.seed, "data", "augmentation"),
        "max_pixels": config.data.max_pixels,
    }


def _device_name(device: torch.device) -> str:
    return device.type if device.type == "cpu" else torch.cuda.get_device_name(device)


def _versions() -> dict[str, str]:
    found = {}
    for name in _MADE_WITH:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an extra
            continue
    return found
