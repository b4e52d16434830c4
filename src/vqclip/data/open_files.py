"""Shards of this machine that are kept open, since opening a file for each sample is slow on network disks."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

from vqclip.errors import StorageError

__all__ = ["OpenFiles"]


def _most_open_files() -> int:
    """Return a quarter of the files that this process may open, at most 1,024."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if allowed == resource.RLIM_INFINITY else max(1, min(1024, allowed // 4))


class OpenFiles:
    """Reads shards by `pread`, and keeps the recently used ones open.

    Works in several threads, after a fork and in spawned workers: reading does not move a file position, and files are
    opened on demand.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._most = _most_open_files()
        weakref.finalize(self, _close_all, self._files)  # `__del__` fails when the interpreter ends
        self._lock = threading.Lock()

    def read(self, path: Path, stamp: tuple[int, int], first: int, size: int, name: str) -> bytes:
        """Read bytes of a shard.

        Args:
            path: the shard.
            stamp: its size and modification time in nanoseconds when it was indexed.
            first: the first byte.
            size: number of bytes.
            name: for messages.

        Raises:
            StorageError: it cannot be read, or has changed (`kind` is then "changed shard").
        """
        try:
            with self._lock:
                file = os.dup(self._open(path, stamp, name))
            try:
                data = _pread(file, first, size)
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(f"{name}: cannot be read: {error.strerror}", "unreadable shard") from None
        if len(data) != size:
            raise StorageError(f"{name}: the shard became shorter while it was in use", "changed shard")
        return data

    def _open(self, path: Path, stamp: tuple[int, int], name: str) -> int:
        file = self._files.pop(path, None)
        if file is None:
            # Non-blocking: a pipe in place of the shard must not make the run wait.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(file)  # before every read, as the file may change while it is open
            if (status.st_size, status.st_mtime_ns) != stamp:
                raise StorageError(
                    f"{name}: the shard has changed since it was indexed; start the run again", "changed shard"
                )
        except BaseException:  # a stale handle of a network disk too: the next read opens the file again
            os.close(file)
            raise
        self._files[path] = file  # the last one used
        if len(self._files) > self._most:
            os.close(self._files.popitem(last=False)[1])
        return file

    def close(self) -> None:
        """Close the files; they are opened again on demand."""
        with self._lock:
            _close_all(self._files)

    def __getstate__(self) -> dict[str, object]:
        return {}  # descriptors are not valid in a spawned worker

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]


def _close_all(files: OrderedDict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _pread(file: int, first: int, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file; one call may return less, and at most 2 GiB."""
    data = os.pread(file, size, first)
    while 0 < len(data) < size and (more := os.pread(file, size - len(data), first + len(data))):
        data += more
    return data
