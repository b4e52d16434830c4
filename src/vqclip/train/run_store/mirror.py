"""A run folder at a URL, with a copy on the disk of rank 0."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from vqclip import checkpoint
from vqclip.checkpoint.folders import find_old
from vqclip.checkpoint.manifest import MANIFEST
from vqclip.data.remote import TransferConfig
from vqclip.data.remote.folder import RemoteFolder
from vqclip.errors import CheckpointError, ConfigError, StorageError
from vqclip.io.atomic import REPLACED, TEMPORARY, replace_folder, write_file
from vqclip.io.files import read_bounded
from vqclip.process.lock import LOCK_FILES
from vqclip.train.run_store.lease import LEASES, Lease

logger = logging.getLogger(__name__)

_RUN = "run.json"
"""Random name of the run, at the URL and in the copy: a copy with another one is of another run."""
_DISK = ".disk-id"
"""Random name of the copy, for the lease."""
CHECKPOINTS = "checkpoints"
_OWN = (_DISK, *LOCK_FILES)
"""Files of the copy that stay there."""
_LEFT_OUT = (*_OWN, _RUN, CHECKPOINTS, "wandb")
"""Parts of the copy that are not uploaded with the files; wandb uploads its own."""
_NOTES = ("stopped.json", "best.json")
"""Files that a resumed run may remove."""
_MOST = 1 << 20
_LAST_S = 20.0
"""Longest time for each of the last files of a run that an error has ended."""


class RunMirror:
    """Run folder at a URL; what is there counts, and the folder on this disk is a copy of it.

    Both have the same files with the same names, so that a tool that copies folders from the store gives a run folder.
    A checkpoint is at the URL as soon as its manifest is, which is written last and removed first. Only rank 0 has one.
    A context manager: it ends the lease, after uploading what an error has left.

    Args:
        url: of the run.
        folder: copy on this disk, locked by this job.
        options: retries and time limits of each transfer.
    """

    def __init__(self, url: str, folder: Path, options: TransferConfig):
        self.url, self._folder = url, folder
        self._remote = RemoteFolder(url, options, "run.remote")
        self._lease: Lease | None = None
        self._uploaded: dict[str, tuple[int, int] | None] = {}
        """Size and time of each file as it is at the URL; None where they are not known."""
        self._uploading = threading.Lock()

    def open(self) -> None:
        """Take the lease, and make the copy equal to the URL.

        Checkpoints of the copy that an interrupted job has not uploaded are uploaded now, if they follow the newest one
        at the URL. Checkpoints at the URL are fetched when they are needed.

        Raises:
            ConfigError: another job uses the folder, or the copy has checkpoints of another run.
            StorageError: the store cannot be read or written.
        """
        lease = Lease(self._remote, self._name_disk())
        lease.acquire()
        self._lease = lease
        same = self._compare_names()
        self._remove_unfinished()
        stored, local = self.checkpoints(), checkpoint.checkpoints(self._folder / CHECKPOINTS)
        if same and (not stored or self._equals(stored[-1])):
            self._uploaded = dict.fromkeys(name for name in self._remote.list() if name in _NOTES)
            for path in local:
                if not stored or checkpoint.step_of(path) > checkpoint.step_of(stored[-1]):
                    self._upload_unfinished(path)
        else:
            self._replace_copy()

    @property
    def is_open(self) -> bool:
        """True once the job has the lease."""
        return self._lease is not None

    def checkpoints(self) -> list[Path]:
        """Return the paths of all complete checkpoints at the URL in the copy, oldest first; they may not be there."""
        return complete_checkpoints(self._folder, self._remote.list(CHECKPOINTS))

    def fetch(self, path: Path) -> Path:
        """Fetch a checkpoint unless the copy has the same one intact, and return its path.

        Raises:
            CheckpointError: this disk has no room for it.
            StorageError: it cannot be fetched.
        """
        if self._equals(path) and _is_intact(path):
            return path
        base = f"{CHECKPOINTS}/{path.name}/"
        files = self._remote.list(base.rstrip("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(path.parent).free) < sum(files.values()):
            raise CheckpointError(
                f"{self._remote}/{base}: has {sum(files.values())} bytes, and {free} are free in {path.parent}; set "
                "VQCLIP_CACHE to a folder with more room"
            )
        size = sum(files.values()) / 1e9
        logger.info("fetching %s/%s (%.3g GB); all ranks wait, within run.timeout_s", self._remote, base, size)

        def fill(aside: Path) -> None:
            for name in files:
                self._remote.download(name, aside / name.removeprefix(base))

        replace_folder(path, fill)
        return path

    def upload_checkpoint(self, path: Path, keep_last: int, keep: Callable[[int], bool]) -> None:
        """Upload a checkpoint of the copy and the files of the run, then remove old ones at the URL.

        Args:
            path: the checkpoint.
            keep_last: number of checkpoints to keep, this one included.
            keep: whether to keep an older checkpoint, by its step.

        Raises:
            CheckpointError: it could not be uploaded, or another job has taken over the folder.
        """
        base = f"{CHECKPOINTS}/{path.name}"
        try:
            self.upload_files()  # those with the lines of its steps, and with the weights that it refers to
            if not self._equals(path):
                self._set_aside(base)
                for file in _files(path):
                    if file != MANIFEST:
                        self._remote.upload(f"{base}/{file}", path / file)
                self._require_lease()
                self._remote.upload(f"{base}/{MANIFEST}", path / MANIFEST)
            for old in find_old(self.checkpoints(), path, keep_last, keep):
                self._remove(f"{CHECKPOINTS}/{old.name}")
        except StorageError as error:
            raise CheckpointError(
                f"{self._remote}/{base}: the checkpoint could not be uploaded ({error}); it is in {path}, and older "
                "ones are untouched. The same command on this machine uploads it and continues"
            ) from error

    def upload_files(self) -> None:
        """Upload the files of the run that have changed, except its checkpoints, and remove those that are gone.

        Raises:
            CheckpointError: another job has taken over the folder.
            StorageError: one cannot be written.
        """
        with self._uploading:
            self._require_lease()
            for name in _files(self._folder, _LEFT_OUT):
                self._upload_file(name)
            for name in [name for name in self._uploaded if not (self._folder / name).exists()]:
                self._remote.remove(name)
                del self._uploaded[name]

    def set_aside_newer(self, step: int) -> None:
        """Rename checkpoints at the URL newer than ``step``, so that nothing resumes from them later."""
        for path in self.checkpoints():
            if checkpoint.step_of(path) > step:
                self._set_aside(f"{CHECKPOINTS}/{path.name}")

    def raise_if_lost(self) -> None:
        """Raise CheckpointError if another job has taken over the folder."""
        if self._lease is not None:
            self._lease.raise_if_lost()

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lease is None:
            return
        if isinstance(error, Exception) and not isinstance(error, CheckpointError | StorageError):
            self._remote = self._remote.with_limits(tries=1, total_s=_LAST_S)
            with contextlib.suppress(CheckpointError, StorageError):
                self.upload_files()
        self._lease.release()

    def _name_disk(self) -> str:
        path = self._folder / _DISK
        if not path.exists():
            write_file(path, secrets.token_hex(16).encode())
        return read_bounded(path, 64).decode(errors="replace")

    def _compare_names(self) -> bool:
        """Return whether copy and URL are of one run; name a new one."""
        path = self._folder / _RUN
        mine = read_bounded(path, _MOST) if path.exists() else None
        theirs = self._remote.read(_RUN)
        if mine != theirs and checkpoint.checkpoints(self._folder / CHECKPOINTS):
            raise ConfigError(
                f"run.folder: {self._folder} has checkpoints of another run than {self._remote}, or those of a run "
                "that was removed there. Remove this folder to continue with what is at the URL, or copy it there to "
                "restore the run"
            )
        if theirs is None:
            theirs = mine or json.dumps({"format": "vqclip-run", "name": secrets.token_hex(16)}).encode()
            self._remote.write(_RUN, theirs)
        same, self._name = mine == theirs, theirs
        return same

    def _replace_copy(self) -> None:
        """Remove the copy, and fetch the files of the run."""
        for path in self._folder.iterdir():
            if path.name not in _OWN:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        names = self._remote.list()
        self._remote.require_tree(names)
        for name in names:
            if name.split("/")[0] not in (LEASES, *_LEFT_OUT):
                self._remote.download(name, self._folder / name)
                self._uploaded[name] = _state(self._folder / name)
        write_file(self._folder / _RUN, self._name)  # last: a copy without it is replaced again

    def _upload_unfinished(self, path: Path) -> None:
        if _is_intact(path):
            logger.warning("%s: was not uploaded by the job that saved it; it is uploaded now", path)
            self.upload_checkpoint(path, keep_last=2**62, keep=lambda step: True)

    def _upload_file(self, name: str) -> None:
        try:
            state = _state(self._folder / name)
            if self._uploaded.get(name) != state:
                self._remote.upload(name, self._folder / name)
                self._uploaded[name] = state
        except (FileNotFoundError, StorageError):
            if (self._folder / name).exists():  # otherwise it was removed meanwhile
                raise

    def _require_lease(self) -> None:
        assert self._lease is not None, "not opened"
        self._lease.require()

    def _equals(self, path: Path) -> bool:
        """Return whether the copy of a checkpoint has the manifest of the one at the URL."""
        stored = self._remote.read(f"{CHECKPOINTS}/{path.name}/{MANIFEST}")
        return stored is not None and (path / MANIFEST).is_file() and read_bounded(path / MANIFEST, _MOST) == stored

    def _remove_unfinished(self) -> None:
        """Remove files of checkpoints without a manifest, which a killed job has left at the URL."""
        names = self._remote.list(CHECKPOINTS)
        complete = {name.rpartition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
        for name in names:
            if "/".join(name.split("/")[:2]) not in complete:
                self._remote.remove(name)

    def _set_aside(self, base: str) -> None:
        """Give a checkpoint at the URL a name that no run resumes from; nothing happens if there is none."""
        names = self._remote.list(base)
        if f"{base}/{MANIFEST}" in names:
            target = f"{CHECKPOINTS}/set-aside-{base.rpartition('/')[2]}-{secrets.token_hex(4)}"
            logger.warning("%s/%s: renamed to %s", self._remote, base, target)
            for name in names:
                self._remote.copy(name, f"{target}{name.removeprefix(base)}")
        self._remove(base)

    def _remove(self, base: str) -> None:
        """Remove a checkpoint at the URL: the manifest first, so that no part of it counts as one."""
        for name in (f"{base}/{MANIFEST}", *self._remote.list(base)):
            self._remote.remove(name)


def complete_checkpoints(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the paths in a copy of all checkpoints whose manifests are among the files at the URL, oldest first."""
    parts = [name.split("/") for name in names]
    found = {part[1] for part in parts if len(part) == 3 and part[0] == CHECKPOINTS and part[2] == MANIFEST}
    return checkpoint.sort_checkpoints(folder / CHECKPOINTS / name for name in found)


def _files(folder: Path, left_out: tuple[str, ...] = ()) -> list[str]:
    """Return the relative names of all plain files below a folder that are not being written."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name in left_out or path.name.startswith((TEMPORARY, REPLACED)) or path.is_symlink():
            continue
        if path.is_dir():
            found += [f"{path.name}/{name}" for name in _files(path)]
        elif path.is_file():
            found.append(path.name)
    return found


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_intact(path: Path) -> bool:
    try:
        checkpoint.verify(path)
    except CheckpointError as error:
        logger.warning("%s", error)
        return False
    return True
