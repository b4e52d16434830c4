"""The public names of `vqclip.data`, in a module of their own so that other modules can be imported without them."""

from vqclip.data.batch import BadSample, Batch, EvalBatch
from vqclip.data.config import DataConfig
from vqclip.data.decode import decode_image, pil_to_uint8
from vqclip.data.eval_set import EvalSet
from vqclip.data.index import ShardIndex, load_index
from vqclip.data.loader import Coverage, LoaderOptions, TrainData
from vqclip.data.order import GlobalOrder
from vqclip.data.prepare import HasShards, prepare_sources
from vqclip.data.remote import mask_credentials
from vqclip.data.sources import (
    CaptionShards,
    CaptionShardsConfig,
    CaptionShardsData,
    ClassShards,
    ClassShardsConfig,
    ClassShardsData,
    RawSample,
    ScenesData,
    ScenesSourceConfig,
    ShardedSource,
    Source,
    SourceConfig,
)
from vqclip.data.tokens import TokenBatch, TokenDataset, TokenItem, TokenSampler, collate_tokens
from vqclip.data.transforms import EvalTransform, EvalTransformConfig, TrainTransform, TrainTransformConfig
from vqclip.io.cache import cache_folder

__all__ = [
    "BadSample",
    "Batch",
    "CaptionShards",
    "CaptionShardsConfig",
    "CaptionShardsData",
    "ClassShards",
    "ClassShardsConfig",
    "ClassShardsData",
    "Coverage",
    "DataConfig",
    "EvalBatch",
    "EvalSet",
    "EvalTransform",
    "EvalTransformConfig",
    "GlobalOrder",
    "HasShards",
    "LoaderOptions",
    "RawSample",
    "ScenesData",
    "ScenesSourceConfig",
    "ShardIndex",
    "ShardedSource",
    "Source",
    "SourceConfig",
    "TokenBatch",
    "TokenDataset",
    "TokenItem",
    "TokenSampler",
    "TrainData",
    "TrainTransform",
    "TrainTransformConfig",
    "cache_folder",
    "collate_tokens",
    "decode_image",
    "load_index",
    "mask_credentials",
    "pil_to_uint8",
    "prepare_sources",
]
