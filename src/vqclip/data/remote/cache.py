"""The cache of chunks: a folder with a limit on bytes and files, shared by all processes of a machine.

- `<key>` is a complete file and is never written to again. It may be removed at any time; processes that have it open
  can still read it.
- `<key>.part` is being made by the process that holds its exclusive lock. It has its size before its content is
  written. A process that dies releases its locks, so an unlocked part is a leftover.
- `ledger` has the sum of the sizes. Sizes are added before files are written. They are subtracted only when the limit
  is reached: then the files are counted, and removed, the least recently used first, until a twentieth of the limit is
  free. So the sum is never too small, also after a process was killed, and the folder is listed once in thousands of
  files, not for each. Small files count as more than they have, which limits the number of files.

After a power cut a file may be damaged: readers compare checksums, and have it made again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vqclip.data.remote.retry import Deadline
from vqclip.errors import StorageError
from vqclip.io.atomic import hold_lock, is_at, lock_if_possible, remove_unlocked

FILLED = 0.95
"""Fraction of the limit that is left in use when files are removed."""
_FILES = 1 << 18
"""Limit on the number of files."""
_USED_S = 1.0
"""The time of the last use of a file is written at most so often."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class BoundedCache:
    """The folder.

    Args:
        folder: created on first use.
        limit: largest size of all files in it, in bytes.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit

    @property
    def room(self) -> int:
        """Bytes that are never removed as long as no more is used at a time."""
        return int(self.limit * FILLED)

    def open(self, key: str, make: Callable[[], bytes], deadline: Deadline) -> int:
        """Return a read-only descriptor of a file, after making it if it is missing; the caller closes it.

        Of the processes and threads that ask for one file at a time, one makes it and the others wait.

        Args:
            key: a name for a file, of letters, digits and hyphens; another content needs another key.
            make: returns the content.
            deadline: ends the waits for space and for another process that makes the same file.

        Raises:
            StorageError: the folder cannot be written, the file is larger than the cache, or waiting timed out.
        """
        path, pause = self.folder / key, _FIRST_PAUSE_S
        while True:
            try:
                if (file := self._find_or_make(path, make, deadline)) is not None:
                    return file
            except OSError as error:
                # The folder may be removed at any time; then it is made again.
                if not isinstance(error, FileNotFoundError) or deadline.left < 0:
                    raise StorageError(
                        f"{self.folder}: cannot be written ({error.strerror}); set VQCLIP_CACHE to another folder, "
                        "or lower remote.cache_gib"
                    ) from None
            if deadline.left < 0:
                raise StorageError(
                    f"{path}.part: another process has been fetching this file for {deadline.total_s:g} s "
                    "(remote.total_s); is it stuck?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def remove(self, key: str) -> None:
        """Remove a file, so that a damaged one is made again."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / key).unlink()

    def _find_or_make(self, path: Path, make: Callable[[], bytes], deadline: Deadline) -> int | None:
        """Open or make a file; None while another process makes it."""
        if (file := self._find(path)) is not None:
            return file
        with self._claim(path) as part:
            if part is None:
                return None
            file = self._find(path)  # another process may have finished it just before the lock
            if file is None:
                view, written = memoryview(make()), 0
                self._reserve(path, part, len(view), deadline)
                while written < len(view):
                    written += os.pwrite(part, view[written : written + (1 << 20)], written)
                _mark_used(part)
                os.replace(_part(path), path)
                file = self._find(path)  # None if it was removed at once
            return file

    def _find(self, path: Path) -> int | None:
        """Open a file, which a power cut may have damaged; None if it is missing."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if abs(time.time() - os.fstat(file).st_mtime) > _USED_S:  # also a time in the future, from a wrong clock
            _mark_used(file)
        return file

    @contextlib.contextmanager
    def _claim(self, path: Path) -> Iterator[int | None]:
        """Hold the lock of a part, and remove the part unless it became the file; None if another holds it."""
        part = _part(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not (lock_if_possible(file, part) and is_at(file, part)):
                yield None
                return
            try:
                yield file
            finally:
                if is_at(file, part):
                    part.unlink()
        finally:
            os.close(file)

    def _reserve(self, path: Path, part: int, size: int, deadline: Deadline) -> None:
        """Give a part its size, after removing other files if the limit is reached; the content is written later.

        Raises:
            StorageError: it is more than the cache may take, or other processes leave no room for it.
        """
        if size > self.limit:
            raise StorageError(
                f"{path}: has {size} bytes, and the cache may take {self.limit} (remote.cache_gib): raise it"
            )
        counted, ledger = self._count(size), self.folder / "ledger"
        while True:
            with hold_lock(ledger):
                try:
                    used = int(ledger.read_bytes())
                except ValueError:  # it is new or damaged
                    used = self.limit
                if used + counted > self.limit:
                    used = self._shrink(counted)
                has_room = used + counted <= self.limit
                ledger.write_text(str(used + counted * has_room))
                if has_room:
                    os.ftruncate(part, size)
                    return
            if deadline.left < 0:
                raise StorageError(
                    f"no room for {size} bytes in {self.folder}, after {deadline.spent:.1f} s of remote.total_s="
                    f"{deadline.total_s:g}: other processes fill it. Raise remote.cache_gib, or lower data.workers"
                )
            time.sleep(_LONGEST_PAUSE_S)

    def _count(self, size: int) -> int:
        """Return the bytes that a file of a size counts; a part that has no size yet counts nothing."""
        return max(size, self.limit // _FILES) if size else 0

    def _shrink(self, more: int) -> int:
        """Remove leftovers, and the least recently used files until `more` bytes are free; return the new sum."""
        whole: list[tuple[int, int, str]] = []
        used = 0
        for entry in os.scandir(self.folder):
            if entry.name == "ledger" or entry.name[0] == "." or entry.is_dir():  # such as .nfs1 or lost+found
                continue
            with contextlib.suppress(FileNotFoundError):  # a part that became a file, or was discarded
                status, is_part = entry.stat(follow_symlinks=False), entry.name.endswith(".part")
                if is_part and remove_unlocked(Path(entry.path)):
                    continue
                counted, time_ns = self._count(status.st_size), status.st_mtime_ns
                used += counted
                if not is_part:  # a minute ahead: by a clock that was wrong, so these are removed first
                    whole.append((time_ns - 2**64 * (time_ns > time.time_ns() + 60 * 10**9), counted, entry.path))
        if used + more > self.limit:
            for _, counted, path in sorted(whole):
                if used + more <= self.room:
                    break
                with contextlib.suppress(OSError):  # in use on NFS, or another user's
                    Path(path).unlink(missing_ok=True)
                    used -= counted
        return used


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _mark_used(file: int) -> None:
    with contextlib.suppress(PermissionError):  # another user's file; at worst it is removed too early
        now = time.time_ns()  # the file system's own clock ticks some hundred times a second
        os.utime(file, ns=(now, now))
