"""The `remote` section of a source, and that of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vqclip.config import Config

__all__ = ["RemoteConfig", "TransferConfig"]


class TransferConfig(Config):
    """Retries and time limits of transfers."""

    tries: Annotated[int, Field(ge=1, le=100)] = 8
    """Number of tries for a file when the connection breaks, stalls or ends early, or the server answers 408, 425, 429
    or 5xx; the pauses double, from half a second to half a minute."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait for a connection and for the next bytes, in seconds. A download of less than 16 KiB a second over
    that time counts as stalled."""
    total_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Longest time for one file, or a part of a shard, in seconds: all tries and pauses, and waiting for space and for
    another process that downloads it. For shards, keep it well below `data.timeout_s` and `run.step_timeout_s`, which
    would otherwise end the run before the failure is reported; raise all three for shards that take longer."""


class RemoteConfig(TransferConfig):
    """Download and caching of shards at URLs. No option changes which samples are read."""

    cache_gib: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    """Largest size in GiB of the downloaded shards of all runs on this machine, in `shards` of the cache folder, and
    likewise of the parts of shards that the windowed order reads, in `chunks`. The least recently used are removed
    first. In the order `full`, shards that do not fit are downloaded again and again."""

    @property
    def cache_bytes(self) -> int:
        """`cache_gib` in bytes."""
        return int(self.cache_gib * 2**30)
