"""A folder of files that the processes of a job, other machines, and later jobs make together.

    settings.json            everything that determines the bytes; other settings are refused
    00000.tar, ...           the file of each item of the work
    records/00000.json, ...  a finished item: size and checksum of its file, samples left out, facts that its maker adds
    claims/00000, ...        an item that a process is making: locked while it does
    manifest.json            the whole, when every item is finished; bad_samples.jsonl names the samples left out

    folder = WorkFolder(path, settings, items, layout)   # makes the folder, or compares its settings
    for item in folder.claim():                          # items that nobody has finished or is making
        file = write_file(folder.file(item), content)
        folder.add_record(item, file, samples)           # now it is finished
    if (records := folder.records()) is not None:        # every item is finished
        folder.finish(records, bad_fraction, "--tolerance")

Processes meet in this folder alone. A file is written before its record, both atomically, so a record means a finished
item. An item depends on the settings and its number alone: claims save work, and nothing else depends on them. Two
processes that make one item, on machines whose locks do not see each other, write the same bytes, and so do two that
write the manifest.

A claim ends with its process, however that ends. Where several machines work on a folder, each takes items in an order
of its own, so that machines whose locks do not see each other make few items twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from typing_extensions import Self

from vqclip.config import Config
from vqclip.data.batch import allowed_bad, require_few_bad
from vqclip.errors import CheckpointError, ConfigError, DataError, count_noun
from vqclip.io.atomic import FileDigest, ProcessLock, remove_leftovers, verify_file, write_file, write_file_once
from vqclip.io.files import Stamp, format_bytes
from vqclip.io.json_files import add_checksum, describe_differences, read_checked, read_versioned
from vqclip.process import progress

logger = logging.getLogger("vqclip.data")

SETTINGS_FILE, MANIFEST_FILE, BAD_FILE = "settings.json", "manifest.json", "bad_samples.jsonl"
_RECORDS, _CLAIMS = "records", "claims"
VISIBLE_S = 90.0
"""Longest wait for a file of another machine: a network file system may hide new files for a minute."""
_WAIT_S = 0.5
"""Time between two looks at items that others are making."""
_SHOWN = 20
"""Differing settings that a message shows."""
_Count = Annotated[int, Field(ge=0, le=2**40)]  # so that no manifest that is read adds up to 2**63


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


class ManifestItem(Config):
    """A finished item in a manifest."""

    name: str = Field(pattern=r"^[0-9]{1,9}\.[a-z]+$")
    """File name: a number and the ending, so that it cannot leave the folder."""
    size: _Count
    """Bytes."""
    sha256: str
    """SHA-256 of the file."""
    samples: _Count
    """Samples in it."""
    bad: dict[str, _Count]
    """Kind of problem → number of samples left out."""


class FolderManifest(Config):
    """A whole folder, in `manifest.json`."""

    settings: Any
    """Settings of the folder."""
    samples: _Count
    """Samples in all files."""
    bad: dict[str, _Count]
    """Kind of problem → number of samples left out; `bad_samples.jsonl` names them."""
    shards: tuple[ManifestItem, ...]
    """The items in order."""


class WorkResult(NamedTuple):
    """Work of one process, with its workers, on a folder."""

    made: int
    """Number of items it made."""
    found: int
    """Number of items that were finished before it began."""
    missing: int
    """Number of items that other processes have not finished yet."""
    samples: int
    """Number of samples it read."""
    seconds: float
    """Time it took."""
    manifest: FolderManifest | None
    """The manifest; None until all items are finished."""
    note: str | None
    """Remark on the finished folder, if there is one."""

    def describe(self, path: Path, who: str = "") -> str:
        """Return the work in words, for the folder `path`; `who` names the process, before its lines."""
        rate = f"; {self.samples / self.seconds:.0f} samples/s" if self.samples else ""
        text = f"{who}shards: {self.made} written, {self.found} already finished{rate}\n"
        manifest = self.manifest
        if manifest is None:
            left = count_noun(self.missing, "shard")
            return f"{text}{who}{left} left to other processes, or to the same command run again"
        size, left_out = sum(each.size for each in manifest.shards), sum(manifest.bad.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in manifest.bad.items())
        bad = f", {left_out} left out ({kinds}; see {BAD_FILE})" if left_out else ""
        text += f"{path}: {count_noun(manifest.samples, 'sample')} in {count_noun(len(manifest.shards), 'shard')}, "
        text += f"{format_bytes(size)}{bad}"
        return f"{text}\n{self.note}" if self.note else text


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
        file = path / SETTINGS_FILE
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = sorted(each.name for each in path.iterdir())
            found = [name for name in names if name not in (_RECORDS, _CLAIMS) and name[0] != "."]
            if found and not file.exists():  # looked for now: another process writes it before others
                raise ConfigError(
                    f"{layout.option}: {path} has no {SETTINGS_FILE}, but contains {', '.join(found[:5])}; expected an "
                    f"empty folder or one that `{layout.command}` began"
                )
            for folder in (_RECORDS, _CLAIMS):
                (path / folder).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{layout.option}: {path}: cannot be made ({error.strerror}); expected a new folder"
            ) from None
        if not file.exists():
            write_file_once(file, self._json({"items": items, "settings": self.settings}))
        try:  # in any case: another process may have written it first
            there = read_versioned(file, layout.versions, f"run `{layout.command}` into a new folder")["settings"]
        except (CheckpointError, OSError) as error:
            raise ConfigError(f"{layout.option}: {error}") from None
        if lines := [*describe_differences(there, self.settings, "there").values()]:
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ConfigError(
                f"{layout.option}: {path} was begun with other settings; name another folder, or give the same ones:\n"
                + "\n".join(lines[:_SHOWN])
                + more
            )

    @classmethod
    def existing(cls, path: Path, layout: FolderLayout, in_cache: bool = False) -> Self | None:
        """Open a folder that was begun, with the settings in it; None if there is none, or they are damaged.

        Args:
            path: the folder.
            layout: its names and versions.
            in_cache: remove a folder with damaged settings, so that it is made again.
        """
        try:
            todo = "it is made again" if in_cache else f"run `{layout.command}` into a new folder"
            found = read_versioned(path / SETTINGS_FILE, layout.versions, todo)
            return cls(path, found["settings"], found["items"], layout)
        except FileNotFoundError:
            return None
        except (CheckpointError, OSError, KeyError) as error:
            logger.warning("%s%s", error, "; it is made again" if in_cache else "")
            if in_cache and not isinstance(error, OSError):
                shutil.rmtree(path, ignore_errors=True)
            return None

    def file(self, item: int) -> Path:
        """Return the path of an item's file."""
        return self.path / f"{item:0{self.layout.digits}d}{self.layout.suffix}"

    def record_path(self, item: int) -> Path:
        """Return the path of an item's record."""
        return self.path / _RECORDS / f"{item:05d}.json"

    def claim(self, items: Iterable[int] | None = None, wait: bool = False) -> Iterator[int]:
        """Yield the items that nobody has finished, each while this process claims it; see `arrange` for their order.

        Args:
            items: numbers of the items wanted; None: all.
            wait: go on until all of them are finished, also those that other processes are making.
        """
        items = range(self.items) if items is None else items
        left = self.arrange(item for item in items if self.record(item) is None)
        while left:
            busy = []
            for item in left:
                path = self.path / _CLAIMS / f"{item:05d}"
                lock = ProcessLock(path)
                try:
                    is_busy = lock.try_acquire() is not None
                except OSError as error:
                    raise DataError(f"{path}: cannot be locked ({error.strerror})") from None
                if is_busy:
                    lock.release()
                    busy.append(item)
                    continue
                try:
                    if self.record(item) is None:  # another process may have finished it meanwhile
                        yield item
                finally:
                    with contextlib.suppress(PermissionError):  # another user's, in a folder with the sticky bit
                        path.unlink(missing_ok=True)
                    lock.release()
            left = [item for item in busy if self.record(item) is None] if wait else []
            if left:
                progress.heartbeat()
                time.sleep(_WAIT_S)

    def arrange(self, items: Iterable[int]) -> list[int]:
        """Return items in the order in which this process takes them: a random one while other machines take some.

        Locks of other machines may not be seen here; so few items are made twice.
        """
        arranged = [*items]
        for path in (self.path / _CLAIMS).glob("*"):
            with contextlib.suppress(OSError):  # its item has just been finished
                holder = path.read_text(errors="replace").strip()
                if holder and not holder.endswith(f" on {socket.gethostname()}"):
                    random.Random(os.urandom(8)).shuffle(arranged)
                    break
        return arranged

    def add_record(
        self, item: int, file: FileDigest, samples: int, bad: Iterable[Any] = (), **facts: Any
    ) -> ItemRecord:
        """Record a finished item.

        Args:
            item: its number.
            file: digest of its file, from `write_file`.
            samples: number of samples in it.
            bad: samples that cannot be used, with the keys of `BadRecord`.
            **facts: JSON values that the record keeps.
        """
        record = ItemRecord(
            settings=self.digest,
            item=item,
            name=self.file(item).name,
            file=file,
            samples=samples,
            bad=tuple(BadRecord.model_validate(each) for each in bad),
            facts=facts,
        )
        write_file(self.record_path(item), self._json(record.model_dump(mode="json")))
        return record

    def record(self, item: int, verify: bool = False) -> ItemRecord | None:
        """Return the record of an item whose file is there with its size; None if it has to be made.

        Args:
            item: its number.
            verify: read the file, and compare its checksum; the record of one that is damaged is removed. Otherwise
                that is done where the file was written to after its record.
        """
        path, file = self.record_path(item), self.file(item)
        if not path.exists():
            return None
        try:
            record = read_checked(path, ItemRecord, self.layout.versions, "it is made again")
            if (record.settings, record.item, record.name) != (self.digest, item, file.name):
                raise CheckpointError(f"{path}: the record of another item or folder")
            if verify or Stamp.of(file).modified_ns > Stamp.of(path).modified_ns:
                verify_file(file, record.file, "its record")
                with contextlib.suppress(OSError):  # a read-only folder
                    os.utime(path)
            elif (size := file.stat().st_size) != record.file.size:
                raise CheckpointError(f"{file}: got {size} bytes, expected {record.file.size}")
            return record
        except FileNotFoundError:
            return None
        except (CheckpointError, OSError) as error:
            logger.warning("%s; it is made again", error)
        if verify:
            self.forget(item)
        return None

    def records(self) -> list[ItemRecord] | None:
        """Return the records of all items, in order; None while some are missing."""
        found = [record for item in range(self.items) if (record := self.record(item)) is not None]
        return found if len(found) == self.items else None

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

    def finish(self, records: Sequence[ItemRecord], bad_fraction: float, option: str) -> FolderManifest:
        """Write the manifest and the list of bad samples, and remove what killed processes have left.

        Args:
            records: those of all items.
            bad_fraction: largest share of samples that may be left out.
            option: option that sets it, for the message.

        Raises:
            DataError: more samples were left out; the message names some.
        """
        bad = [each for record in records for each in record.bad]
        samples = sum(record.samples for record in records)
        require_few_bad((each.reason for each in bad), len(bad), allowed_bad(bad_fraction, samples + len(bad)), option)
        manifest = FolderManifest(
            settings=self.settings,
            samples=samples,
            bad=_count_kinds(bad),
            shards=tuple(
                ManifestItem(
                    name=record.name, **record.file.model_dump(), samples=record.samples, bad=_count_kinds(record.bad)
                )
                for record in records
            ),
        )
        lines = "".join(json.dumps(each.model_dump(), sort_keys=True) + "\n" for each in bad)
        for name, data in ((BAD_FILE, lines.encode()), (MANIFEST_FILE, self._json(manifest.model_dump(mode="json")))):
            path = self.path / name
            if not path.exists() or path.read_bytes() != data:
                write_file(path, data)
        self.remove_leftovers()
        return manifest

    def remove_leftovers(self) -> None:
        """Remove unfinished files of killed processes, and the claims if every item is finished."""
        for folder in (self.path, self.path / _RECORDS):
            remove_leftovers(folder)
        if not self.missing():
            for path in (self.path / _CLAIMS).glob("*"):
                with contextlib.suppress(OSError):  # another user's file
                    path.unlink()

    def _json(self, body: Mapping[str, Any]) -> bytes:
        return add_checksum({**self.layout.versions, **body})


def _count_kinds(bad: Iterable[BadRecord]) -> dict[str, int]:
    return dict(sorted(Counter(each.kind for each in bad).items()))


def require_room(folder: Path, size: int, remedy: str) -> None:
    """Raise DataError if the disk of a folder, which may be missing, has no room for so many bytes."""
    disk = shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists()))
    if disk.total and size > disk.free:  # some file systems do not tell
        raise DataError(
            f"{folder} has room for {format_bytes(disk.free)}, and about {format_bytes(size)} are needed; {remedy}"
        )
