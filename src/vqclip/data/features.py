"""Features of frozen towers on disk: their settings, their folder, and reading them in the loader.

    settings  ->  folder of shards (rows of features, found by sample and view or caption)  ->  reader  ->  Batch

The processes of a job, and later jobs, fill the folder of a modality together: it is a
`vqclip.data.work_folder.WorkFolder` with the name ``image-<digest of the settings>``, whose items are shards.
`vqclip.train.feature_cache` computes them. A shard is a table (`vqclip.data.table_file`):

    entries  int32 (E,)     row of each entry: of each view of an image, of each caption of a text
    first    int64 (S + 1,) entries of sample i of the shard: first[i] to first[i + 1]; none for a bad sample
    rows     uint8 (R, ..)  bytes of the features (N, D) of each row; equal captions share one
    sums     int64 (R,)     CRC-32 of each row

A row is verified whenever it is read, so that no start has to read whole shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vqclip.config import Config, Modality
from vqclip.data.batch import BadSample
from vqclip.data.lookup import Recent
from vqclip.data.table_file import open_table, table_bytes
from vqclip.data.work_folder import FolderLayout, WorkFolder
from vqclip.errors import CheckpointError, DataError, StorageError
from vqclip.io.atomic import write_file
from vqclip.io.files import cache_folder
from vqclip.io.json_files import describe_differences, read_json

FeatureDtype = Literal["fp32", "fp16", "bf16"]

TORCH_DTYPES: dict[FeatureDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMAT = {"format": "vqclip features", "format_version": 4}
"""Format of the files; another one has other folders."""
_LAYOUT = FolderLayout(FORMAT, ".safetensors", "data.feature_cache", "data.feature_cache.folder")
_OPEN_SHARDS = 256
_SHARD_BYTES = 16 << 20
_WANTED_SHARDS = 64
"""Smaller data sets are cut into about as many shards, so that several processes share the work evenly."""

_Count = Annotated[int, Field(ge=1, le=2**40)]


class FeatureCacheConfig(Config):
    """Features of frozen towers, computed once before the first step and read from the disk in every epoch."""

    folder: Path | None = None
    """Folder of the features, which every process must reach; null: `features` in the cache folder (VQCLIP_CACHE).
    Other weights, data or transforms get a subfolder of their own; delete those that are no longer needed."""
    dtype: FeatureDtype = "fp32"
    """Type of the stored numbers. fp32 trains the same bits as without the cache; fp16 and bf16 take half the space."""
    modalities: Annotated[tuple[Modality, ...], Field(min_length=1)] | None = None
    """Towers whose features are stored; null: each one with `train: none`."""

    teachers: bool = True
    """Also store what the teachers of `distillation` compute, of images only with `data.views`; false: they run in
    every step."""

    @property
    def path(self) -> Path:
        """Folder of the features."""
        return cache_folder() / "features" if self.folder is None else self.folder

    def choose(
        self, training: dict[Modality, object], views: int | None, *, alone: bool = True
    ) -> tuple[Modality, ...]:
        """Return the modalities whose features are stored.

        Args:
            training: the key `train` of each modality's tower.
            views: `data.views`.
            alone: whether no features of teachers are stored, so that there must be those of a tower.

        Raises:
            ValueError: a tower trains in this run, or images have no fixed number of views.
        """
        frozen = [name for name, train in training.items() if train == "none"]
        chosen = tuple(frozen) if self.modalities is None else self.modalities
        trained = [name for name in training if name in chosen and name not in frozen]
        if trained or (alone and not chosen):
            names: Sequence[Modality] = trained or list(training)
            raise ValueError(
                f"data.feature_cache: got a cache of {' and '.join(names)} features, but these towers train; expected "
                f"{' or '.join(f'model.{name}.tower.train: none' for name in names)}, or feature_cache: null"
            )
        if "image" in chosen and views is None:
            raise ValueError(
                "data.views: got null, a new view of each image in every epoch, with a data.feature_cache of image "
                "features; expected the number of views to store, such as 1"
            )
        return chosen


class FeatureSettings(Config):
    """Everything that determines the stored features of one modality."""

    modality: Modality
    """Modality of the tower."""
    samples: _Count
    """Samples of all sources, unusable ones included."""
    shard_samples: _Count
    """Samples in a shard."""
    tokens: _Count
    """N, tokens of a sample."""
    width: _Count
    """D, features of a token."""
    dtype: FeatureDtype
    """Type of the stored numbers."""
    origin: dict[str, Any]
    """Fingerprints of weights, data, transform, vocabulary and libraries."""

    @property
    def digest(self) -> str:
        """SHA-256 of the settings and of the format, in hexadecimal digits."""
        content = FORMAT | self.model_dump(mode="json")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the stored numbers."""
        return TORCH_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one image or caption."""
        return self.tokens * self.width * self.torch_dtype.itemsize

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.shard_samples)

    def shard_range(self, shard: int) -> range:
        """Return the ids of the samples in a shard."""
        return range(shard * self.shard_samples, min(self.samples, (shard + 1) * self.shard_samples))


def choose_shard_samples(samples: int, sample_bytes: int, multiple: int) -> int:
    """Return the number of samples in a shard: a multiple of `multiple`, and about 16 MiB at most.

    Args:
        samples: number of samples.
        sample_bytes: bytes of the features of one sample.
        multiple: number of samples that are computed at once.
    """
    fit = max(1, _SHARD_BYTES // (sample_bytes * multiple))
    return multiple * min(fit, -(-samples // (_WANTED_SHARDS * multiple)))


class FeatureFolder:
    """Features of one modality, with random access to those of finished shards, in any process and after a fork.

    At most 256 shards are mapped, so memory does not grow with the data. Each byte is verified when it is read.

    Args:
        parent: folder of all features.
        settings: everything that determines the bytes; other settings have another folder.

    Attributes:
        path: the folder.
        lock_path: file that the computing job locks.
        work: the `WorkFolder`, after `make`.
    """

    def __init__(self, parent: Path, settings: FeatureSettings):
        self.settings = settings
        self.path = parent / f"{settings.modality}-{settings.digest[:24]}"
        self.lock_path = self.path / "lock"
        self._shards = Recent[int, dict[str, np.ndarray]](_OPEN_SHARDS)

    def make(self) -> None:
        """Make the folder if it is missing, and compare its settings; before anything else is asked of it.

        Raises:
            ConfigError: it cannot be made, or has other settings.
        """
        self.work = WorkFolder(self.path, self.settings.model_dump(mode="json"), self.settings.shards, _LAYOUT)

    def write(self, shard: int, entries: Sequence[Sequence[int]], rows: Tensor, bad: Iterable[BadSample] = ()) -> None:
        """Write a shard, and then its record.

        Args:
            shard: its number.
            entries: rows of each sample; none for a bad one.
            rows: ``(R, N, D)`` in the stored dtype, on the CPU.
            bad: the bad samples.
        """
        content = rows.contiguous().flatten(1).view(torch.uint8).numpy()
        arrays: dict[str, np.ndarray] = {
            "entries": np.array([row for each in entries for row in each], np.int32),
            "first": np.cumsum([0, *map(len, entries)]).astype(np.int64),
            "rows": content,
            "sums": np.array([zlib.crc32(row) for row in content], np.int64),
        }
        file = write_file(self.work.file(shard), table_bytes(self._facts(shard), arrays))
        records = [{"sample_id": each.sample_id, "kind": each.kind, "reason": each.reason} for each in bad]
        self.work.add_record(shard, file, len(entries) - len(records), records)

    def open(self, shard: int) -> dict[str, np.ndarray]:
        """Open a shard; return its arrays, mapped from the file.

        Raises:
            DataError: it is missing or damaged, or belongs to another place.
        """
        return open_table(self.work.file(shard), self._facts(shard), ("entries", "first", "sums")).arrays

    def describe_nearest(self) -> list[str]:
        """Return the most similar other folder of the same data, and a line for each difference; [] for none."""
        mine = json.loads(json.dumps(self.settings.model_dump(mode="json")))
        found: list[list[str]] = []
        for path in sorted(self.path.parent.glob(f"{self.settings.modality}-*/settings.json")):
            with contextlib.suppress(CheckpointError, OSError, KeyError):
                other = read_json(path)[0]["settings"]
                if other["origin"]["data"] == mine["origin"]["data"]:
                    found.append([path.parent.name, *describe_differences(other, mine, "there").values()])
        return min((each for each in found if each[0] != self.path.name), key=len, default=[])

    def read(self, sample_id: int, entry: int) -> Tensor:
        """Return the features ``(N, D)`` of one view or caption of a sample.

        Args:
            sample_id: number of the sample over all sources.
            entry: number of the view or caption.

        Raises:
            DataError: the sample is bad, with the reason and kind that its decoding had.
            StorageError: the shard is missing or damaged.
        """
        number, place = divmod(sample_id, self.settings.shard_samples)
        path = self.work.file(number)
        try:
            shard = self._shards.get(number, self.open)
        except DataError as error:
            raise self._damage(number, str(error).removeprefix(f"{path}: ")) from None
        rows = shard["entries"][shard["first"][place] : shard["first"][place + 1]]
        if not len(rows):
            record = self.work.record(number)
            for bad in record.bad if record else ():
                if bad.sample_id == sample_id:
                    raise DataError(bad.reason, bad.kind)
            raise self._damage(number, f"sample {sample_id} has no features")
        data = bytearray(shard["rows"][rows[entry]].data)
        if zlib.crc32(data) != shard["sums"][rows[entry]]:
            raise self._damage(number, f"the features of sample {sample_id} have changed")
        return torch.frombuffer(data, dtype=self.settings.torch_dtype).view(self.settings.tokens, self.settings.width)

    def _damage(self, number: int, problem: str) -> StorageError:
        path = self.work.file(number)
        is_forgotten = self.work.forget(number)
        remedy = "start the run again, which computes this shard again" if is_forgotten else f"delete {path}"
        return StorageError(
            f"{path}: {problem}: the feature cache was changed or deleted; {remedy}", "damaged features"
        )

    def _facts(self, shard: int) -> dict[str, object]:
        return {**FORMAT, "settings": self.work.digest, "shard": shard}
