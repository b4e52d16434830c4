"""Describe the shards of a data set on Ray. Imports no torch, so that workers which only index start soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vqclip.data.on_ray import RayCluster
from vqclip.data.shard import Shard
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.reader import join_checksums
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.errors import DataError
from vqclip.runlog.bar import ProgressBar

__all__ = ["ShardsConfig", "describe_on_ray"]

ShardsConfig: TypeAlias = CaptionShardsConfig | ClassShardsConfig
"""Configuration of a source whose shards can be opened one by one."""


@dataclass
class _DescribeJob:
    """Index the shards."""

    data: ShardsConfig
    shards: Sequence[Shard]

    def open(self) -> Callable[[int], dict[str, Any]]:
        """See `RayJob.open`."""
        return self._describe

    def _describe(self, shard: int) -> dict[str, Any]:
        source = self.data.build_part([self.shards[shard]])
        return {"shard": source.shards[0], "fingerprint": source.fingerprint}


def describe_on_ray(
    cluster: RayCluster, data: ShardsConfig, shards: Sequence[Shard]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Index the shards on Ray; return `ShardedSource.shards` and `Source.fingerprint` of the whole data set.

    Raises:
        DataError: a shard cannot be read, or all are empty.
    """
    found: dict[int, dict[str, Any]] = {}
    with ProgressBar(len(shards), 0, True, "index", "shard") as bar:
        for shard, description in cluster.map(_DescribeJob(data, shards), range(len(shards)), "shard", 1, 0):
            found[shard] = description
            bar.advance()
            bar.show()
    described = [found[shard]["shard"] for shard in range(len(shards))]
    samples = sum(shard["samples"] for shard in described)
    if not samples:
        raise DataError(f"{shards[0]} and {len(shards) - 1} more: every tar is empty; expected samples")
    checksum = join_checksums([shard["sha256"] for shard in described])
    return described, {**found[0]["fingerprint"], "samples": samples, "sha256": checksum}
