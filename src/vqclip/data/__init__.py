"""Data: shards, their index, the order of samples, decoding, transforms, batches."""

from vqclip.data.batch import BadSample, Batch, EvalBatch
from vqclip.data.cache import cache_folder
from vqclip.data.config import DataConfig, prepare_sources
from vqclip.data.decode import decode_image, pil_to_uint8
from vqclip.data.eval_set import EvalSet
from vqclip.data.index import ShardIndex, index_shards, load_index
from vqclip.data.loader import Coverage, LoaderOptions, TrainData
from vqclip.data.order import GlobalOrder
from vqclip.data.sources import (
    CaptionShards,
    CaptionShardsConfig,
    ClassShards,
    ClassShardsConfig,
    RawSample,
    ScenesSourceConfig,
    Source,
    SourceConfig,
)
from vqclip.data.transforms import EvalTransform, EvalTransformConfig, TrainTransform, TrainTransformConfig

__all__ = [
    "BadSample",
    "Batch",
    "CaptionShards",
    "CaptionShardsConfig",
    "ClassShards",
    "ClassShardsConfig",
    "Coverage",
    "DataConfig",
    "EvalBatch",
    "EvalSet",
    "EvalTransform",
    "EvalTransformConfig",
    "GlobalOrder",
    "LoaderOptions",
    "RawSample",
    "ScenesSourceConfig",
    "ShardIndex",
    "Source",
    "SourceConfig",
    "TrainData",
    "TrainTransform",
    "TrainTransformConfig",
    "cache_folder",
    "decode_image",
    "index_shards",
    "load_index",
    "pil_to_uint8",
    "prepare_sources",
]
