"""Store the features of frozen towers and teachers before the first step, and let the loader read them.

    FeatureMaker     a frozen tower or teacher, and everything about it that determines its features
    FeatureJob.run   blocks of samples, read in the data workers -> network -> stored dtype -> shard
    store_features   one job computes at a time (lock)  ->  rank 0 looks for missing shards
                     ->  what is missing is divided; compute for some seconds; meet, so that an error or a request to
                     stop on one rank ends all; repeat  ->  every rank checks that it sees all shards
                     ->  TrainData.use_features

Nothing here changes what a step computes: in fp32 a step gets the bits that the tower would give it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vqclip import dist
from vqclip.config import Modality
from vqclip.data import DataConfig, TrainData
from vqclip.data.batch import BadSample
from vqclip.data.features import TORCH_DTYPES, FeatureFolder, FeatureSettings, choose_shard_samples
from vqclip.data.in_order import SamplesRead, read_in_order, slices_of
from vqclip.data.samples import SampleMaker
from vqclip.data.work_folder import VISIBLE_S, require_room
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import ConfigError, DataError, NonFiniteError
from vqclip.io.atomic import ProcessLock
from vqclip.io.files import format_bytes
from vqclip.io.tensors import module_digest
from vqclip.nn.precision import Precision, autocast
from vqclip.process import progress
from vqclip.runlog.bar import ProgressBar
from vqclip.seeds import derive_seed
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers import ImageTower, TextTower
from vqclip.towers.base import TowerConfig, chunk_size

logger = logging.getLogger(__name__)

_MADE_WITH = (
    *("vqclip", "torch", "torchvision", "pillow", "timm", "open_clip_torch", "transformers"),
    *("tokenizers", "ftfy", "regex"),  # they decide the token numbers of a caption
)

_ROUND_S = 2.0
"""Seconds of work after which the ranks meet."""
_POLL_S = 1.0
_SHOWN = 5
"""Settings that are listed where features of other settings cannot be used."""
_PROBED = 32
"""Samples whose captions are counted to estimate the size."""


@dataclass(frozen=True)
class FeatureMaker:
    """A frozen network whose features are stored."""

    modality: Modality
    network: str
    """Name of the network, for messages, such as "image tower"."""
    compute: Callable[[Tensor], Tensor]
    """Images ``(R, 3, S, S)`` or token numbers ``(R, T)`` → features ``(R, N, D)``, the same bits in every batch."""
    tokens: int
    """N, tokens of a sample."""
    width: int
    """D, features of a token."""
    device: torch.device
    origin: dict[str, Any]
    """Everything about the network and its input that determines the features."""
    tokenize: Callable[[list[str]], Tensor] | None = None
    """Captions → token numbers; None for images."""


def tower_maker(tokenizer: Tokenizer) -> FeatureMaker:
    """Return the maker of a frozen tower's features, reduced if `Tokenizer.reduces_early`."""
    tower, config, network = tokenizer.tower, tokenizer.config, f"{tokenizer.modality} tower"
    if not tokenizer.reduces_early:
        return maker_for(tokenizer, tower, config.tower, network, tokenizer.tower_features, tower.num_tokens)
    assert tokenizer.reduce is not None
    assert config.reduce is not None
    tokens, reduce = tokenizer.reduce.num_tokens, config.reduce.model_dump(mode="json")
    return maker_for(tokenizer, tower, config.tower, network, tokenizer.tower_features, tokens, reduce=reduce)


def maker_for(
    tokenizer: Tokenizer,
    tower: ImageTower | TextTower,
    config: TowerConfig,
    network: str,
    compute: Callable[[Tensor], Tensor],
    tokens: int,
    **origin: Any,
) -> FeatureMaker:
    """Return the maker of what a tower computes of a tokenizer's images or captions; see `FeatureMaker`."""
    settings = f"{type(tower).__name__} {config.model_dump_json(exclude={'train'})}"
    origin["tower"] = module_digest(tower, settings)
    tokenize = None
    if isinstance(tokenizer, TextTokenizer):
        tokenize = vocabulary = tokenizer.preprocess
        files = sorted(vocabulary.files().items())
        origin["vocabulary"] = vocabulary.description
        origin["vocabulary_files"] = {name: hashlib.sha256(content).hexdigest() for name, content in files}
        origin["context_length"] = vocabulary.context_length
    modality: Modality = "image" if tokenize is None else "text"
    return FeatureMaker(modality, network, compute, tokens, tower.width, tokenizer.device, origin, tokenize)


def store_features(
    makers: Mapping[str, FeatureMaker], data: TrainData, config: DataConfig, precision: Precision, seed: int
) -> None:
    """Compute the features that are not stored yet. A collective.

    Args:
        makers: name → network whose features are stored, with the weights of the run's first step.
        data: reads the features from now on.
        config: of the data, with a feature cache if there are makers.
        precision: of the run's steps.
        seed: of the run.

    Raises:
        ConfigError: a folder that cannot be used, or features too large for the dtype.
        DataError: not enough space; a rank does not see the files of the others, or the samples cannot be read.
        NonFiniteError: the features of a sample contain NaN or infinity.
        StopRequested: a signal asked for a stop; finished shards stay.
    """
    jobs = feature_jobs(makers, data, config, precision, seed)
    stored: dict[Path, FeatureFolder] = {}
    for job in jobs.values():
        if others := dist.differing_ranks(job.folder.settings.digest):
            raise ConfigError(
                f"data.feature_cache: rank {', '.join(others)} has other settings of {job.maker.modality} features "
                "than rank 0; expected the same weights, kind of device and versions of the libraries on every machine"
            )
        if job.folder.path not in stored:  # two terms may have one teacher
            _complete(job)
            stored[job.folder.path] = job.folder
    data.use_features({name: stored[job.folder.path] for name, job in jobs.items()})


def feature_jobs(
    makers: Mapping[str, FeatureMaker], data: TrainData, config: DataConfig, precision: Precision, seed: int
) -> dict[str, FeatureJob]:
    """Return a job for each maker, by name; two of them may have one folder. See `store_features`.

    The settings of a folder are fingerprints of everything that determines the features. They are the same on any
    number of processes and of threads; the number of threads may change the last bits.
    """
    jobs = {}
    for name, maker in makers.items():
        cache, chunk, is_image = config.feature_cache, chunk_size(maker.device), maker.modality == "image"
        assert cache is not None
        # The kind of device, with the instructions that its kernels use, such as AVX512.
        device = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        if maker.device.type != "cpu":
            device = torch.cuda.get_device_name(maker.device)
        origin: dict[str, Any] = {
            "data": [source.fingerprint for source in data.samples.sources],
            "precision": precision,
            "device": device,
            "chunk": chunk,
            "made_with": library_versions(),
        }
        if is_image:
            origin["transform"] = config.transform.model_dump(mode="json")
            origin["views"] = config.views
            origin["augmentation_seed"] = derive_seed(seed, "data", "augmentation")
            origin["max_pixels"] = config.max_pixels
        views = config.views or 1 if is_image else 1
        sample_bytes = views * maker.tokens * maker.width * TORCH_DTYPES[cache.dtype].itemsize
        settings = FeatureSettings(
            modality=maker.modality,
            samples=len(data),
            shard_samples=choose_shard_samples(len(data), sample_bytes, chunk),
            tokens=maker.tokens,
            width=maker.width,
            dtype=cache.dtype,
            origin=origin | maker.origin,
        )
        jobs[name] = FeatureJob(maker, precision, data, FeatureFolder(cache.path, settings))
    return jobs


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute features, as far as they are installed."""
    found = {}
    for name in _MADE_WITH:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an extra
            found[name] = importlib.metadata.version(name)
    return found


def _complete(job: FeatureJob) -> None:
    """Verify the shards and compute those that are missing or damaged; nothing is written where all are there."""
    folder = job.folder
    with dist.raise_on_all_ranks():
        folder.make()
    missing = _find_missing(folder, range(folder.settings.shards))
    with computing_alone(folder) if missing else contextlib.nullcontext():
        missing = _find_missing(folder, missing)  # another job may have computed them by now
        dist.run_on_main(lambda: _announce(job, missing))
        if missing:
            dist.run_on_main(folder.work.remove_leftovers)
            settings = folder.settings
            done = settings.samples - sum(len(settings.shard_range(shard)) for shard in missing)
            with ProgressBar(settings.samples, done, dist.is_main(), job.maker.network, "sample") as bar:
                for count in progress.in_rounds(job.run(missing[dist.rank() :: dist.world_size()]), _ROUND_S):
                    bar.advance(count)
                    bar.show()
    with dist.raise_on_all_ranks():
        wait_until_visible(folder)


def wait_until_visible(folder: FeatureFolder) -> None:
    """Wait until this rank sees all shards: a network file system may hide new files of other machines for a minute."""
    end = time.monotonic() + VISIBLE_S
    for shard in range(folder.settings.shards):
        while folder.work.record(shard) is None:
            if time.monotonic() >= end:
                raise DataError(
                    f"data.feature_cache.folder: rank {dist.rank()} does not see {folder.work.file(shard)}, which "
                    "another rank wrote; expected a folder on a file system that all machines share"
                )
            progress.heartbeat()
            time.sleep(_POLL_S)


@contextlib.contextmanager
def computing_alone(folder: FeatureFolder) -> Iterator[None]:
    """Wait until no other job computes in the folder, and keep others from it within the block. A collective."""
    lock = ProcessLock(folder.lock_path)

    def try_acquire() -> str | None:
        try:
            return lock.try_acquire()
        except OSError as error:
            raise ConfigError(
                f"data.feature_cache.folder: {folder.lock_path} cannot be opened ({error.strerror}), and features are "
                "missing or damaged; expected a folder that can be written to, or one in which all features are there"
            ) from error

    try:
        told = False
        while (holder := dist.run_on_main(try_acquire)) is not None:
            if dist.is_main() and not told:
                logger.info("feature cache: waiting for another job (%s), which computes in %s", holder, folder.path)
            told = True
            with dist.raise_on_all_ranks():
                progress.heartbeat()
            time.sleep(_POLL_S)
        yield
    finally:
        lock.release()


def _find_missing(folder: FeatureFolder, shards: Sequence[int]) -> list[int]:
    """Return those among ``shards`` that have to be computed, on every rank; each rank verifies a part of them."""
    missing: list[int] = []

    def verify() -> Iterator[int]:
        for shard in shards[dist.rank() :: dist.world_size()]:
            missing.extend([] if folder.work.record(shard) else [shard])
            yield 1

    for _ in progress.in_rounds(verify(), _ROUND_S):
        pass
    return sorted(shard for each in dist.gather_json(missing) for shard in each)


def _announce(job: FeatureJob, missing: list[int]) -> None:
    """Log the size of the features, and require enough space for those that are missing."""
    folder, settings, samples = job.folder, job.folder.settings, job.samples
    rows = float(samples.views or 1) if settings.modality == "image" else _captions_per_sample(samples)
    unit = ("view" if settings.modality == "image" else "caption") + "s" * (rows != 1)
    there = settings.shards - len(missing)
    logger.info(
        f"feature cache ({job.maker.network}): {settings.samples:,} samples x {rows:.3g} {unit} x {settings.tokens:,} "
        f"{'token' if settings.tokens == 1 else 'tokens'} x {settings.width:,} features, {settings.dtype}: "
        f"{format_bytes(settings.samples * rows * settings.row_bytes)} in {folder.path}; "
        + (f"{there:,} of {settings.shards:,} shards are there" if missing else "complete")
    )
    needed = sum(len(settings.shard_range(shard)) for shard in missing) * rows * settings.row_bytes
    remedy = "set another data.feature_cache.folder, dtype: fp16 or bf16, fewer data.views, reduce: {kind: mean}"
    require_room(folder.path, round(needed), f"{remedy}, or a smaller tower")
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


class FeatureJob:
    """Computes shards of features; the networks see chunks of one shape, so the bits depend on no other sample.

    Args:
        maker: computes the features.
        precision: of the run's steps.
        data: reads the samples.
        folder: where the shards are written.
    """

    def __init__(self, maker: FeatureMaker, precision: Precision, data: TrainData, folder: FeatureFolder):
        self.maker, self._precision, self.folder = maker, precision, folder
        self.samples, self._options = data.samples, data.options

    def run(self, shards: Sequence[int]) -> Iterator[int]:
        """Compute and write shards; yield the number of samples done since the last time.

        Raises:
            NonFiniteError: features of a sample contain NaN or infinity.
            ConfigError: features are too large for the stored dtype.
            DataError: the samples cannot be read.
        """
        size, options = chunk_size(self.maker.device), self._options
        settings = self.folder.settings
        read: Callable[[int], Tensor | tuple[str, ...]] = self.samples.make_views
        read = read if settings.modality == "image" else self.samples.read_captions
        blocks = ordered_map(
            partial(read_in_order, read),
            (ids for number in shards for ids in slices_of(settings.shard_range(number), size)),
            options.workers,
            prefetch=options.prefetch,
            timeout_s=options.timeout_s,
            start_method=options.start_method,
        )
        tokenize = self.maker.tokenize
        prepare: Callable[[list[Tensor | str]], Tensor] = torch.stack if tokenize is None else tokenize  # type: ignore[assignment]
        shard = _ShardInWork()
        with contextlib.closing(blocks), explain_worker_deaths():
            for block in blocks:
                new = shard.add(block)
                for first in range(0, len(new), size):
                    shard.rows.append(self._compute(prepare(new[first : first + size])))
                    yield 0
                number = block.ids[0] // settings.shard_samples
                if block.ids[-1] + 1 == settings.shard_range(number).stop:
                    self._write(number, shard)
                    shard = _ShardInWork()
                yield len(block.ids)

    @torch.no_grad()
    def _compute(self, inputs: Tensor) -> Tensor:
        """Return the features ``(R, N, D)`` of some rows in the stored dtype; those that are not finite stay so."""
        with autocast(self.maker.device, self._precision):
            features = self.maker.compute(inputs.to(self.maker.device))
        stored = features.to(self.folder.settings.torch_dtype)
        return torch.where(features.isfinite(), stored, torch.nan).cpu()  # infinity is then too large a number

    def _write(self, number: int, shard: _ShardInWork) -> None:
        settings, network = self.folder.settings, self.maker.network
        rows = torch.cat([torch.empty(0, settings.tokens, settings.width, dtype=settings.torch_dtype), *shard.rows])
        for row in (~rows.isfinite()).flatten(1).any(1).nonzero().flatten().tolist():
            place = next(place for place, entries in enumerate(shard.entries) if row in entries)
            source, index = self.samples.locate(settings.shard_range(number)[place])
            name = source.name(index)
            if rows[row].isnan().any():
                raise NonFiniteError(
                    f"{name}: the {network}'s features contain NaN or infinity; are its weights those that "
                    "were meant, and does it need train.precision: fp32?"
                )
            raise ConfigError(
                f"data.feature_cache.dtype: got {settings.dtype}, but the {network}'s features of {name} exceed its "
                "range; expected bf16 or fp32"
            )
        self.folder.write(number, shard.entries, rows, shard.bad)


@dataclass
class _ShardInWork:
    """Rows and entries of a shard that is being computed; equal captions are computed once."""

    entries: list[list[int]] = field(default_factory=list)
    """Numbers of the rows of the views or captions, for each sample."""
    rows: list[Tensor] = field(default_factory=list)
    """``(R, N, D)`` each, computed."""
    bad: list[BadSample] = field(default_factory=list)
    row_of: dict[str | tuple[int, int], int] = field(default_factory=dict)
    """Row of each caption, or of each view by sample and number."""

    def add(self, block: SamplesRead[Tensor | tuple[str, ...]]) -> list[Tensor | str]:
        """Add a block of samples; return the images or captions of its new rows."""
        new: list[Tensor | str] = []
        self.bad += block.bad
        for sample_id in block.ids:
            values = block.found.get(sample_id, ())
            keys = [each if isinstance(each, str) else (sample_id, view) for view, each in enumerate(values)]
            for key, value in zip(keys, values, strict=True):
                if key not in self.row_of:
                    self.row_of[key] = len(self.row_of)
                    new.append(value)
            self.entries.append([self.row_of[key] for key in keys])
        return new
