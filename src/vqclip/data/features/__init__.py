"""Features of frozen towers on disk: their format, their folder, and reading them in the loader.

After `vqclip.data.sources`; before the loader. `vqclip.train.feature_cache` computes them.

    settings  ->  folder  ->  shards (rows of features, found by sample and view or caption)  ->  reader  ->  Batch
"""

from vqclip.data.features.config import FeatureCacheConfig, Modality
from vqclip.data.features.folder import FeatureFolder
from vqclip.data.features.reader import FeatureReader
from vqclip.data.features.settings import FeatureDtype, FeatureSettings
from vqclip.data.features.shard import ShardContent

__all__ = [
    "FeatureCacheConfig",
    "FeatureDtype",
    "FeatureFolder",
    "FeatureReader",
    "FeatureSettings",
    "Modality",
    "ShardContent",
]
