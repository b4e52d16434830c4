"""The type of a shard: local, remote or compressed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from vqclip.data.remote import GzipShard, RemoteShard

__all__ = ["Shard"]

Shard: TypeAlias = Path | RemoteShard | GzipShard
"""A tar on this machine, at a URL, or compressed. `str` gives its name for messages, `.name` the file's name."""
