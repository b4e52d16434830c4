"""Sources of samples: one file for each kind, with its config class, and a line in `kinds`."""

from vqclip.data.sources.base import FolderContent, RawSample, ShardedSource, Source, SourceConfigBase
from vqclip.data.sources.classes import ClassShards, ClassShardsConfig
from vqclip.data.sources.coco import CocoConfig
from vqclip.data.sources.csv_table import CsvConfig
from vqclip.data.sources.files import FileSource, FileSourceConfig
from vqclip.data.sources.folder import FolderConfig
from vqclip.data.sources.hf import HfConfig
from vqclip.data.sources.kinds import KINDS, SourceConfig, parse_source
from vqclip.data.sources.parquet import ParquetConfig
from vqclip.data.sources.scenes import ScenesSourceConfig
from vqclip.data.sources.shards import CaptionShards, CaptionShardsConfig
from vqclip.data.sources.torchvision import TorchvisionConfig

__all__ = [
    "KINDS",
    "CaptionShards",
    "CaptionShardsConfig",
    "ClassShards",
    "ClassShardsConfig",
    "CocoConfig",
    "CsvConfig",
    "FileSource",
    "FileSourceConfig",
    "FolderConfig",
    "FolderContent",
    "HfConfig",
    "ParquetConfig",
    "RawSample",
    "ScenesSourceConfig",
    "ShardedSource",
    "Source",
    "SourceConfig",
    "SourceConfigBase",
    "TorchvisionConfig",
    "parse_source",
]
