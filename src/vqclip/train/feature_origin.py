"""Settings of a run's stored features: fingerprints of everything that determines their values."""

from __future__ import annotations

import hashlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vqclip.data import TrainData
from vqclip.data.features import FeatureSettings
from vqclip.data.features.settings import TORCH_DTYPES, choose_shard_samples
from vqclip.seeds import derive_seed
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers.frozen import chunk_size

if TYPE_CHECKING:
    from vqclip.train.config import TrainConfig

_MADE_WITH = (
    *("vqclip", "torch", "torchvision", "pillow", "timm", "open_clip_torch", "transformers"),
    *("tokenizers", "ftfy", "regex"),  # they decide the token numbers of a caption
)


def feature_settings(config: TrainConfig, tokenizer: Tokenizer, data: TrainData) -> FeatureSettings:
    """Return the settings of the features of one modality.

    They are the same on any number of processes and of threads; the number of threads may change the last bits.
    """
    cache, tower, chunk = config.data.feature_cache, tokenizer.tower, chunk_size(tokenizer.device)
    assert cache is not None
    views = config.data.views or 1 if tokenizer.modality == "image" else 1
    sample_bytes = views * tower.num_tokens * tower.width * TORCH_DTYPES[cache.dtype].itemsize
    return FeatureSettings(
        modality="image" if tokenizer.modality == "image" else "text",
        samples=len(data),
        shard_samples=choose_shard_samples(len(data), sample_bytes, chunk),
        tokens=tower.num_tokens,
        width=tower.width,
        dtype=cache.dtype,
        origin={
            "tower": tower_digest(tokenizer),
            "data": [source.fingerprint for source in data.samples.sources],
            "precision": config.train.precision,
            "device": _device_name(tokenizer.device),
            "chunk": chunk,
            "made_with": _versions(),
            **(_text_origin(tokenizer) if isinstance(tokenizer, TextTokenizer) else _image_origin(config, tokenizer)),
        },
    )


def tower_digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the configuration of a tower and of all its parameters and buffers."""
    settings = tokenizer.config.tower.model_dump_json(exclude={"train"})
    digest = hashlib.sha256(f"{type(tokenizer.tower).__name__} {settings}".encode())
    tensors: dict[str, Tensor] = {**dict(tokenizer.tower.named_parameters()), **dict(tokenizer.tower.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"\n{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _image_origin(config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "transform": config.data.transform.model_dump(mode="json"),
        "views": config.data.views,
        "augmentation_seed": derive_seed(config.run.seed, "data", "augmentation"),
        "max_pixels": config.data.max_pixels,
    }


def _text_origin(tokenizer: TextTokenizer) -> dict[str, Any]:
    vocabulary = tokenizer.preprocess
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(vocabulary.files().items())}
    return {
        "vocabulary": vocabulary.describe(),
        "vocabulary_files": files,
        "context_length": vocabulary.context_length,
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
