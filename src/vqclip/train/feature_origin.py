"""Settings of a run's stored features: fingerprints of everything that determines their values."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

import torch

from vqclip.data import TrainData
from vqclip.data.features import TORCH_DTYPES, FeatureSettings, choose_shard_samples
from vqclip.seeds import derive_seed
from vqclip.towers.frozen import chunk_size
from vqclip.train.feature_makers import FeatureMaker

if TYPE_CHECKING:
    from vqclip.train.config import TaskConfig

_MADE_WITH = (
    *("vqclip", "torch", "torchvision", "pillow", "timm", "open_clip_torch", "transformers"),
    *("tokenizers", "ftfy", "regex"),  # they decide the token numbers of a caption
)


def feature_settings(config: TaskConfig, maker: FeatureMaker, data: TrainData) -> FeatureSettings:
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


def _image_origin(config: TaskConfig) -> dict[str, Any]:
    return {
        "transform": config.data.transform.model_dump(mode="json"),
        "views": config.data.views,
        "augmentation_seed": derive_seed(config.run.seed, "data", "augmentation"),
        "max_pixels": config.data.max_pixels,
    }


def _device_name(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"  # of the kernels, such as AVX512


def _versions() -> dict[str, str]:
    found = {}
    for name in _MADE_WITH:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an extra
            continue
    return found
