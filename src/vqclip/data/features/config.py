"""The section `data.feature_cache` of a configuration, and the settings of stored features that follow from a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from vqclip.config import Config, Modality
from vqclip.io.files import cache_folder

FeatureDtype = Literal["fp32", "fp16", "bf16"]

TORCH_DTYPES: dict[FeatureDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
FORMAT = {"format": "vqclip features", "format_version": 3}
"""Format of the files; another one has other folders."""
_SHARD_BYTES = 16 << 20
_WANTED_SHARDS = 64
"""Smaller data sets are cut into about as many shards, so that several processes share the work evenly."""

_Count = Annotated[int, Field(ge=1, le=2**40)]


class FeatureCacheConfig(Config):
    """Features of frozen towers, computed once before the first step and read from the disk in every epoch."""

    folder: Path | None = None
    """Folder of the features, which every process must reach; null: `features` in the cache folder (VQCLIP_CACHE).
    Other weights, data or transforms get a subfolder of their own; delete those that are no longer needed."""
    dtype: FeatureDtype = "fp32"
    """Type of the stored numbers. fp32 trains the same bits as without the cache; fp16 and bf16 take half the space."""
    modalities: Annotated[tuple[Modality, ...], Field(min_length=1)] | None = None
    """Towers whose features are stored; null: each one with `train: none`."""

    teachers: bool = True
    """Also store what the teachers of `distillation` compute, of images only with `data.views`; false: they run in
    every step."""

    @property
    def path(self) -> Path:
        """Folder of the features."""
        return cache_folder() / "features" if self.folder is None else self.folder

    def choose(
        self, training: dict[Modality, object], views: int | None, *, alone: bool = True
    ) -> tuple[Modality, ...]:
        """Return the modalities whose features are stored.

        Args:
            training: the key `train` of each modality's tower.
            views: `data.views`.
            alone: whether no features of teachers are stored, so that there must be those of a tower.

        Raises:
            ValueError: a tower trains in this run, or images have no fixed number of views.
        """
        frozen = [name for name, train in training.items() if train == "none"]
        chosen = tuple(frozen) if self.modalities is None else self.modalities
        trained = [name for name in training if name in chosen and name not in frozen]
        if trained or (alone and not chosen):
            names: Sequence[Modality] = trained or list(training)
            raise ValueError(
                f"data.feature_cache: got a cache of {' and '.join(names)} features, but these towers train; expected "
                f"{' or '.join(f'model.{name}.tower.train: none' for name in names)}, or feature_cache: null"
            )
        if "image" in chosen and views is None:
            raise ValueError(
                "data.views: got null, a new view of each image in every epoch, with a data.feature_cache of image "
                "features; expected the number of views to store, such as 1"
            )
        return chosen


class FeatureSettings(Config):
    """Everything that determines the stored features of one modality."""

    modality: Modality
    """Modality of the tower."""
    samples: _Count
    """Samples of all sources, unusable ones included."""
    shard_samples: _Count
    """Samples in a shard."""
    tokens: _Count
    """N, tokens of a sample."""
    width: _Count
    """D, features of a token."""
    dtype: FeatureDtype
    """Type of the stored numbers."""
    origin: dict[str, Any]
    """Fingerprints of weights, data, transform, vocabulary and libraries."""

    @property
    def digest(self) -> str:
        """SHA-256 of the settings and of the format, in hexadecimal digits."""
        content = FORMAT | self.model_dump(mode="json")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the stored numbers."""
        return TORCH_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one image or caption."""
        return self.tokens * self.width * self.torch_dtype.itemsize

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.shard_samples)

    def shard_range(self, shard: int) -> range:
        """Return the ids of the samples in a shard."""
        return range(shard * self.shard_samples, min(self.samples, (shard + 1) * self.shard_samples))


def choose_shard_samples(samples: int, sample_bytes: int, multiple: int) -> int:
    """Return the number of samples in a shard: a multiple of `multiple`, and about 16 MiB at most.

    Args:
        samples: number of samples.
        sample_bytes: bytes of the features of one sample.
        multiple: number of samples that are computed at once.
    """
    fit = max(1, _SHARD_BYTES // (sample_bytes * multiple))
    return multiple * min(fit, -(-samples // (_WANTED_SHARDS * multiple)))
