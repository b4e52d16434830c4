"""The `remote` section of a source."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vqclip.config import Config

__all__ = ["RemoteConfig"]


class RemoteConfig(Config):
    """How shards at URLs are fetched and kept. None of these changes what is read."""

    cache_gib: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    """Fetched shards of all runs on this machine take at most so many GiB, in `shards` of the cache folder; the least
    recently used go first. Samples come in random order, so data that do not fit are fetched over and over."""
    tries: Annotated[int, Field(ge=1, le=100)] = 8
    """How often a shard is asked for when the connection breaks, stalls or ends early, or the server says 408, 425, 429
    or 5xx; the pauses double, from half a second to half a minute."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait for a connection and for the next bytes, in seconds; a transfer with less than 16 KiB a second over
    that time counts as stalled."""
    total_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Longest time for one shard, in seconds: for another process that fetches it, for room, and for all tries and
    pauses, together. Keep it well below `data.timeout_s` and `run.step_timeout_s`, which would otherwise end
    the run before the failure is told; for shards that take longer raise all three."""

    @property
    def cache_bytes(self) -> int:
        """`cache_gib` in bytes."""
        return int(self.cache_gib * 2**30)
