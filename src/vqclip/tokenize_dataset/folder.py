"""The folder of token shards that the processes of a job, and later jobs, write together.

    settings.json           everything that determines the bytes; other settings are refused
    00000.tar, ...          a token shard for every input shard (.parquet)
    records/00000.json ...  a finished shard: its checksum, and the samples left out
    manifest.json           all of it, when every shard is finished
    bad_samples.jsonl       the samples that were left out

Processes communicate only through this folder: a process that finishes a shard and finds all others finished writes the
manifest. It is a function of the records, so two processes that do so at once write the same bytes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from vqclip.config import Config
from vqclip.data.tokens import SUFFIXES, Manifest, TokenRecord, write_shard
from vqclip.data.tokens.manifest import (
    BAD_FILE,
    MANIFEST_FILE,
    RECORDS,
    SETTINGS_FILE,
    Settings,
    ShardInfo,
    json_file_bytes,
    read_json_file,
)
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.io.atomic import remove_leftovers, write_file, write_file_once
from vqclip.io.differences import describe_differences
from vqclip.io.digest import FileDigest, verify_file

__all__ = ["TokenFolder"]

logger = logging.getLogger(__name__)

_SHOWN = 20


class BadRecord(Config):
    """Record of a sample that was left out."""

    sample_id: int
    key: str
    kind: str
    reason: str


class ShardRecord(Config):
    """Record of a finished shard."""

    facts: ShardInfo
    """The token shard."""
    bad: tuple[BadRecord, ...] = Field(default=())
    """Samples that were left out, in order."""


class TokenFolder:
    """A folder of token shards that is being made.

    Args:
        folder: the folder; made if it is missing.
        settings: everything that determines its bytes.

    Raises:
        ConfigError: it was begun with other settings, which the message shows, or contains something else.
    """

    def __init__(self, folder: Path, settings: Settings):
        self.folder, self.settings = folder, settings
        self._records = folder / RECORDS
        try:
            self._records.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out: {folder}: cannot be made ({error.strerror}); expected a new folder") from None
        path = folder / SETTINGS_FILE
        if not path.exists():
            _require_no_shards(folder)
            write_file_once(path, json_file_bytes(settings))
        # Read in any case: another job may have written it first.
        _require_same(folder, read_json_file(path), settings.model_dump(mode="json"))

    def name(self, shard: int) -> str:
        """Return the file name of a token shard."""
        return f"{shard:05d}{SUFFIXES[self.settings.storage]}"

    def find_finished(self, shard: int) -> ShardInfo | None:
        """Return the record of a token shard that is finished and undamaged; None if it has to be made."""
        record = self._record(shard)
        if record is None:
            return None
        if record.facts.name != self.name(shard):
            logger.warning("%s: names %s; the shard is made again", self._record_file(shard), record.facts.name)
            return None
        try:
            digest = FileDigest(size=record.facts.size, sha256=record.facts.sha256)
            verify_file(self.folder / record.facts.name, digest, "its record")
        except CheckpointError as error:
            logger.warning("%s; it is made again", error)
            return None
        return record.facts

    def write(
        self, shard: int, records: Iterable[TokenRecord], count: int, bad: list[Any], kinds: dict[str, int]
    ) -> None:
        """Write a token shard, and then its record.

        Args:
            shard: its number.
            records: its samples.
            count: number of samples.
            bad: samples that are left out, with the keys of `BadRecord`.
            kinds: number of those samples by kind.
        """
        name = self.name(shard)
        made = write_file(self.folder / name, lambda file: write_shard(file, records, self.settings))
        facts = ShardInfo(name=name, size=made.size, sha256=made.sha256, samples=count, bad=kinds)
        record = ShardRecord(facts=facts, bad=tuple(BadRecord.model_validate(each) for each in bad))
        write_file(self._records / f"{shard:05d}.json", json_file_bytes(record))

    def finish(self, allowed: int) -> Manifest | None:
        """Write the manifest if every shard is finished.

        Args:
            allowed: largest number of samples left out, over all shards.

        Returns:
            The manifest; None while shards are missing.

        Raises:
            DataError: more samples were left out than are allowed; the message names some.
        """
        records = [self._record(shard) for shard in range(len(self.settings.shards))]
        whole = [record for record in records if record is not None]
        if len(whole) < len(records) or not all((self.folder / record.facts.name).exists() for record in whole):
            return None
        bad = [each for record in whole for each in record.bad]
        require_few_bad((each.reason for each in bad), len(bad), allowed)
        kinds: Counter[str] = Counter()
        for record in whole:
            kinds.update(record.facts.bad)
        manifest = Manifest(
            settings=self.settings,
            samples=sum(record.facts.samples for record in whole),
            bad=dict(sorted(kinds.items())),
            shards=tuple(record.facts for record in whole),
        )
        lines = "".join(json.dumps(each.model_dump(), sort_keys=True) + "\n" for each in bad)
        self._put_if_new(BAD_FILE, lines.encode())
        self._put_if_new(MANIFEST_FILE, json_file_bytes(manifest))
        for folder in (self.folder, self._records):
            remove_leftovers(folder)
        return manifest

    def missing(self) -> int:
        """Return the number of shards without a record."""
        return sum(not self._record_file(shard).exists() for shard in range(len(self.settings.shards)))

    def _put_if_new(self, name: str, data: bytes) -> None:
        path = self.folder / name
        if not path.exists() or path.read_bytes() != data:
            write_file(path, data)

    def _record_file(self, shard: int) -> Path:
        return self._records / f"{shard:05d}.json"

    def _record(self, shard: int) -> ShardRecord | None:
        path = self._record_file(shard)
        try:
            return ShardRecord.model_validate_json(json.dumps(read_json_file(path)))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:  # DataError and pydantic's are ValueErrors
            logger.warning("%s: %s; the shard is made again", path, error)
            return None


def require_few_bad(reasons: Iterable[str], count: int, allowed: int) -> None:
    """Check the number of samples left out; raise DataError if it is larger than allowed."""
    if count > allowed:
        shown = "\n".join(f"  {reason}" for reason in [*reasons][:5])
        raise DataError(
            f"{count} samples cannot be used; --tolerance allows {allowed} of these data. Repair them, or raise it and "
            f"run the command again. Some of them:\n{shown}"
        )


def _require_no_shards(folder: Path) -> None:
    found = sorted(path.name for suffix in SUFFIXES.values() for path in folder.glob(f"*{suffix}"))
    if found and not (folder / SETTINGS_FILE).exists():  # checked last: another process writes it before its shards
        raise ConfigError(
            f"--out: {folder} has no {SETTINGS_FILE}, but contains {', '.join(found[:5])}; expected an empty folder or "
            "one that `vqclip tokenize` began"
        )


def _require_same(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compare the settings of a folder with those of this command; raise ConfigError if they differ."""
    lines = list(describe_differences(there, here, "there").values())
    if lines:
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise ConfigError(
            f"--out: {folder} was begun with other settings; name another folder, or give the same ones:\n"
            + "\n".join(lines[:_SHOWN])
            + more
        )
