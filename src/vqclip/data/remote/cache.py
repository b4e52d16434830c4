"""A folder of fetched shards, bounded in bytes, that all processes of a machine share.

`<hash of the URL>-<hash of the content>.tar` is a whole shard, and is never written to. `<hash of the URL>.part` is
being fetched by whoever holds its lock, and has the size that it will have, so that what is on its way counts too. A
shard is in use while somebody has it open under a shared lock. A process that dies lets go of its locks: a part that
nobody holds is rubbish.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vqclip.data.remote.deadline import Deadline
from vqclip.errors import StorageError
from vqclip.io.file_locks import hold_lock, is_at, try_lock
from vqclip.io.files import sync_folder

__all__ = ["Held", "Part", "ShardCache"]

_POLL_S = 0.05
_STEP = 64 << 20
"""Bytes made room for at a time where the server does not say how many will come."""


class Held(NamedTuple):
    """A whole shard that is not removed until its descriptor is closed."""

    file: int
    """A descriptor under a shared lock."""
    sha256: str
    """Hash of its content."""


class ShardCache:
    """Opens shards of the cache, and lets them be fetched when they are not there.

    Args:
        folder: made on first use.
        limit: bytes that all files in it may take.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit

    def open(self, key: str, sha256: str | None, fill: Callable[[Part], None], deadline: Deadline) -> Held:
        """A whole shard, fetched if it is not there.

        Args:
            key: hash of its URL.
            sha256: hash of the content that is wanted; None takes any.
            fill: writes the shard into a `Part`, when it is not there. What it wrote is opened, whatever its hash.
            deadline: of the waits for another process that fetches the same shard, and for room.

        Raises:
            StorageError: as `fill`; or the folder cannot be written, or the waits were in vain.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                found = self._find(key, sha256)
                if found is None and (part := self._begin(key, deadline)) is not None:
                    found = self._finish(part, sha256, fill)
                if found is not None:
                    return found
                if deadline.left < 0:
                    raise StorageError(
                        f"{self.folder}/{key}.part: another process has been fetching this shard for "
                        f"{deadline.total_s:g} s (remote.total_s); is it stuck?"
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            raise StorageError(
                f"{self.folder}: cannot be written ({error.strerror}); set VQCLIP_CACHE to a folder with room, or "
                "lower remote.cache_gib"
            ) from None

    def remove(self, key: str) -> None:
        """Removes what is there of a shard and not in use."""
        with hold_lock(self.folder / "lock"):
            for path in self.folder.glob(f"{key}-*.tar"):
                _remove_unused(path)

    def make_room(self, part: Part, size: int) -> None:
        """Grows a part to `size` bytes, after removing others: rubbish first, then the least recently used.

        Raises:
            StorageError: it is larger than the cache, or what is in use leaves no room for it.
        """
        if size > self.limit:
            raise StorageError(
                f"has {size} bytes or more, and the cache may take {self.limit} (remote.cache_gib="
                f"{self.limit / 2**30:g}): not fetched"
            )
        while True:
            with hold_lock(self.folder / "lock"):
                if self._remove(size - part.size, part.path):
                    part.grow(size)
                    return
            if part.deadline.left < 0:
                raise StorageError(
                    f"no room for {size} bytes in {self.folder}, after {part.deadline.spent:.1f} s of remote.total_s="
                    f"{part.deadline.total_s:g}: all else in it is in use. Raise remote.cache_gib, or use fewer "
                    "data.workers"
                )
            time.sleep(_POLL_S)

    def _remove(self, more: int, keep: Path) -> bool:
        """Whether `more` bytes fit now."""
        files: list[tuple[bool, int, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a part that became a shard
                status = path.stat()
                files.append((path.suffix != ".part", status.st_atime_ns, status.st_size, path))
        over = sum(size for _, _, size, _ in files) + more - self.limit
        for is_whole, _, size, path in sorted(files):
            if path != keep and path.suffix in (".part", ".tar") and (over > 0 or not is_whole):
                over -= size if _remove_unused(path) else 0
        return over <= 0

    def _find(self, key: str, sha256: str | None) -> Held | None:
        for path in sorted(self.folder.glob(f"{key}-{sha256 or '*'}.tar")):
            try:
                file = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            fcntl.flock(file, fcntl.LOCK_SH)  # whoever holds it otherwise is about to remove it, or has just made it
            if is_at(file, path):
                with contextlib.suppress(PermissionError):  # another user's; then it is merely removed too early
                    os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))
                return Held(file, path.stem.rpartition("-")[2])
            os.close(file)
        return None

    def _begin(self, key: str, deadline: Deadline) -> Part | None:
        """The part of a shard, if nobody else holds it."""
        path = self.folder / f"{key}.part"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if try_lock(file) and is_at(file, path):
            return Part(self, path, file, deadline)
        os.close(file)
        return None

    def _finish(self, part: Part, sha256: str | None, fill: Callable[[Part], None]) -> Held:
        try:
            found = self._find(part.path.stem, sha256)  # another may have come to its end between two looks
            if found is None:
                fill(part)
                return part.seal()
        except BaseException:
            part.discard()
            raise
        part.discard()
        return found


class Part:
    """A shard on its way into the cache.

    Args:
        cache: where it belongs.
        path: the file that grows.
        file: its descriptor, exclusively locked.
        deadline: of its waits.
    """

    def __init__(self, cache: ShardCache, path: Path, file: int, deadline: Deadline):
        self._cache, self.path, self._file, self.deadline = cache, path, file, deadline
        self.restart()

    def restart(self) -> None:
        """Throws away what is there."""
        os.ftruncate(self._file, 0)
        self.size = self.written = 0
        self._digest = hashlib.sha256()

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes in all; see `ShardCache.make_room`."""
        self._cache.make_room(self, size)

    def grow(self, size: int) -> None:
        """Takes up so many bytes on the disk."""
        if size > self.size:
            os.posix_fallocate(self._file, 0, size)
            self.size = size

    def write(self, block: bytes) -> None:
        """Appends bytes, with more room where needed."""
        needed = self.written + len(block)
        if needed > self.size:
            self.reserve(max(needed, min(self.size + _STEP, self._cache.limit)))
        for start in range(0, len(block), 1 << 20):
            self._write(block[start : start + (1 << 20)])
        self._digest.update(block)

    def _write(self, data: bytes) -> None:
        while data:
            count = os.pwrite(self._file, data, self.written)
            self.written += count
            data = data[count:]

    def seal(self) -> Held:
        """Puts the shard into the cache under its name."""
        sha256 = self._digest.hexdigest()
        os.ftruncate(self._file, self.written)
        os.fsync(self._file)
        os.utime(self._file)  # used now, not when the first byte came: else it would be the first to go
        os.replace(self.path, self.path.with_name(f"{self.path.stem}-{sha256}.tar"))
        sync_folder(self.path.parent)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        return Held(self._file, sha256)

    def discard(self) -> None:
        """Removes what was fetched."""
        if is_at(self._file, self.path):  # else it has become a shard
            self.path.unlink()
        os.close(self._file)


def _remove_unused(path: Path) -> bool:
    """Removes a file that nobody has locked; whether it is gone."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        unused = try_lock(file) and is_at(file, path)
        if unused:
            path.unlink()
        return unused
    finally:
        os.close(file)
