"""Shards at URLs, and compressed ones: whole in a bounded cache on this machine, then read like local shards."""

from vqclip.data.remote.retry import RemoteConfig, TransferConfig
from vqclip.data.remote.shard import TAR_ENDINGS, GzipShard, RemoteShard, fetch_text, is_gzip, is_tar, remote_shards
from vqclip.data.remote.urls import beneath, display_url, local_path, mask_credentials, protocol_of

__all__ = [
    "TAR_ENDINGS",
    "GzipShard",
    "RemoteConfig",
    "RemoteShard",
    "TransferConfig",
    "beneath",
    "display_url",
    "fetch_text",
    "is_gzip",
    "is_tar",
    "local_path",
    "mask_credentials",
    "protocol_of",
    "remote_shards",
]
