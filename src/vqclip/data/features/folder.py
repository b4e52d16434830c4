"""The folder of stored features of one modality, which the processes of a job, and later jobs, fill together.

It is a `vqclip.data.work_folder.WorkFolder` with the name ``image-<digest of the settings>``, whose items are shards. A
shard is a table (`vqclip.data.table_file`):

    entries  int32 (E,)     row of each entry: of each view of an image, of each caption of a text
    first    int64 (S + 1,) entries of sample i of the shard: first[i] to first[i + 1]; none for a bad sample
    rows     uint8 (R, ..)  bytes of the features (N, D) of each row; equal captions share one
    sums     int64 (R,)     checksum of each row

A row is verified whenever it is read, so that no start has to read whole shards.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vqclip.data.batch import BadSample
from vqclip.data.features.config import FORMAT, FeatureSettings
from vqclip.data.table_file import open_table, table_bytes
from vqclip.data.work_folder import FolderLayout, ItemRecord, WorkFolder
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import describe_differences, read_json

__all__ = ["FeatureFolder", "StoredShard"]

_LAYOUT = FolderLayout(FORMAT, ".safetensors", "data.feature_cache", "data.feature_cache.folder")


class StoredShard(NamedTuple):
    """Open shard of features; its arrays are mapped from the file."""

    entries: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    sums: np.ndarray

    def entries_of(self, place: int) -> np.ndarray:
        """Return the rows of a sample of the shard; empty for a bad one."""
        return self.entries[self.first[place] : self.first[place + 1]]

    def read(self, row: int) -> bytearray | None:
        """Return the bytes of a row; None if one of them has changed."""
        data = bytearray(self.rows[row].data)
        return data if _row_checksums(np.frombuffer(data, np.uint8)[None])[0] == self.sums[row] else None


class FeatureFolder:
    """Features of one modality.

    Args:
        parent: folder of all features.
        settings: everything that determines the bytes; other settings have another folder.
    """

    def __init__(self, parent: Path, settings: FeatureSettings):
        self.settings = settings
        self.path = parent / f"{settings.modality}-{settings.digest[:24]}"
        self.lock_path = self.path / "lock"
        """File that the computing job locks."""

    def make(self) -> None:
        """Make the folder if it is missing, and compare its settings; before anything else is asked of it.

        Raises:
            ConfigError: it cannot be made, has other settings, or contains something that is not a file.
        """
        self._work = WorkFolder(self.path, self.settings.model_dump(mode="json"), self.settings.shards, _LAYOUT)
        _require_file_or_nothing(self.lock_path)

    def remove_leftovers(self) -> None:
        """Remove unfinished files of killed processes."""
        self._work.remove_leftovers()

    def shard_path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self._work.file(shard)

    def record(self, shard: int) -> ItemRecord | None:
        """Return the record of a shard, whose file is there with its size; None if it has to be computed."""
        return self._work.record(shard)

    def forget(self, shard: int) -> bool:
        """Remove the record of a damaged shard, so that the next run computes it again; return whether that worked."""
        return self._work.forget(shard)

    def write(self, shard: int, entries: Sequence[Sequence[int]], rows: Tensor, bad: Iterable[BadSample] = ()) -> None:
        """Write a shard, and then its record.

        Args:
            shard: its number.
            entries: rows of each sample; none for a bad one.
            rows: ``(R, N, D)`` in the stored dtype, on the CPU.
            bad: the bad samples.

        Raises:
            ConfigError: something that is not a file has the name of one of them.
        """
        for path in (self._work.file(shard), self._work.record_path(shard)):
            _require_file_or_nothing(path)
        content = rows.contiguous().flatten(1).view(torch.uint8).numpy()
        arrays: dict[str, np.ndarray] = {
            "entries": np.array([row for each in entries for row in each], np.int32),
            "first": np.cumsum([0, *map(len, entries)]).astype(np.int64),
            "rows": content,
            "sums": _row_checksums(content),
        }
        file = self._work.write(shard, table_bytes(self._facts(shard), arrays))
        records = [{"sample_id": each.sample_id, "kind": each.kind, "reason": each.reason} for each in bad]
        self._work.add_record(shard, file, len(entries) - len(records), records)

    def open(self, shard: int) -> StoredShard:
        """Open a shard.

        Raises:
            DataError: it is missing or damaged, or belongs to another place.
        """
        verified = ("entries", "first", "sums")
        return StoredShard(**open_table(self._work.file(shard), self._facts(shard), verified).arrays)

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

    def first_unseen(self) -> Path | None:
        """Return the first shard that this process cannot see with its record; None if it sees all."""
        missing = (shard for shard in range(self.settings.shards) if self._work.record(shard) is None)
        return next((self._work.file(shard) for shard in missing), None)

    def _facts(self, shard: int) -> dict[str, object]:
        return {**FORMAT, "settings": self._work.digest, "shard": shard}


def _row_checksums(rows: np.ndarray) -> np.ndarray:
    """Return a 64-bit checksum of each row of bytes, which any flipped bit changes: that of `vqclip.io.tensors`."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))) if rows.shape[1] % 8 else rows
    words = np.ascontiguousarray(padded).view("<i8")
    with np.errstate(over="ignore"):  # sums are taken modulo 2^64
        return (words * _odd_numbers(words.shape[1])).sum(1)


@functools.lru_cache(maxsize=8)
def _odd_numbers(count: int) -> np.ndarray:
    return np.arange(1, 2 * count, 2, dtype="<i8")


def _require_file_or_nothing(path: Path) -> None:
    """Raise ConfigError where a write would wait for a pipe, or fail with a link's broken target."""
    if (path.is_symlink() or path.exists()) and not path.is_file():
        raise ConfigError(
            f"data.feature_cache: {path}: got a folder, a pipe or a broken link; expected a file or nothing; delete it"
        )
