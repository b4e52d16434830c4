"""Fill the feature cache of a run before it starts: in the processes of this job, or on Ray."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vqclip import dist
from vqclip.data.features import FeatureCacheConfig, FeatureFolder, FeatureSettings
from vqclip.data.on_ray import RayOptions, connect_to_ray
from vqclip.errors import ConfigError
from vqclip.runlog.bar import ProgressBar
from vqclip.train.config import TaskConfig
from vqclip.train.feature_cache import computing_alone, feature_jobs, store_features, wait_until_visible
from vqclip.train.main import build_data, build_task


def fill_features(config: TaskConfig) -> None:
    """Compute the features that a run of this configuration would compute before its first step. A collective.

    Raises:
        VqclipError: as `vqclip.train.feature_cache.store_features`, and for data and models that cannot be used.
    """
    _require_cache(config)
    device = dist.choose_device(config.run.device, "run.device")
    dist.init(device, config.run.timeout_s)
    try:
        config = config.fit()
        task = build_task(config, device)
        data = build_data(config, task)
        store_features(config.feature_makers(task), data, config.data, config.train.precision, config.run.seed)
    finally:
        dist.shutdown()


def fill_features_on_ray(config: TaskConfig, ray: RayOptions) -> str:
    """Compute the same features on Ray; return what was done in words.

    The folder of the cache, and data that are not at URLs, must have the same path on all machines.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    cache = _require_cache(config)
    parent = cache.path.expanduser().absolute()
    cache = cache.model_copy(update={"folder": parent})
    config = config.model_copy(update={"data": config.data.model_copy(update={"feature_cache": cache})})
    with connect_to_ray(ray, 1 + config.data.workers, config.run.device) as cluster, contextlib.ExitStack() as locks:
        job = _RayJob(config, cluster.on_gpu)
        # Only a worker knows the name of its device, which is one of the settings.
        [(_, described)] = cluster.map(job.open, [0], "model")
        job = replace(job, settings=tuple(described["settings"]))
        folders = [FeatureFolder(parent, FeatureSettings.model_validate_json(each)) for each in job.settings]
        for folder in folders:
            folder.make()
            locks.enter_context(computing_alone(folder))
            folder.work.remove_leftovers()
        sizes = [len(folder.settings.shard_range(n)) for folder in folders for n in range(folder.settings.shards)]
        start, made, seen = time.monotonic(), 0, 0
        with ProgressBar(sum(sizes), 0, True, "features", "sample") as bar:
            for item, done in cluster.map(job.open, range(len(sizes)), "shard of features"):
                made, seen = made + done["is_new"], seen + sizes[item] * done["is_new"]
                bar.advance(sizes[item])
                bar.show()
        for folder in folders:
            wait_until_visible(folder)
    rate = f"; {seen / (time.monotonic() - start):.0f} samples/s" if seen else ""
    text = f"shards: {made} written, {len(sizes) - made} already finished{rate}"
    return "\n".join([text, *(f"{folder.path}: {folder.settings.samples:,} samples" for folder in folders)])


def _require_cache(config: TaskConfig) -> FeatureCacheConfig:
    if config.data.feature_cache is None:
        raise ConfigError("data.feature_cache: got null; expected a cache to fill, such as data.feature_cache={}")
    return config.data.feature_cache


@dataclass
class _RayJob:
    """Work of a Ray worker: builds the networks, opens the data, and computes shards, counted over all folders."""

    config: TaskConfig
    on_gpu: bool
    settings: tuple[str, ...] = ()
    """Settings of the folders, as JSON; without them, the worker only returns its own."""

    def open(self) -> Callable[[int], dict[str, Any]]:
        """Return the function of an item; see `RayCluster.map`."""
        device = dist.choose_device("cuda" if self.on_gpu else "cpu", "run.device")
        config = self.config.fit()
        task = build_task(config, device)
        makers, data = config.feature_makers(task), build_data(config, task)
        every = feature_jobs(makers, data, config.data, config.train.precision, config.run.seed)
        jobs = list({job.folder.path: job for job in every.values()}.values())
        settings = tuple(job.folder.settings.model_dump_json() for job in jobs)
        if not self.settings:
            return lambda _: {"settings": settings}
        if settings != self.settings:
            raise ConfigError(
                f"data.feature_cache: machine {os.uname().nodename} has other settings of features than the first "
                "worker; expected the same weights, data, kind of device and versions of the libraries everywhere"
            )
        for job in jobs:
            job.folder.make()
        shards = [(job, shard) for job in jobs for shard in range(job.folder.settings.shards)]

        def compute(item: int) -> dict[str, Any]:
            job, shard = shards[item]
            if job.folder.work.record(shard) is not None:
                return {"is_new": False}
            for _ in job.run([shard]):
                pass
            return {"is_new": True}

        return compute
