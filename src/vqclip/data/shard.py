"""The type of a shard: local or remote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from vqclip.data.remote import RemoteShard

__all__ = ["Part", "Shard"]

Shard: TypeAlias = Path | RemoteShard
"""A tar on this machine or at a URL. `str` gives its name for messages, `.name` the file's name."""


@runtime_checkable
class Part(Protocol):
    """Part of a source with another index than that of a tar."""

    def prepare(self, cache: Path | None = None) -> Any:
        """Index the part unless it is indexed; raises DataError if it cannot be read."""
        ...
