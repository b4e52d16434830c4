"""A run folder in an object store, with a copy on rank 0's disk.

    start:  what is at the URL counts; the copy gets its files, and its newest whole checkpoint unless it has that;
            the job writes its name to the URL
    save:   another job's name there ends this one; a checkpoint is written to the copy  ->  uploaded, manifest last
            ->  old ones are removed, manifest first

So a checkpoint at the URL is whole as soon as its manifest is there. The names are those of a local run folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from vqclip import checkpoint
from vqclip.checkpoint import MANIFEST, find_old, set_aside
from vqclip.data.remote.files import RemoteFolder, require_writable
from vqclip.data.remote.retry import TransferConfig
from vqclip.data.work_folder import require_room
from vqclip.errors import CheckpointError, ConfigError, StorageError
from vqclip.io.atomic import REPLACED, TEMPORARY, replace_folder
from vqclip.io.files import Stamp, format_bytes, read_bounded
from vqclip.process.lock import LOCK_FILES

logger = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"
_JOB = "job.txt"
"""Name of the job that started last, at the URL alone."""
_STACKS = "stacks"
"""Stacks of a hang, after which nothing is uploaded: the copy keeps its own."""
_LEFT_OUT = (*LOCK_FILES, _CHECKPOINTS, _JOB, "wandb")
"""Parts of the copy that are not uploaded with the files; wandb uploads its own."""
_MAX_MANIFEST = 1 << 20
"""Bytes of a manifest."""
_LAST_S = 20.0
"""Longest time for each of the last files of a run that an error has ended."""


class RunMirror:
    """Run folder at a URL, and its copy on this disk; only rank 0 has one.

    A context manager: it uploads what an error has left.

    Args:
        url: of the run. One job at a time may write to it.
        folder: the copy, locked by this job.
        options: retries and time limits of each transfer.
    """

    def __init__(self, url: str, folder: Path, options: TransferConfig):
        self._folder = folder
        self._remote = RemoteFolder(url, options, "run.remote")
        self._uploaded: dict[str, Stamp] = {}
        self._job = f"process {os.getpid()} on {socket.gethostname()}, started at {time.time_ns() / 1e9:.9f}".encode()
        self._is_claimed = False
        """True once the run at the URL is this job's: before, nothing is uploaded."""

    def open(self) -> None:
        """Make the copy equal to the URL. Checkpoints are fetched when they are needed.

        Raises:
            ConfigError: the copy has checkpoints, and the URL has nothing.
            StorageError: the store cannot be read or written.
        """
        names, local = self._remote.list(), checkpoint.checkpoints(self._folder / _CHECKPOINTS)
        if local and not names:
            raise ConfigError(
                f"run.folder: {self._folder} has checkpoints of the run, and {self._remote} has none. Remove this "
                "folder to start over, or copy it there to restore the run"
            )
        stored = {path.name for path in self.checkpoints(names)}
        for path in local:
            if path.name not in stored:
                set_aside(path, f"is not at {self._remote}, from which the run continues")
        for path in self._folder.iterdir():
            if path.name not in (*_LEFT_OUT, _STACKS):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        tops = {name: name.split("/")[0] for name in names}
        wanted = [name for name in names if tops[name] not in _LEFT_OUT]
        wanted = [name for name in wanted if tops[name] != _STACKS or not (self._folder / name).exists()]
        size = format_bytes(sum(names[name] for name in wanted))
        logger.info("%s: fetching its %d files (%s)", self._remote, len(wanted), size)
        for name in wanted:
            self._remote.download(name, self._folder / name)
        self._uploaded = {name: Stamp.of(self._folder / name) for name in wanted}

    def claim(self, done: int) -> None:
        """Write the name of this job to the URL, and upload its files; a job that started earlier ends at its next one.

        Args:
            done: steps after which this job continues; later checkpoints, damaged or of steps to repeat, are removed.

        Raises:
            StorageError: it cannot be written.
        """
        self._remote.write(_JOB, self._job)
        self._is_claimed = True
        for path in self.checkpoints():
            if checkpoint.step_of(path) > done:
                logger.warning("%s/%s/%s: removed", self._remote, _CHECKPOINTS, path.name)
                self._remove(path.name)
        self.upload_files()

    def checkpoints(self, names: Iterable[str] | None = None) -> list[Path]:
        """Return the paths in the copy of all whole checkpoints at the URL, oldest first; they may not be there.

        Args:
            names: of the files at the URL, if they are known.
        """
        parts = [name.split("/") for name in (self._remote.list(_CHECKPOINTS) if names is None else names)]
        found = {part[1] for part in parts if len(part) == 3 and part[0] == _CHECKPOINTS and part[2] == MANIFEST}
        return checkpoint.sort_checkpoints(self._folder / _CHECKPOINTS / name for name in found)

    def fetch(self, path: Path) -> Path:
        """Fetch a checkpoint unless the copy has the same one intact, and return its path.

        Raises:
            DataError: this disk has no room for it.
            StorageError: it cannot be fetched.
        """
        base, manifest = f"{_CHECKPOINTS}/{path.name}", path / MANIFEST
        if manifest.is_file() and read_bounded(manifest, _MAX_MANIFEST) == self._remote.read(f"{base}/{MANIFEST}"):
            try:
                return checkpoint.verify(path)
            except CheckpointError as error:
                logger.warning("%s", error)
        files = self._remote.list(base)
        path.parent.mkdir(parents=True, exist_ok=True)
        size = sum(files.values())
        require_room(path.parent, size, "set VQCLIP_CACHE to a folder with more room")
        logger.info("fetching %s/%s (%s); all ranks wait, within run.timeout_s", self._remote, base, format_bytes(size))

        def fill(aside: Path) -> None:
            for name in files:
                self._remote.download(name, aside / name.removeprefix(f"{base}/"))

        replace_folder(path, fill)
        return path

    def upload_checkpoint(self, path: Path, keep_last: int, keep: Callable[[int], bool]) -> None:
        """Upload a checkpoint of the copy and the files of the run, then remove old ones at the URL.

        Args:
            path: the checkpoint.
            keep_last: number of checkpoints to keep, this one included.
            keep: whether to keep an older checkpoint, by its step.

        Raises:
            CheckpointError: it could not be uploaded, or another job writes to the URL.
        """
        base = f"{_CHECKPOINTS}/{path.name}"
        try:
            self.upload_files()  # those with the lines of its steps, and with the weights that it refers to
            self._remove(path.name)
            for file in sorted(_files(path), key=lambda name: name == MANIFEST):
                if file == MANIFEST:
                    self._require_own()
                self._remote.upload(f"{base}/{file}", path / file)
            names = self._remote.list(_CHECKPOINTS)
            for old in find_old(self.checkpoints(names), path, keep_last, keep):
                self._remove(old.name)
            whole = {name.split("/")[1] for name in names if name.endswith(f"/{MANIFEST}")}
            for name in names:
                if name.split("/")[1] not in whole:
                    self._remote.remove(name)  # a killed job has left it
        except StorageError as error:
            raise CheckpointError(
                f"{self._remote}/{base}: the checkpoint could not be uploaded ({error}); it is in {path}, and older "
                "ones are untouched. The same command resumes from the newest one at the URL"
            ) from error

    def upload_files(self) -> None:
        """Upload the files of the run that have changed, except its checkpoints, and remove those that are gone.

        Raises:
            CheckpointError: another job has continued the run.
            StorageError: one cannot be written.
        """
        if not self._is_claimed:
            return
        self._require_own()
        names = _files(self._folder, _LEFT_OUT)
        for name in names:
            try:
                stamp = Stamp.of(self._folder / name)
                if self._uploaded.get(name) != stamp:
                    self._remote.upload(name, self._folder / name)
                    self._uploaded[name] = stamp
            except (FileNotFoundError, StorageError):
                if (self._folder / name).exists():  # otherwise it was removed meanwhile
                    raise
        for name in self._uploaded.keys() - set(names):
            self._remote.remove(name)
            del self._uploaded[name]

    def _require_own(self) -> None:
        if (job := self._remote.read(_JOB)) not in (None, self._job):
            other = job[:200].decode(errors="replace")
            raise CheckpointError(
                f"run.folder: another job ({other}) continues the run at {self._remote}; this one "
                f"({self._job.decode()}) writes nothing more to it"
            )

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError | StorageError):
            self._remote.options = self._remote.options.model_copy(update={"tries": 1, "total_s": _LAST_S})
            with contextlib.suppress(CheckpointError, StorageError):
                self.upload_files()

    def _remove(self, name: str) -> None:
        """Remove a checkpoint at the URL: the manifest first, so that no part of it counts as one."""
        base = f"{_CHECKPOINTS}/{name}"
        for each in (f"{base}/{MANIFEST}", *self._remote.list(base)):
            self._remote.remove(each)


def copy_run(url: str, folder: Path) -> Path:
    """Copy the run at a URL: its files and its newest checkpoint, verified.

    Args:
        url: of the run, such as ``s3://bucket/runs/base``.
        folder: to write; must not exist.

    Returns:
        The folder.

    Raises:
        ConfigError: no URL of an object store, or the folder exists or cannot be written.
        CheckpointError: there is no run, or no intact checkpoint.
        StorageError: it cannot be fetched.
    """
    if "://" not in (url := require_writable(url)):
        raise ConfigError(f"{url}: expected a URL of a run, such as s3://bucket/runs/base")
    if folder.exists():
        raise ConfigError(f"{folder}: exists; expected a new folder")
    options = TransferConfig(total_s=600.0)
    remote = RemoteFolder(url, options)
    names = remote.list()
    if "config.yaml" not in names:
        raise CheckpointError(
            f"{remote}: no run there: no config.yaml among {len(names)} files. Are the names of bucket, folder and run "
            "right?"
        )

    def fill(aside: Path) -> None:
        mirror = RunMirror(url, aside, options)
        mirror.open()
        checkpoint.use_latest(
            aside / _CHECKPOINTS, lambda path: checkpoint.verify(mirror.fetch(path)), mirror.checkpoints()
        )

    try:
        replace_folder(folder, fill)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); expected a new folder on a disk with room"
        ) from None
    return folder


def _files(folder: Path, left_out: Collection[str] = ()) -> list[str]:
    """Return the relative names of all plain files below a folder that are not being written, sorted."""
    found = []
    for place, folders, files in os.walk(folder):  # of what others remove meanwhile it says nothing
        paths = [Path(place, name) for name in files if not name.startswith((TEMPORARY, REPLACED))]
        found += [path.relative_to(folder).as_posix() for path in paths if path.is_file() and not path.is_symlink()]
        folders[:] = [name for name in folders if not name.startswith((TEMPORARY, REPLACED))]
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in left_out]
    return sorted(name for name in found if name not in left_out)
