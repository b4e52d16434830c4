"""The folder of stored features of one modality, which the processes of a job, and later jobs, fill together.

    image-<digest>/
      settings.json            everything that determines the bytes
      00000.features, ...      shards
      records/00000.json, ...  a finished shard: its size, and its bad samples
      lock                     held by the job that computes

A shard is written before its record, both atomically, so a record means a finished shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vqclip.config import Config
from vqclip.data.features.settings import FORMAT, FeatureSettings
from vqclip.data.features.shard import ShardContent
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.atomic import remove_leftovers, write_file, write_file_once
from vqclip.io.differences import describe_differences
from vqclip.io.json_files import add_checksum, read_json, read_versioned, validation_problems

__all__ = ["BadFeatures", "FeatureFolder", "ShardRecord"]

logger = logging.getLogger("vqclip.data")

_REMEDY = "delete the folder, or use the vqclip that wrote it"
_RECORDS = "records"


class BadFeatures(Config):
    """A bad sample of a shard."""

    sample_id: int
    kind: str
    reason: str


class ShardRecord(Config):
    """Record of a finished shard."""

    settings: str
    """Digest of the folder's settings."""
    shard: int
    """Number of the shard; a file and its record that were moved to another number do not fit it."""
    size: int
    """Bytes of the shard, which contains the checksums of its parts."""
    bad: tuple[BadFeatures, ...] = ()
    """Samples without features."""


class FeatureFolder:
    """Features of one modality.

    Args:
        parent: folder of all features.
        settings: everything that determines the bytes; other settings have another folder.
    """

    def __init__(self, parent: Path, settings: FeatureSettings):
        self.settings, self._digest = settings, settings.digest
        self.path = parent / f"{settings.modality}-{self._digest[:24]}"

    def make(self) -> None:
        """Make the folder if it is missing, and compare its settings.

        Raises:
            ConfigError: it cannot be made, has other settings, or contains something that is not a file.
        """
        try:
            (self.path / _RECORDS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"data.feature_cache.folder: {self.path} cannot be made ({error.strerror}); expected a folder that "
                "can be written to"
            ) from None
        path, mine = self.path / "settings.json", self.settings.model_dump(mode="json")
        _require_file_or_nothing(path)
        _require_file_or_nothing(self.lock_path)
        if not path.exists():
            write_file_once(path, add_checksum({**FORMAT, **mine}))
        try:
            found = read_versioned(path, FORMAT, _REMEDY)
        except CheckpointError as error:
            raise ConfigError(f"data.feature_cache: {error}; delete the folder {self.path}") from None
        if differing := describe_differences(found, json.loads(json.dumps(mine)), "in the folder"):
            shown = "\n".join(differing.values())
            raise ConfigError(f"data.feature_cache: {path} has other settings; delete the folder:\n{shown}")

    def remove_leftovers(self) -> None:
        """Remove unfinished files of killed processes."""
        remove_leftovers(self.path)
        remove_leftovers(self.path / _RECORDS)

    @property
    def lock_path(self) -> Path:
        """Return the file that the computing job locks."""
        return self.path / "lock"

    def shard_path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.path / f"{shard:05d}.features"

    def key(self, shard: int) -> int:
        """Return a 64-bit number of a shard, by which its checksums differ from those of every other shard."""
        return int.from_bytes(hashlib.sha256(f"{self._digest} {shard}".encode()).digest()[:8], "little", signed=True)

    def is_finished(self, shard: int) -> bool:
        """Return whether a shard has a record, and the size in it; its bytes are verified when they are read."""
        record, path = self.read_record(shard), self.shard_path(shard)
        if record is None:
            return False
        size = path.stat().st_size if path.is_file() else 0
        if size != record.size:
            logger.warning("%s: got %d bytes, expected %d; it is computed again", path, size, record.size)
        return size == record.size

    def forget(self, shard: int) -> bool:
        """Remove the record of a damaged shard, so that the next run computes it again; return whether that worked."""
        try:
            self._record_path(shard).unlink(missing_ok=True)
        except OSError:  # such as a read-only file system
            return False
        return True

    def read_record(self, shard: int) -> ShardRecord | None:
        """Return the record of a shard; None if it is missing or damaged."""
        path = self._record_path(shard)
        try:
            body: dict[str, Any] = read_versioned(path, FORMAT, _REMEDY)
            record = ShardRecord.model_validate(body)
            if (record.settings, record.shard) == (self._digest, shard):
                return record
            logger.warning("%s: the record of another shard or folder; the shard is computed again", path)
        except FileNotFoundError:
            return None
        except (CheckpointError, OSError) as error:
            logger.warning("%s; the shard is computed again", error)
        except ValidationError as error:
            logger.warning("%s: %s; the shard is computed again", path, "; ".join(validation_problems(error)))
        return None

    def write(self, shard: int, content: ShardContent, bad: tuple[BadFeatures, ...]) -> None:
        """Write a shard, and then its record.

        Raises:
            ConfigError: something that is not a file has the name of one of them.
        """
        path, record_path = self.shard_path(shard), self._record_path(shard)
        _require_file_or_nothing(path)
        _require_file_or_nothing(record_path)
        key = self.key(shard)
        size = write_file(path, lambda file: content.write(file, key)).size
        record = ShardRecord(settings=self._digest, shard=shard, size=size, bad=bad)
        write_file(record_path, add_checksum({**FORMAT, **record.model_dump(mode="json")}))

    def describe_nearest(self) -> list[str]:
        """Return the most similar other folder of the same data, and a line for each difference; [] for none."""
        mine = json.loads(json.dumps(FORMAT | self.settings.model_dump(mode="json")))
        found: list[list[str]] = []
        for path in sorted(self.path.parent.glob(f"{self.settings.modality}-*/settings.json")):
            with contextlib.suppress(CheckpointError, OSError):
                other = {name: value for name, value in read_json(path)[0].items() if name != "sha256"}
                if other.get("origin", {}).get("data") != mine["origin"]["data"]:
                    continue
                found.append([path.parent.name, *describe_differences(other, mine, "there").values()])
        return min((each for each in found if each[0] != self.path.name), key=len, default=[])

    def first_unseen(self) -> Path | None:
        """Return the first shard or record that this process cannot see; None if it sees all."""
        for shard in range(self.settings.shards):
            for path in (self.shard_path(shard), self._record_path(shard)):
                if not path.is_file():
                    return path
        return None

    def _record_path(self, shard: int) -> Path:
        return self.path / _RECORDS / f"{shard:05d}.json"


def _require_file_or_nothing(path: Path) -> None:
    """Raise ConfigError where a write would wait for a pipe, or fail with a link's broken target."""
    if (path.is_symlink() or path.exists()) and not path.is_file():
        raise ConfigError(
            f"data.feature_cache: {path}: got a folder, a pipe or a broken link; expected a file or nothing; delete it"
        )
