"""The type of a shard, local or remote."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from vqclip.data.remote import RemoteShard

__all__ = ["Shard"]

Shard: TypeAlias = Path | RemoteShard
"""A tar on this machine or at a URL. `str` gives its name for messages, `.name` the file's name."""
