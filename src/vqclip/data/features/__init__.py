"""Features of frozen towers on disk: their settings, their folder, and reading them in the loader.

After `vqclip.data.sources`; before the loader. `vqclip.train.feature_cache` computes them.

    settings  ->  folder of shards (rows of features, found by sample and view or caption)  ->  reader  ->  Batch
"""

from vqclip.data.features.config import FeatureCacheConfig, FeatureDtype, FeatureSettings
from vqclip.data.features.folder import FeatureFolder, FeatureReader

__all__ = ["FeatureCacheConfig", "FeatureDtype", "FeatureFolder", "FeatureReader", "FeatureSettings"]
