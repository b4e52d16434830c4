"""Tokenize a data set on Ray: one job describes the shards, the next one makes the token shards.

Each worker reads one shard at a time, so that no process needs the index of all samples. The shards are made, recorded
and finished by the functions of `vqclip.tokenize_dataset.job`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from vqclip import dist
from vqclip.data.in_order import require_few_bad
from vqclip.data.libraries import require_pyarrow
from vqclip.data.on_ray import RayCluster, RayOptions, connect_to_ray
from vqclip.data.shard import Shard
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.data.tars.index import content_digest
from vqclip.data.work_folder import ItemRecord, WorkFolder, WorkResult
from vqclip.errors import ConfigError, DataError, StorageError
from vqclip.process.memory import keep_freed_memory
from vqclip.runlog.bar import ProgressBar
from vqclip.tokenize_dataset.job import LAYOUT, Options, ShardMaker, finish_folder

__all__ = ["tokenize_on_ray"]

_VISIBLE_S = 90.0
"""Longest wait for a file of another machine: a network file system may hide new files for a minute."""
_Config: TypeAlias = CaptionShardsConfig | ClassShardsConfig
_Facts: TypeAlias = list[dict[str, Any]]
"""`ShardedSource.shards` of the whole data set."""


def tokenize_on_ray(options: Options, ray: RayOptions) -> WorkResult:
    """Tokenize a data set of tars on Ray, and write the manifest.

    The output folder, and data that are not at URLs, must have the same path on all machines.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    data = options.data
    if not isinstance(data, CaptionShardsConfig | ClassShardsConfig):
        raise ConfigError(
            f"--engine ray: got data of kind {data.kind}; expected tars (kind shards or classes): pack them first "
            "(vqclip data pack), or use --engine local"
        )
    require_pyarrow()
    with connect_to_ray(ray) as cluster:
        cpus, gpus = cluster.worker_size(options.threads + options.workers, options.device)
        shards = tuple(data.tars())
        facts, fingerprint = _describe_shards(cluster, data, shards)
        open_job = partial(_open_maker, options, shards, facts, fingerprint, "cuda" if gpus > 0 else "cpu")
        sizes, start, made, seen, bad = [each["samples"] for each in facts], time.monotonic(), 0, 0, list[str]()
        with ProgressBar(sum(sizes), 0, True, "tokenize", "sample") as bar:
            for shard, is_new in cluster.map(open_job, range(len(shards)), "shard", cpus, gpus):
                made, seen = made + is_new, seen + is_new * sizes[shard]
                folder, record = _wait_for(options.out, shard)
                bad += [each.reason for each in record.bad]
                require_few_bad(bad, len(bad), int(options.tolerance * sum(sizes)), "--tolerance")
                bar.advance(sizes[shard])
                bar.show()
    return finish_folder(options, folder, made, len(shards) - made, seen, start)


def _wait_for(out: Path, shard: int) -> tuple[WorkFolder, ItemRecord]:
    """Return the folder and the record of a shard when this machine sees what a worker wrote, or raise ConfigError.

    Its settings are those that the workers wrote: they know the names of their devices.
    """
    end = time.monotonic() + _VISIBLE_S
    while (folder := WorkFolder.existing(out, LAYOUT)) is None or (record := folder.record(shard)) is None:
        if time.monotonic() > end:
            raise ConfigError(
                f"--out: this machine does not see what a worker of Ray wrote to {out}; expected a folder that all "
                "machines share, under the same path"
            )
        time.sleep(1)
    return folder, record


def _describe_shards(cluster: RayCluster, data: _Config, shards: Sequence[Shard]) -> tuple[_Facts, dict[str, Any]]:
    """Index the shards; return `ShardedSource.shards` and `Source.fingerprint` of the whole data set.

    Raises:
        DataError: a shard cannot be read, or all are empty.
    """
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    with ProgressBar(len(shards), 0, True, "index", "shard") as bar:
        for shard, facts in cluster.map(partial(_open_indexer, data, shards), range(len(shards)), "shard", 1, 0):
            found[shard] = facts
            bar.advance()
            bar.show()
    described = [found[shard][0] for shard in range(len(shards))]
    samples = sum(shard["samples"] for shard in described)
    if not samples:
        raise DataError(f"{shards[0]} and {len(shards) - 1} more: every tar is empty; expected samples")
    checksum = content_digest([shard["sha256"] for shard in described])
    return described, {**found[0][1], "samples": samples, "sha256": checksum}


def _open_indexer(data: _Config, shards: Sequence[Shard]) -> Callable[[int], tuple[dict[str, Any], dict[str, Any]]]:
    def describe(shard: int) -> tuple[dict[str, Any], dict[str, Any]]:
        source = data.build_part([shards[shard]])
        return source.shards[0], source.fingerprint

    return describe


def _open_maker(
    options: Options, shards: Sequence[Shard], facts: _Facts, fingerprint: dict[str, Any], kind: str
) -> Callable[[int], bool]:
    """Load the tokenizers; return the function that makes a shard, and returns whether it was not finished before."""
    device = dist.choose_device(kind, "--device")
    torch.set_num_threads(options.threads)
    if device.type == "cpu":
        keep_freed_memory()
    maker = ShardMaker(options, fingerprint, facts, device)

    def make(shard: int) -> bool:
        if maker.folder.record(shard, verify=True) is not None:
            return False
        for _ in maker.folder.claim([shard], wait=True):
            source = options.data.build_part([shards[shard]])  # type: ignore[attr-defined]
            if source.shards[0]["sha256"] != facts[shard]["sha256"]:
                raise StorageError(
                    f"{shards[shard]}: the shard has changed since it was indexed, or is another one on machine "
                    f"{os.uname().nodename}; run the command again when it is complete",
                    "changed shard",
                )
            for _ in maker.make(source, shard, maker.ids[shard].start):
                pass
        return True

    return make
