"""Locks on open files. They end with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from vqclip.io.files import name_file_in_errors

logger = logging.getLogger(__name__)


def open_lock(path: Path) -> TextIO:
    """Open a file to lock it; make it if it is missing.

    Raises:
        OSError: it cannot be opened, or is a symbolic link: the file it points at would be overwritten.
    """
    return open(path, "a+", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def try_lock(file: int) -> bool:
    """Take the exclusive lock on an open file; return False if another process or file object holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(file: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def remove_unlocked(path: Path) -> bool:
    """Remove a file unless a process has locked it; return whether it is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if unused := try_lock(file) and is_at(file, path):
            path.unlink()
        return unused
    finally:
        os.close(file)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock on the file `path` and hold it; meant for work of milliseconds."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


_files = weakref.WeakSet[TextIO]()
"""Files of process locks. A forked child closes them: it would hold their locks beyond the death of this process."""
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])


class ProcessLock:
    """Lock of this process on a file, which its children do not inherit; it names its holder in the file.

    Not lockf, whose lock ends when this process closes any other descriptor of the file, as after reading or copying
    it. On a file system without locks it logs a warning, and the lock counts as taken.

    Args:
        path: the file; it stays when the lock is released.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: TextIO | None = None
        self._is_held = False

    def try_acquire(self) -> str | None:
        """Take the lock, unless it is still held; return its holder if another process has it, else None.

        Raises:
            OSError: the file cannot be opened or written to, or is a symbolic link.
        """
        if self._file is not None and not is_at(self._file.fileno(), self._path):
            if self._is_held:
                logger.warning("%s was deleted or replaced while this job held it", self._path)
            self.release()
        if self._is_held:
            return None
        file = self._file = self._file or open_lock(self._path)
        _files.add(file)
        try:
            self._is_held = try_lock(file.fileno())
        except OSError as error:
            logger.warning("%s cannot be locked (%s): make sure that only one job uses it", self._path, error.strerror)
            self._is_held = True
            return None
        with name_file_in_errors(self._path):
            if not self._is_held:
                file.seek(0)
                return file.read(200).strip() or "its name is not in the file"
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        return None

    def release(self) -> None:
        """Give the lock back, if it is held."""
        file, self._file, self._is_held = self._file, None, False
        if file is not None:
            file.close()
