"""A shard, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from vqclip.data.remote import RemoteShard

__all__ = ["Shard"]

Shard: TypeAlias = Path | RemoteShard
"""A tar on this machine, or one at a URL. As text, both name it in messages; `.name` is the file's name."""
