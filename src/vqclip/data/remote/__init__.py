"""Files at URLs: which URLs are allowed, reading and listing with retries, the cache of chunks, folders to write to."""

from vqclip.data.remote.files import TAR_ENDINGS, RemoteShard, fetch_text, is_gzip, is_tar, remote_shards
from vqclip.data.remote.retry import RemoteConfig, TransferConfig
from vqclip.data.remote.urls import beneath, display_url, local_path, mask_credentials, protocol_of

__all__ = [
    "TAR_ENDINGS",
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
