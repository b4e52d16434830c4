"""The public names of `vqclip.data`, in a module of their own so that other modules can be imported without them."""

from vqclip.data.batch import BadSample, Batch, EvalBatch
from vqclip.data.batch_maker import LoaderOptions
from vqclip.data.config import DataConfig
from vqclip.data.decode import decode_image, pil_to_uint8
from vqclip.data.eval_set import EvalSet
from vqclip.data.loader import Coverage, TrainData
from vqclip.data.order import GlobalOrder
from vqclip.data.prepare import HasShards, open_source, prepare_sources
from vqclip.data.remote import mask_credentials
from vqclip.data.sources.base import FolderContent, RawSample, ShardedSource, Source, SourceConfigBase
from vqclip.data.sources.classes import ClassShards, ClassShardsConfig
from vqclip.data.sources.csv_table import CsvConfig
from vqclip.data.sources.files import FileSource, FileSourceConfig
from vqclip.data.sources.folder import FolderConfig
from vqclip.data.sources.hf import HfConfig
from vqclip.data.sources.json_table import JsonConfig
from vqclip.data.sources.kinds import SourceConfig, parse_source
from vqclip.data.sources.parquet import ParquetConfig
from vqclip.data.sources.scenes import ScenesSourceConfig
from vqclip.data.sources.shards import CaptionShards, CaptionShardsConfig
from vqclip.data.sources.torchvision import TorchvisionConfig
from vqclip.data.tokens import TokenBatch, TokenDataset, TokenItem, TokenSampler, collate_tokens
from vqclip.data.transforms import EvalTransform, EvalTransformConfig, TrainTransform, TrainTransformConfig
from vqclip.io.files import cache_folder

__all__ = [
    "BadSample",
    "Batch",
    "CaptionShards",
    "CaptionShardsConfig",
    "ClassShards",
    "ClassShardsConfig",
    "Coverage",
    "CsvConfig",
    "DataConfig",
    "EvalBatch",
    "EvalSet",
    "EvalTransform",
    "EvalTransformConfig",
    "FileSource",
    "FileSourceConfig",
    "FolderConfig",
    "FolderContent",
    "GlobalOrder",
    "HasShards",
    "HfConfig",
    "JsonConfig",
    "LoaderOptions",
    "ParquetConfig",
    "RawSample",
    "ScenesSourceConfig",
    "ShardedSource",
    "Source",
    "SourceConfig",
    "SourceConfigBase",
    "TokenBatch",
    "TokenDataset",
    "TokenItem",
    "TokenSampler",
    "TorchvisionConfig",
    "TrainData",
    "TrainTransform",
    "TrainTransformConfig",
    "cache_folder",
    "collate_tokens",
    "decode_image",
    "mask_credentials",
    "open_source",
    "parse_source",
    "pil_to_uint8",
    "prepare_sources",
]
