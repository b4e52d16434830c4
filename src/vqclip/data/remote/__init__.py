"""Shards at URLs: fetched whole into a bounded cache on this machine, then read like local ones."""

from vqclip.data.remote.config import RemoteConfig
from vqclip.data.remote.listing import remote_shards
from vqclip.data.remote.shard import RemoteShard, fetch_text
from vqclip.data.remote.urls import beneath, local_path, masked, protocol_of, shown

__all__ = [
    "RemoteConfig",
    "RemoteShard",
    "beneath",
    "fetch_text",
    "local_path",
    "masked",
    "protocol_of",
    "remote_shards",
    "shown",
]
