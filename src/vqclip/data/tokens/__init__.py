"""Token shards: ids instead of pixels and text, as WebDataset tars or Parquet, and the data set that reads them.

`vqclip.tokenize_dataset` writes them. docs/adr/0019 describes the folder.
"""

from vqclip.data.tokens.dataset import TokenBatch, TokenDataset, TokenItem, TokenSampler, collate_tokens
from vqclip.data.tokens.layout import IdLayout, TokenRecord, id_type
from vqclip.data.tokens.manifest import Manifest, read_manifest
from vqclip.data.tokens.storage import SUFFIXES, open_shard, write_shard

__all__ = [
    "SUFFIXES",
    "IdLayout",
    "Manifest",
    "TokenBatch",
    "TokenDataset",
    "TokenItem",
    "TokenRecord",
    "TokenSampler",
    "collate_tokens",
    "id_type",
    "open_shard",
    "read_manifest",
    "write_shard",
]
