"""Tokenize a data set on Ray: one job describes the shards, the next one makes the token shards.

Each worker reads one shard at a time, so that no process needs the index of all samples. The bytes are those of
`vqclip.tokenize_dataset.job`, which has the shards' descriptions and the rest from the same functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vqclip import dist
from vqclip.data import RawSample, ShardedSource
from vqclip.data.in_order import require_few_bad
from vqclip.data.libraries import require_pyarrow
from vqclip.data.on_ray import RayCluster, RayOptions, ShareMark, connect_to_ray
from vqclip.data.shard import Shard
from vqclip.data.shard_folder import WorkResult
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.data.tokens import Manifest
from vqclip.data.tokens.manifest import SETTINGS_FILE, VERSIONS, Settings, SourceShard
from vqclip.errors import ConfigError, StorageError
from vqclip.io.json_files import read_checked
from vqclip.process.memory import keep_freed_memory
from vqclip.runlog.bar import ProgressBar
from vqclip.tokenize_dataset.describe import describe_on_ray
from vqclip.tokenize_dataset.folder import TokenFolder
from vqclip.tokenize_dataset.maker import ShardMaker, allowed_bad, describe_cuts, describe_shards
from vqclip.tokenize_dataset.options import Options
from vqclip.towers import CaptionLengths

__all__ = ["tokenize_on_ray"]


def tokenize_on_ray(options: Options, ray: RayOptions) -> WorkResult[Manifest]:
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
    mark = ShareMark(options.out, "--out")
    with connect_to_ray(ray) as cluster, mark.shown():
        cpus, gpus = cluster.cpus(options.threads + options.workers), cluster.gpus(options.device)
        cluster.require_room(cpus, gpus)  # now, not after the shards are indexed
        shards = data.shards()
        described, fingerprint = describe_on_ray(cluster, data, shards)
        job = _TokenizeJob(options, tuple(shards), describe_shards(described), fingerprint, mark, on_gpu=gpus > 0)
        return _tokenize(job, cluster, cpus, gpus)


@dataclass
class _TokenizeJob:
    """Make token shards."""

    options: Options
    shards: tuple[Shard, ...]
    described: tuple[SourceShard, ...]
    fingerprint: dict[str, Any]
    mark: ShareMark
    on_gpu: bool

    def open(self) -> Callable[[int], dict[str, Any]]:
        """Load the tokenizers; see `RayJob.open`."""
        self.mark.require()
        device = dist.choose_device("cuda" if self.on_gpu else "cpu", "--device")
        torch.set_num_threads(self.options.threads)
        if device.type == "cpu":
            keep_freed_memory()
        maker = ShardMaker(self.options, self.fingerprint, self.described, device)
        firsts = np.cumsum([0, *(each.samples for each in self.described)])
        return lambda shard: self._make(maker, shard, int(firsts[shard]))

    def _make(self, maker: ShardMaker, shard: int, first: int) -> dict[str, Any]:
        finished, samples, is_new = maker.folder.find_finished(shard), 0, False
        maker.lengths.clear()
        if finished is None:
            source = _ShardSource(self.options.data, self.shards[shard], self.described[shard], first)
            for progress in maker.make(source, [shard]):
                samples, finished = samples + progress.samples, progress.finished or finished
            is_new = True
        assert finished is not None
        return {
            "is_new": is_new,
            "samples": samples,
            "bad": sum(finished.bad.values()),
            "lengths": list(maker.lengths.items()),
            "context_length": maker.context_length,
        }


class _ShardSource:
    """One shard, whose samples have their numbers in the whole data set."""

    def __init__(self, data: Any, shard: Shard, described: SourceShard, first: int):
        self._first = first
        self._source: ShardedSource = data.build_part([shard])
        if self._source.shards[0]["sha256"] != described.sha256:
            raise StorageError(
                f"{shard}: the shard has changed since it was indexed, or is another one on machine "
                f"{os.uname().nodename}; run the command again when it is complete",
                "changed shard",
            )

    def key(self, index: int) -> str:
        return self._source.key(index - self._first)

    def name(self, index: int) -> str:
        return self._source.name(index - self._first)

    def read(self, index: int) -> RawSample:
        return self._source.read(index - self._first)


def _tokenize(job: _TokenizeJob, cluster: RayCluster, cpus: float, gpus: float) -> WorkResult[Manifest]:
    sizes = [shard.samples for shard in job.described]
    allowed, lengths, context_length = allowed_bad(job.options, job.described), CaptionLengths(), None
    made = found = seen = bad = 0
    start = time.monotonic()
    with ProgressBar(sum(sizes), 0, True, "tokenize", "sample") as bar:
        for shard, done in cluster.map(job, range(len(sizes)), "shard", cpus, gpus):
            made, found = made + done["is_new"], found + (not done["is_new"])
            seen, bad = seen + done["samples"], bad + done["bad"]
            lengths.update(dict(done["lengths"]))
            context_length = done["context_length"]
            bar.advance(sizes[shard])
            bar.show()
            if bad > allowed:
                break
    folder = TokenFolder(job.options.out, _read_settings(job.options.out))
    require_few_bad(folder.bad_reasons(), bad, allowed, folder.bad_option)
    manifest = folder.finish(allowed)
    cut = describe_cuts(lengths, context_length)
    return WorkResult(made, found, seen, time.monotonic() - start, folder.missing(), manifest, cut)


def _read_settings(out: Path) -> Settings:
    """Return the settings that the workers wrote: they know the names of their devices."""
    return read_checked(out / SETTINGS_FILE, Settings, VERSIONS, "run the command again")
