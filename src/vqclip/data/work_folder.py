"""A folder of files that the processes of a job, other machines, and later jobs make together.

    settings.json            everything that determines the bytes; other settings are refused
    00000.tar, ...           the file of each item of the work
    records/00000.json, ...  a finished item: size and checksum of its file, samples left out, facts that its maker adds
    claims/00000, ...        an item that a process is making: locked, and renewed, while it does
    manifest.json            the whole, when every item is finished; bad_samples.jsonl names the samples left out

    folder = WorkFolder(path, settings, items, layout)   # makes the folder, or compares its settings
    for item in folder.claim():                          # items that nobody has finished or is making
        file = folder.write(item, content)               # folder.renew() now and then
        folder.add_record(item, file, samples)           # now it is finished
    if (records := folder.records()) is not None:        # every item is finished
        folder.finish(records, manifest)

Processes meet in this folder alone. A file is written before its record, both atomically, so a record means a finished
item. An item depends on the settings and its number alone: claims save work, and nothing else depends on them. Two
processes that make one item, on machines whose locks do not see each other, write the same bytes, and so do two that
write the manifest.

A claim ends with its process, however that ends. On a disk that machines share without common locks, one that another
machine has not renewed for five minutes counts as abandoned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import ValidationError

from vqclip.config import Config
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io import atomic
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.file_locks import ProcessLock
from vqclip.io.json_files import add_checksum, describe_differences, read_versioned, validation_problems
from vqclip.process import progress

__all__ = ["BadRecord", "FolderLayout", "ItemRecord", "WorkFolder"]

logger = logging.getLogger("vqclip.data")

SETTINGS_FILE, MANIFEST_FILE, BAD_FILE = "settings.json", "manifest.json", "bad_samples.jsonl"
_RECORDS, _CLAIMS = "records", "claims"
_LEASE_S = 300.0
"""Time after which a claim of another machine that was not renewed counts as abandoned."""
_RENEW_S = 20.0
"""Shortest time between two renewals of a claim."""
_WAIT_S = 0.5
"""Time between two looks at items that others are making."""
_SHOWN = 20
"""Differing settings that a message shows."""


class FolderLayout(NamedTuple):
    """Layout of the folders of one command."""

    versions: Mapping[str, object]
    """Keys for format and version, with their values, in every JSON file; other versions are refused."""
    suffix: str
    """Ending of the names of the items' files, such as ``.tar``."""
    command: str
    """Command or setting that makes such folders, for messages."""
    option: str
    """Option or setting that names the folder, for messages."""
    digits: int = 5
    """Digits of the numbers in the names of the items' files, at least."""


class BadRecord(Config):
    """Record of a sample that cannot be used."""

    sample_id: int
    key: str = ""
    kind: str
    reason: str


class ItemRecord(Config):
    """Record of a finished item."""

    settings: str
    """Digest of the folder's settings."""
    item: int
    """Number of the item; a record that was moved to another number does not count."""
    name: str
    """Name of its file."""
    file: FileDigest
    """Bytes and checksum of its file."""
    samples: int
    """Samples in its file."""
    bad: tuple[BadRecord, ...] = ()
    """Samples that cannot be used, in order."""
    facts: dict[str, Any] = {}
    """JSON values that its maker adds."""


class WorkFolder:
    """A folder of files that several processes make.

    Args:
        path: the folder; made if it is missing.
        settings: JSON values: everything that determines its bytes.
        items: number of items.
        layout: names of its files, and words for messages.

    Raises:
        ConfigError: it cannot be made, was begun with other settings, which the message shows, or contains something
            else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], items: int, layout: FolderLayout):
        self.path, self.items, self.layout = path, items, layout
        self.settings: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        self.digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        self._claims: list[Path] = []
        self._renewed = time.monotonic()
        try:
            for folder in (_RECORDS, _CLAIMS):
                (path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{layout.option}: {path}: cannot be made ({error.strerror}); expected a new folder"
            ) from None
        file = path / SETTINGS_FILE
        if not file.exists():
            self._require_no_files()
            atomic.write_file_once(file, self._json({"items": items, "settings": self.settings}))
        self._require_same(file)  # in any case: another process may have written it first

    @classmethod
    def existing(cls, path: Path, layout: FolderLayout) -> WorkFolder | None:
        """Open a folder that was begun, with the settings in it; None if there is none, or it cannot be read."""
        try:
            found = read_versioned(path / SETTINGS_FILE, layout.versions, "it is made again")
            return cls(path, found["settings"], found["items"], layout)
        except FileNotFoundError:
            return None
        except (CheckpointError, OSError, KeyError) as error:
            logger.warning("%s; it is made again", error)
            return None

    def name(self, item: int) -> str:
        """Return the name of an item's file."""
        return f"{item:0{self.layout.digits}d}{self.layout.suffix}"

    def file(self, item: int) -> Path:
        """Return the path of an item's file."""
        return self.path / self.name(item)

    def claim(self, items: Iterable[int] | None = None, wait: bool = False) -> Iterator[int]:
        """Yield the items that nobody has finished, each while this process claims it.

        Args:
            items: numbers of the items wanted; None: all.
            wait: go on until all of them are finished, also those that other processes are making.
        """
        left = [item for item in (range(self.items) if items is None else items) if self.record(item) is None]
        while left:
            busy = []
            for item in left:
                claim = self._take(item)
                if claim is None:
                    busy.append(item)
                    continue
                try:
                    if self.record(item) is None:  # another process may have finished it meanwhile
                        yield item
                finally:
                    self._claims.remove(self._claim_path(item))
                    self._claim_path(item).unlink(missing_ok=True)
                    claim.release()
            left = [item for item in busy if self.record(item) is None] if wait else []
            if left:
                progress.heartbeat()
                time.sleep(_WAIT_S)

    def renew(self) -> None:
        """Show other machines that this process still makes what it claims; called between the parts of long work."""
        if time.monotonic() - self._renewed > _RENEW_S:
            self._renewed = time.monotonic()
            for path in self._claims:
                with contextlib.suppress(OSError):
                    os.utime(path)

    def write(self, item: int, content: bytes | Callable[[BinaryIO], object]) -> FileDigest:
        """Write the file of an item, from its bytes or by a function; the item is finished after `add_record`."""
        return atomic.write_file(self.file(item), content)

    def add_record(
        self, item: int, file: FileDigest, samples: int, bad: Iterable[Any] = (), **facts: Any
    ) -> ItemRecord:
        """Record a finished item.

        Args:
            item: its number.
            file: digest of its file, from `write`.
            samples: number of samples in it.
            bad: samples that cannot be used, with the keys of `BadRecord`.
            **facts: JSON values that the record keeps.
        """
        record = ItemRecord(
            settings=self.digest,
            item=item,
            name=self.name(item),
            file=file,
            samples=samples,
            bad=tuple(BadRecord.model_validate(each) for each in bad),
            facts=facts,
        )
        atomic.write_file(self.record_path(item), self._json(record.model_dump(mode="json")))
        return record

    def record(self, item: int, verify: bool = False) -> ItemRecord | None:
        """Return the record of an item whose file is there with its size; None if it has to be made.

        Args:
            item: its number.
            verify: read the file, and compare its checksum.
        """
        path = self.record_path(item)
        try:
            record = ItemRecord.model_validate(read_versioned(path, self.layout.versions, "it is made again"))
            if (record.settings, record.item, record.name) != (self.digest, item, self.name(item)):
                raise CheckpointError(f"{path}: the record of another item or folder")
            if verify:
                verify_file(self.file(item), record.file, "its record")
            elif (size := self.file(item).stat().st_size) != record.file.size:
                raise CheckpointError(f"{self.file(item)}: got {size} bytes, expected {record.file.size}")
            return record
        except FileNotFoundError:
            return None
        except ValidationError as error:
            logger.warning("%s: %s; it is made again", path, "; ".join(validation_problems(error)))
        except (CheckpointError, OSError) as error:
            logger.warning("%s; it is made again", error)
        return None

    def records(self) -> list[ItemRecord] | None:
        """Return the records of all items, in order; None while some are missing."""
        found = [self.record(item) for item in range(self.items)]
        whole = [record for record in found if record is not None]
        return whole if len(whole) == len(found) else None

    def missing(self) -> int:
        """Return the number of items without a record."""
        return sum(not self.record_path(item).exists() for item in range(self.items))

    def forget(self, item: int) -> bool:
        """Remove the record of a damaged item, so that it is made again; return whether that worked."""
        try:
            self.record_path(item).unlink(missing_ok=True)
        except OSError:  # such as a read-only file system
            return False
        return True

    def finish(self, records: Sequence[ItemRecord], manifest: Mapping[str, Any]) -> None:
        """Write the manifest and the list of bad samples, and remove what killed processes have left.

        Args:
            records: those of all items.
            manifest: JSON values.
        """
        lines = [json.dumps(each.model_dump(), sort_keys=True) + "\n" for record in records for each in record.bad]
        for name, data in ((BAD_FILE, "".join(lines).encode()), (MANIFEST_FILE, self._json(manifest))):
            path = self.path / name
            if not path.exists() or path.read_bytes() != data:
                atomic.write_file(path, data)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove unfinished files of killed processes, and the claims if every item is finished."""
        for folder in (self.path, self.path / _RECORDS):
            atomic.remove_leftovers(folder)
        if not self.missing():
            for path in (self.path / _CLAIMS).glob("*"):
                with contextlib.suppress(OSError):  # another user's file
                    path.unlink()

    def _take(self, item: int) -> ProcessLock | None:
        """Claim an item; return None if another process is making it."""
        path = self._claim_path(item)
        with contextlib.suppress(OSError):
            holder = path.read_text(errors="replace").strip()
            here = not holder or holder.endswith(f" on {socket.gethostname()}")
            if not here and self._time_of_disk() - path.stat().st_mtime < _LEASE_S:
                return None
        lock = ProcessLock(path)
        if lock.try_acquire() is not None:
            lock.release()
            return None
        self._claims.append(path)
        return lock

    def _time_of_disk(self) -> float:
        """Return the time on the machine that has the disk, whose clock sets the times of files."""
        with tempfile.TemporaryFile(dir=self.path / _CLAIMS) as file:
            return os.fstat(file.fileno()).st_mtime

    def _claim_path(self, item: int) -> Path:
        return self.path / _CLAIMS / f"{item:05d}"

    def record_path(self, item: int) -> Path:
        """Return the path of an item's record."""
        return self.path / _RECORDS / f"{item:05d}.json"

    def _json(self, body: Mapping[str, Any]) -> bytes:
        return add_checksum({**self.layout.versions, **body})

    def _require_no_files(self) -> None:
        found = sorted(path.name for path in self.path.glob(f"*{self.layout.suffix}"))
        if found and not (self.path / SETTINGS_FILE).exists():  # checked last: another process writes it before them
            raise ConfigError(
                f"{self.layout.option}: {self.path} has no {SETTINGS_FILE}, but contains {', '.join(found[:5])}; "
                f"expected an empty folder or one that `{self.layout.command}` began"
            )

    def _require_same(self, file: Path) -> None:
        """Compare the settings of the folder with those of this process; raise ConfigError if they differ."""
        try:
            there = read_versioned(file, self.layout.versions, f"run `{self.layout.command}` into a new folder")
        except (CheckpointError, OSError) as error:
            raise ConfigError(f"{self.layout.option}: {error}") from None
        lines = list(describe_differences(there["settings"], self.settings, "there").values())
        if lines:
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ConfigError(
                f"{self.layout.option}: {self.path} was begun with other settings; name another folder, or give the "
                "same ones:\n" + "\n".join(lines[:_SHOWN]) + more
            )
