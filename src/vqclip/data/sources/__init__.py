"""Sources of samples: one file for each kind, with its config class, and a line here."""

from typing import Annotated

from pydantic import Field

from vqclip.data.sources.base import RawSample, ShardedSource, Source
from vqclip.data.sources.classes import ClassShards, ClassShardsConfig, ClassShardsData
from vqclip.data.sources.scenes import ScenesData, ScenesSourceConfig
from vqclip.data.sources.shards import CaptionShards, CaptionShardsConfig, CaptionShardsData

SourceConfig = Annotated[
    CaptionShardsConfig | ClassShardsConfig | ScenesSourceConfig,
    Field(discriminator="kind"),
]
"""Configuration of any kind of source."""

__all__ = [
    "CaptionShards",
    "CaptionShardsConfig",
    "CaptionShardsData",
    "ClassShards",
    "ClassShardsConfig",
    "ClassShardsData",
    "RawSample",
    "ScenesData",
    "ScenesSourceConfig",
    "ShardedSource",
    "Source",
    "SourceConfig",
]
