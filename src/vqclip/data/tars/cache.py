"""A folder of chunks with a limit on bytes and files, shared by all processes of a machine.

- `<key>` is a complete chunk and is never written to again. Its last 16 bytes are a mark and the number of bytes before
  them: after a power cut a file may be shorter. It may be removed at any time; processes that have it open can still
  read it.
- `<key>.part` is being made by the process that holds its exclusive lock. It has its final size before its content is
  written. A process that dies releases its locks, so an unlocked part is a leftover.
- `ledger` has the sum of the sizes, and the number of files. Sizes are added before files are written. They are
  subtracted only when the limit is reached: then the files are counted, and removed, the least recently used first,
  until a twentieth of the limit is free. So the sum is never too small, also after a process was killed, and the folder
  is listed once in thousands of chunks, not for each.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vqclip.data.remote.retry import Deadline
from vqclip.errors import StorageError
from vqclip.io.file_locks import hold_lock, is_at, remove_unlocked, try_lock
from vqclip.io.files import order_of_use

__all__ = ["ChunkCache"]

_FILLED = 0.95
"""Part of the limit that is left in use when files are removed."""
_FILES = 1 << 18
"""Limit on the number of files."""
_MARK = b"vqchunk1"
_USED_S = 1.0
"""The time of the last use of a file is written at most so often."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class _Ledger(NamedTuple):
    size: int
    files: int


class ChunkCache:
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
        return int(self.limit * _FILLED)

    def open(self, key: str, make: Callable[[], bytes], deadline: Deadline) -> int:
        """Return a read-only descriptor of a chunk, after making it if it is missing; the caller closes it.

        Of the processes and threads that ask for one chunk at a time, one makes it and the others wait.

        Args:
            key: a name for a file, of letters, digits and hyphens; another content needs another key.
            make: returns the content. The file has 16 more bytes at the end.
            deadline: ends the waits for space and for another process that makes the same chunk.

        Raises:
            StorageError: the folder cannot be written, the chunk is larger than the cache, or waiting timed out.
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
                        f"{self.folder}: cannot be written ({error.strerror}); set VQCLIP_CACHE to a folder with "
                        "room, or lower remote.cache_gib"
                    ) from None
            if deadline.left < 0:
                raise StorageError(
                    f"{path}.part: another process has been fetching this chunk for {deadline.total_s:g} s "
                    "(remote.total_s); is it stuck?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def remove(self, key: str) -> None:
        """Remove a chunk, so that a damaged one is made again."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / key).unlink()

    def _find_or_make(self, path: Path, make: Callable[[], bytes], deadline: Deadline) -> int | None:
        """Open or make a chunk; None while another process makes it."""
        if (file := self._find(path)) is not None:
            return file
        with self._claim(path) as part:
            if part is None:
                return None
            file = self._find(path)  # another process may have finished it just before the lock
            return self._make(path, part, make, deadline) if file is None else file

    def _find(self, path: Path) -> int | None:
        """Open a complete chunk; None if it is missing or cut short."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        status = os.fstat(file)
        size = status.st_size - len(_footer(0))
        if size < 0 or os.pread(file, len(_footer(0)), size) != _footer(size):
            os.close(file)
            return None
        if abs(time.time() - status.st_mtime) > _USED_S:  # also a time in the future, from a wrong clock
            _mark_used(file)
        return file

    @contextlib.contextmanager
    def _claim(self, path: Path) -> Iterator[int | None]:
        """Hold the lock of a chunk's part, and remove the part unless it became the chunk; None if another holds it."""
        part = path.with_name(f"{path.name}.part")
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not (try_lock(file) and is_at(file, part)):
                yield None
                return
            try:
                yield file
            finally:
                if is_at(file, part):
                    part.unlink()
        finally:
            os.close(file)

    def _make(self, path: Path, part: int, make: Callable[[], bytes], deadline: Deadline) -> int:
        data = make()
        footer = _footer(len(data))
        self._reserve(path, part, len(data) + len(footer), deadline)
        for block, at in ((data, 0), (footer, len(data))):
            view = memoryview(block)
            while view:
                count = os.pwrite(part, view, at)
                view, at = view[count:], at + count
        _mark_used(part)
        name = path.with_name(f"{path.name}.part")
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.replace(name, path)
        except BaseException:
            os.close(file)
            raise
        return file

    def _reserve(self, path: Path, part: int, size: int, deadline: Deadline) -> None:
        """Give a part its final size, after removing other files if the limit is reached."""
        if size > self.limit:
            raise StorageError(
                f"{path}: the chunk has {size} bytes, and the cache may take {self.limit} "
                f"(remote.cache_gib={self.limit / 2**30:g}): not fetched"
            )
        while True:
            with hold_lock(self.folder / "lock"):
                used = self._read()
                if used is None or used.size + size > self.limit or used.files >= _FILES:
                    used = self._shrink(size)
                if used.size + size <= self.limit:
                    self._write(_Ledger(used.size + size, used.files + 1))
                    os.ftruncate(part, size)
                    return
                self._write(used)
            if deadline.left < 0:
                raise StorageError(
                    f"no room for {size} bytes in {self.folder}, after {deadline.spent:.1f} s of remote.total_s="
                    f"{deadline.total_s:g}: other processes fill it. Raise remote.cache_gib, or use fewer data.workers"
                )
            time.sleep(_LONGEST_PAUSE_S)

    def _read(self) -> _Ledger | None:
        """Return what the ledger says; None if it is missing or damaged."""
        with contextlib.suppress(OSError, struct.error):
            mark, *numbers = struct.unpack("<8sQQ", (self.folder / "ledger").read_bytes())
            return _Ledger(*numbers) if mark == _MARK else None
        return None

    def _write(self, used: _Ledger) -> None:
        file = os.open(self.folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(file, struct.pack("<8sQQ", _MARK, *used), 0)
        finally:
            os.close(file)

    def _shrink(self, more: int) -> _Ledger:
        """Count the files, and remove leftovers and the least recently used files until `more` bytes are free."""
        whole: list[tuple[int, int, str]] = []
        size = files = 0
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # a part that became a chunk, or was discarded
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".part"):
                    if remove_unlocked(Path(entry.path)):
                        continue
                elif entry.name in ("ledger", "lock"):
                    continue
                else:
                    whole.append((order_of_use(status.st_mtime_ns), status.st_size, entry.path))
                size, files = size + status.st_size, files + 1
        if size + more > self.limit or files >= _FILES:
            for _, each, path in sorted(whole):
                if size + more <= self.room and files < _FILES * _FILLED:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                size, files = size - each, files - 1
        return _Ledger(size, files)


def _footer(size: int) -> bytes:
    return struct.pack("<8sQ", _MARK, size)


def _mark_used(file: int) -> None:
    with contextlib.suppress(PermissionError):  # another user's file; at worst it is removed too early
        now = time.time_ns()  # the file system's own clock ticks some hundred times a second
        os.utime(file, ns=(now, now))
