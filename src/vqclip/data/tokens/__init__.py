"""Token shards: Parquet files of ids instead of pixels and text, and the data set that reads them.

`vqclip.tokenize_dataset` writes them. docs/adr/0019 and 0047 describe the folder.
"""

from vqclip.data.tokens.dataset import TokenBatch, TokenDataset, TokenItem, TokenSampler, collate_tokens
from vqclip.data.tokens.manifest import SUFFIX, IdLayout, Manifest, id_type, read_manifest
from vqclip.data.tokens.parquet import TokenRecord, TokenShard, write_shard

__all__ = [
    "SUFFIX",
    "IdLayout",
    "Manifest",
    "TokenBatch",
    "TokenDataset",
    "TokenItem",
    "TokenRecord",
    "TokenSampler",
    "TokenShard",
    "collate_tokens",
    "id_type",
    "read_manifest",
    "write_shard",
]
