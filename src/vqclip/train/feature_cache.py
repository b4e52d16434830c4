"""Store the features of frozen towers and teachers before the first step, and let the loader read them.

    one job computes at a time (lock)  ->  every rank verifies a part of the shards  ->  what is missing is divided
    compute for some seconds; meet, so that an error or a request to stop on one rank ends all; repeat
    every rank checks that it sees all shards  ->  TrainData.use_features

Nothing here changes what a step computes: in fp32 a step gets the bits that the tower would give it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vqclip import dist
from vqclip.data import TrainData
from vqclip.data.features import TORCH_DTYPES, FeatureFolder, FeatureReader, FeatureSettings, choose_shard_samples
from vqclip.data.samples import SampleMaker
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import ConfigError, DataError
from vqclip.io.file_locks import ProcessLock
from vqclip.io.files import format_bytes
from vqclip.process import progress
from vqclip.runlog.bar import ProgressBar
from vqclip.seeds import derive_seed
from vqclip.towers.frozen import chunk_size
from vqclip.train.feature_jobs import FeatureJob, FeatureMaker
from vqclip.train.tasks.base import Task

if TYPE_CHECKING:
    from vqclip.train.config import TaskConfig

logger = logging.getLogger(__name__)

_MADE_WITH = (
    *("vqclip", "torch", "torchvision", "pillow", "timm", "open_clip_torch", "transformers"),
    *("tokenizers", "ftfy", "regex"),  # they decide the token numbers of a caption
)

_ROUND_S = 2.0
"""Seconds of work after which the ranks meet."""
_POLL_S = 1.0
_VISIBLE_S = 90.0
"""Longest wait for files that another rank has written."""
_SHOWN = 5
"""Settings that are listed where features of other settings cannot be used."""
_PROBED = 32
"""Samples whose captions are counted to estimate the size."""


def store_features(config: TaskConfig, task: Task[Any], data: TrainData) -> None:
    """Compute the features that `data.feature_cache` asks for and that are not there yet. A collective.

    Args:
        config: of the run.
        task: with the weights of the run's first step; it drops the teachers whose outputs are stored.
        data: reads the features from now on.

    Raises:
        ConfigError: not enough space, a folder that cannot be used, or features too large for the dtype.
        DataError: a rank does not see the files of the others, or the samples cannot be read.
        NonFiniteError: the features of a sample contain NaN or infinity.
        StopRequested: a signal asked for a stop; finished shards stay.
    """
    if config.data.feature_cache is None:
        return
    jobs = feature_jobs(config, task, data)
    folders: dict[Path, FeatureFolder] = {}
    for job in jobs.values():
        if others := dist.differing_ranks(job.folder.settings.digest):
            raise ConfigError(
                f"data.feature_cache: rank {', '.join(others)} has other settings of {job.maker.modality} features "
                "than rank 0; expected the same weights, kind of device and versions of the libraries on every machine"
            )
        if job.folder.path not in folders:  # two terms may have one teacher
            _complete(job.folder, job)
            folders[job.folder.path] = job.folder
    data.use_features({name: FeatureReader(folders[job.folder.path]) for name, job in jobs.items()})
    config.release_stored(task)


def feature_jobs(config: TaskConfig, task: Task[Any], data: TrainData) -> dict[str, FeatureJob]:
    """Return a job for each network whose features are stored, by name; two of them may have one folder."""
    cache, jobs = config.data.feature_cache, {}
    assert cache is not None
    for name, maker in config.feature_makers(task).items():
        folder = FeatureFolder(cache.path, feature_settings(config, maker, data))
        jobs[name] = FeatureJob(maker, config.train.precision, data, folder)
    return jobs


def feature_settings(config: TaskConfig, maker: FeatureMaker, data: TrainData) -> FeatureSettings:
    """Return the settings of stored features: fingerprints of everything that determines their values.

    They are the same on any number of processes and of threads; the number of threads may change the last bits.
    """
    cache, chunk, is_image = config.data.feature_cache, chunk_size(maker.device), maker.modality == "image"
    assert cache is not None
    origin: dict[str, Any] = {
        "data": [source.fingerprint for source in data.samples.sources],
        "precision": config.train.precision,
        "device": device_name(maker.device),
        "chunk": chunk,
        "made_with": library_versions(),
    }
    if is_image:
        origin["transform"] = config.data.transform.model_dump(mode="json")
        origin["views"] = config.data.views
        origin["augmentation_seed"] = derive_seed(config.run.seed, "data", "augmentation")
        origin["max_pixels"] = config.data.max_pixels
    views = config.data.views or 1 if is_image else 1
    sample_bytes = views * maker.tokens * maker.width * TORCH_DTYPES[cache.dtype].itemsize
    return FeatureSettings(
        modality=maker.modality,
        samples=len(data),
        shard_samples=choose_shard_samples(len(data), sample_bytes, chunk),
        tokens=maker.tokens,
        width=maker.width,
        dtype=cache.dtype,
        origin=origin | maker.origin,
    )


def device_name(device: torch.device) -> str:
    """Return the kind of device, with the instructions that its kernels use, such as AVX512."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute features, as far as they are installed."""
    found = {}
    for name in _MADE_WITH:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an extra
            found[name] = importlib.metadata.version(name)
    return found


def _complete(folder: FeatureFolder, job: FeatureJob) -> None:
    """Verify the shards and compute those that are missing or damaged; nothing is written where all are there."""
    with dist.raise_on_all_ranks():
        folder.make()
    missing = _find_missing(folder, range(folder.settings.shards))
    with computing_alone(folder) if missing else contextlib.nullcontext():
        missing = _find_missing(folder, missing)  # another job may have computed them by now
        dist.run_on_main(lambda: _announce(folder, job, missing))
        if missing:
            dist.run_on_main(folder.work.remove_leftovers)
            settings = folder.settings
            done = settings.samples - sum(len(settings.shard_range(shard)) for shard in missing)
            with ProgressBar(settings.samples, done, dist.is_main(), job.maker.network, "sample") as bar:
                for count in _in_rounds(job.run(missing[dist.rank() :: dist.world_size()])):
                    bar.advance(count)
                    bar.show()
    with dist.raise_on_all_ranks():
        wait_until_visible(folder)


def wait_until_visible(folder: FeatureFolder) -> None:
    """Wait until this rank sees all shards: a network file system may hide new files of other machines for a minute."""
    end = time.monotonic() + _VISIBLE_S
    while (unseen := folder.first_unseen()) is not None:
        if time.monotonic() >= end:
            raise DataError(
                f"data.feature_cache.folder: rank {dist.rank()} does not see {unseen}, which another rank wrote; "
                "expected a folder on a file system that all machines share"
            )
        progress.heartbeat()
        time.sleep(_POLL_S)


@contextlib.contextmanager
def computing_alone(folder: FeatureFolder) -> Iterator[None]:
    """Wait until no other job computes in the folder, and keep others from it within the block. A collective."""
    lock = ProcessLock(folder.lock_path)
    try:
        told = False
        while (holder := dist.run_on_main(lambda: _try_acquire(lock, folder))) is not None:
            if dist.is_main() and not told:
                logger.info("feature cache: waiting for another job (%s), which computes in %s", holder, folder.path)
            told = True
            with dist.raise_on_all_ranks():
                progress.heartbeat()
            time.sleep(_POLL_S)
        yield
    finally:
        lock.release()


def _try_acquire(lock: ProcessLock, folder: FeatureFolder) -> str | None:
    try:
        return lock.try_acquire()
    except OSError as error:
        raise ConfigError(
            f"data.feature_cache.folder: {folder.lock_path} cannot be opened ({error.strerror}), and features are "
            "missing or damaged; expected a folder that can be written to, or one in which all features are there"
        ) from error


def _find_missing(folder: FeatureFolder, shards: Sequence[int]) -> list[int]:
    """Return those among ``shards`` that have to be computed, on every rank; each rank verifies a part of them."""
    missing: list[int] = []

    def verify() -> Iterator[int]:
        for shard in shards[dist.rank() :: dist.world_size()]:
            if folder.work.record(shard) is None:
                missing.append(shard)
            yield len(folder.settings.shard_range(shard))

    for _ in _in_rounds(verify()):
        pass
    return sorted(shard for each in dist.gather_json(missing) for shard in each)


def _in_rounds(work: Iterator[int]) -> Iterator[int]:
    """Run the work of all ranks, which meet every few seconds; yield the sum of what it yields. A collective.

    An error of one rank, or its request to stop, is raised on all ranks.
    """
    finished = False
    try:
        while not finished:
            end, done, is_last = time.monotonic() + _ROUND_S, 0, True
            with dist.raise_on_all_ranks(), explain_worker_deaths():
                for count in work:
                    progress.heartbeat()
                    done += count
                    if time.monotonic() >= end:
                        is_last = False
                        break
            rounds = dist.gather_json([done, is_last])
            yield sum(count for count, _ in rounds)
            finished = all(each for _, each in rounds)
    finally:
        getattr(work, "close", lambda: None)()


def _announce(folder: FeatureFolder, job: FeatureJob, missing: list[int]) -> None:
    """Log the size of the features, and require enough space for those that are missing."""
    settings, samples = folder.settings, job.samples
    rows = float(samples.views or 1) if settings.modality == "image" else _captions_per_sample(samples)
    unit = "views" if settings.modality == "image" else "captions"
    what = (
        f"feature cache ({job.maker.network}): {settings.samples:,} samples x {rows:.3g} {unit} x {settings.tokens:,} "
        f"{'token' if settings.tokens == 1 else 'tokens'} x {settings.width:,} features, {settings.dtype}: "
        f"{format_bytes(settings.samples * rows * settings.row_bytes)} in {folder.path}"
    )
    needed = sum(len(settings.shard_range(shard)) for shard in missing) * rows * settings.row_bytes
    free = shutil.disk_usage(folder.path).free
    if needed > free:
        raise ConfigError(
            f"data.feature_cache: {what}; {format_bytes(needed)} are missing, and {format_bytes(free)} are free; "
            "expected another folder, dtype fp16 or bf16, fewer data.views, reduce: {kind: mean}, or a smaller tower"
        )
    there = settings.shards - len(missing)
    logger.info("%s; %s", what, f"{there:,} of {settings.shards:,} shards are there" if missing else "complete")
    if not there and (nearest := folder.describe_nearest()):
        name, *differing = nearest
        shown = differing[:_SHOWN] + [f"  ... and {len(differing) - _SHOWN} more"] * (len(differing) > _SHOWN)
        logger.info(
            "feature cache (%s): %s cannot be used, as it has other settings; delete it if no other run needs it:\n%s",
            job.maker.network,
            folder.path.with_name(name),
            "\n".join(shown),
        )


def _captions_per_sample(samples: SampleMaker) -> float:
    """Return the mean number of captions of some samples, spread over the data; 1 if none of them is readable."""
    total, counts = int(samples.first_ids[-1]), []
    for sample_id in range(0, total, max(1, total // _PROBED)):
        with contextlib.suppress(DataError):
            counts.append(len(samples.read_captions(sample_id)))
    return sum(counts) / len(counts) if counts else 1.0
