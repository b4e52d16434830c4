"""Settings of stored features: everything that determines their bytes, and the layout of the shards."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from vqclip.config import Config

FeatureDtype = Literal["fp32", "fp16", "bf16"]

TORCH_DTYPES: dict[FeatureDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
FORMAT = {"format": "vqclip features", "format_version": 2}
"""Format of the files; another one has other folders."""
_SHARD_BYTES = 16 << 20
_WANTED_SHARDS = 64
"""Smaller data sets are cut into about as many shards, so that several processes share the work evenly."""

_Count = Annotated[int, Field(ge=1, le=2**40)]


class FeatureSettings(Config):
    """Everything that determines the stored features of one modality."""

    modality: Literal["image", "text"]
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
