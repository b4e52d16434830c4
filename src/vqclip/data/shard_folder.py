"""Folders of shards that the processes of a job, and later jobs, write together.

    settings.json           everything that determines the bytes; other settings are refused
    00000.tar, ...          the shards
    records/00000.json ...  a finished shard: its checksum, and the samples left out
    manifest.json           all of it, when every shard is finished
    bad_samples.jsonl       the samples that were left out

Processes communicate only through this folder: a process that finishes a shard and finds all others finished writes the
manifest. It is a function of the records, so two processes that do so at once write the same bytes.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, TypeVar

from pydantic import Field

from vqclip.config import Config
from vqclip.data.in_order import require_few_bad
from vqclip.data.tokens.manifest import BAD_FILE, MANIFEST_FILE, RECORDS, SETTINGS_FILE, ShardInfo, ShardManifest
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.io import atomic
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.json_files import add_checksum, describe_differences, read_versioned

__all__ = ["BadRecord", "ShardFolder", "ShardRecord", "WorkResult"]

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
    """The shard."""
    bad: tuple[BadRecord, ...] = Field(default=())
    """Samples that were left out, in order."""


RecordT = TypeVar("RecordT", bound=ShardRecord)
ManifestT = TypeVar("ManifestT", bound=ShardManifest)


@dataclass(frozen=True)
class WorkResult(Generic[ManifestT]):
    """Work of one process on a folder of shards."""

    made: int
    """Number of shards it made."""
    found: int
    """Number of its shards that were already finished."""
    samples: int
    """Number of samples it read."""
    seconds: float
    """Time from the first sample."""
    missing: int
    """Number of shards that others have not finished yet."""
    manifest: ManifestT | None
    """The manifest, if all shards are finished."""
    cut: str | None = None
    """Message on captions that were cut; None if none was."""

    def describe(self, out: Path, others: str, who: str = "") -> str:
        """Return the work in words.

        Args:
            out: the folder.
            others: who makes the other shards.
            who: name of the process, before its lines.
        """
        rate = f"; {self.samples / self.seconds:.0f} samples/s" if self.samples else ""
        text = f"{who}shards: {self.made} written, {self.found} already finished{rate}"
        text += f"\n{who}{self.cut}" if self.cut else ""
        manifest = self.manifest
        if manifest is None:
            return f"{text}\n{who}{self.missing} shards are left to {others}, or to the same command run again"
        size, left_out = sum(shard.size for shard in manifest.shards), sum(manifest.bad.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in manifest.bad.items())
        bad = f", {left_out} left out ({kinds}; see {BAD_FILE})" if left_out else ""
        text += f"\n{out}: {manifest.samples:,} samples in {len(manifest.shards)} shards"
        return f"{text}, {size / 1e6:,.1f} MB{bad}"


class ShardFolder(ABC, Generic[RecordT, ManifestT]):
    """A folder of shards that is being made.

    Args:
        folder: the folder; made if it is missing.
        settings: everything that determines its bytes.
        shards: number of shards.

    Raises:
        ConfigError: it was begun with other settings, which the message shows, or contains something else.
    """

    command: ClassVar[str]
    """Command that writes such folders, for messages."""
    versions: ClassVar[Mapping[str, object]]
    """Format and version, in every JSON file."""
    suffixes: ClassVar[Sequence[str]]
    """Endings of the names of shards."""
    out_option: ClassVar[str] = "--out"
    """Option that names the folder."""
    bad_option: ClassVar[str]
    """Option that sets the largest share of bad samples."""
    record_type: type[RecordT]
    """Class of the records."""

    def __init__(self, folder: Path, settings: Config, shards: int):
        self.folder, self.shards = folder, shards
        self._records = folder / RECORDS
        try:
            self._records.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.out_option}: {folder}: cannot be made ({error.strerror}); expected a new folder"
            ) from None
        path = folder / SETTINGS_FILE
        if not path.exists():
            self._require_no_shards()
            atomic.write_file_once(path, self._json(settings))
        # Read in any case: another job may have written it first.
        self._require_same(self._read(path), settings.model_dump(mode="json"))

    @abstractmethod
    def name(self, shard: int) -> str:
        """Return the file name of a shard."""

    @abstractmethod
    def make_manifest(self, records: Sequence[RecordT], samples: int, bad: dict[str, int]) -> ManifestT:
        """Return the manifest of a folder whose shards are all finished.

        Args:
            records: of all shards in order.
            samples: number of samples in them.
            bad: kind → number of samples that were left out.
        """

    def find_finished(self, shard: int) -> ShardInfo | None:
        """Return the record of a shard that is finished and undamaged; None if it has to be made."""
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

    def write_file(self, shard: int, content: Callable[[BinaryIO], object]) -> FileDigest:
        """Write the file of a shard; it counts as finished after `add_record`."""
        return atomic.write_file(self.folder / self.name(shard), content)

    def add_record(self, shard: int, file: FileDigest, samples: int, bad: Iterable[Any], **more: object) -> ShardInfo:
        """Record a finished shard, and return its description.

        Args:
            shard: its number.
            file: its digest, from `write_file`.
            samples: number of samples in it.
            bad: samples that are left out, with the keys of `BadRecord`.
            more: further fields of the record.
        """
        left_out = tuple(BadRecord.model_validate(each) for each in bad)
        kinds = dict(sorted(Counter(each.kind for each in left_out).items()))
        facts = ShardInfo(name=self.name(shard), size=file.size, sha256=file.sha256, samples=samples, bad=kinds)
        record = self.record_type.model_validate({"facts": facts, "bad": left_out, **more})
        atomic.write_file(self._record_file(shard), self._json(record))
        return facts

    def finish(self, allowed: int) -> ManifestT | None:
        """Write the manifest if every shard is finished.

        Args:
            allowed: largest number of samples left out, over all shards.

        Returns:
            The manifest; None while shards are missing.

        Raises:
            DataError: more samples were left out than are allowed; the message names some.
        """
        records = [self._record(shard) for shard in range(self.shards)]
        whole = [record for record in records if record is not None]
        if len(whole) < len(records) or not all((self.folder / record.facts.name).exists() for record in whole):
            return None
        bad = [each for record in whole for each in record.bad]
        require_few_bad((each.reason for each in bad), len(bad), allowed, self.bad_option)
        kinds: Counter[str] = Counter()
        for record in whole:
            kinds.update(record.facts.bad)
        samples = sum(record.facts.samples for record in whole)
        manifest = self.make_manifest(whole, samples, dict(sorted(kinds.items())))
        lines = "".join(json.dumps(each.model_dump(), sort_keys=True) + "\n" for each in bad)
        self._put_if_new(BAD_FILE, lines.encode())
        self._put_if_new(MANIFEST_FILE, self._json(manifest))
        for folder in (self.folder, self._records):
            atomic.remove_leftovers(folder)
        return manifest

    def bad_reasons(self) -> Iterator[str]:
        """Yield the reasons for which samples of finished shards were left out."""
        for shard in range(self.shards):
            if (record := self._record(shard)) is not None:
                yield from (each.reason for each in record.bad)

    def missing(self) -> int:
        """Return the number of shards without a record."""
        return sum(not self._record_file(shard).exists() for shard in range(self.shards))

    def _put_if_new(self, name: str, data: bytes) -> None:
        path = self.folder / name
        if not path.exists() or path.read_bytes() != data:
            atomic.write_file(path, data)

    def _json(self, facts: Config) -> bytes:
        return add_checksum({**self.versions, **facts.model_dump(mode="json")})

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            return read_versioned(path, self.versions, f"run `{self.command}` into a new folder")
        except CheckpointError as error:
            raise DataError(str(error)) from None

    def _record_file(self, shard: int) -> Path:
        return self._records / f"{shard:05d}.json"

    def _record(self, shard: int) -> RecordT | None:
        path = self._record_file(shard)
        try:
            return self.record_type.model_validate(self._read(path))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:  # DataError and pydantic's are ValueErrors
            logger.warning("%s: %s; the shard is made again", path, error)
            return None

    def _require_no_shards(self) -> None:
        found = sorted(path.name for suffix in self.suffixes for path in self.folder.glob(f"*{suffix}"))
        if found and not (self.folder / SETTINGS_FILE).exists():  # checked last: another process writes it before them
            raise ConfigError(
                f"{self.out_option}: {self.folder} has no {SETTINGS_FILE}, but contains {', '.join(found[:5])}; "
                f"expected an empty folder or one that `{self.command}` began"
            )

    def _require_same(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Compare the settings of a folder with those of this command; raise ConfigError if they differ."""
        lines = list(describe_differences(there, here, "there").values())
        if lines:
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ConfigError(
                f"{self.out_option}: {self.folder} was begun with other settings; name another folder, or give the "
                "same ones:\n" + "\n".join(lines[:_SHOWN]) + more
            )
