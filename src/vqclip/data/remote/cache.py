"""A folder of downloaded shards with a size limit, shared by all processes of a machine.

- `<hash of the URL>-<hash of the content>.tar` is a complete shard and is never written to again. It is in use while a
  process has it open under a shared lock.
- `<hash of the URL>.part` is being downloaded by the process that holds its exclusive lock. It has its final size from
  the beginning, so that unfinished downloads count towards the limit.

A process that dies releases its locks, so an unlocked part is a leftover.
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

from vqclip.data.remote.retry import Deadline, RemoteConfig
from vqclip.errors import StorageError
from vqclip.io.file_locks import hold_lock, is_at, remove_unlocked, try_lock
from vqclip.io.files import cache_folder, order_of_use, sync_folder

__all__ = ["CachedShard", "PartialShard", "ShardCache", "ShardInCache"]

_POLL_S = 0.05
_STEP = 64 << 20
"""Bytes reserved at a time when the server announces no size."""


class CachedShard(NamedTuple):
    """A complete shard, which is not removed until its descriptor is closed."""

    file: int
    """A descriptor under a shared lock."""
    sha256: str
    """Checksum of its content."""


class ShardCache:
    """The cache folder.

    Args:
        folder: created on first use.
        limit: largest size of all files in it, in bytes.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit

    def open(
        self, key: str, sha256: str | None, fill: Callable[[PartialShard], None], deadline: Deadline
    ) -> CachedShard:
        """Open a shard, after downloading it if it is missing.

        Args:
            key: hash of its URL.
            sha256: checksum of the wanted content; None accepts any.
            fill: writes a missing shard into a `PartialShard`. The result is opened even if its checksum differs.
            deadline: ends the waits for space and for another process that downloads the same shard.

        Raises:
            StorageError: from `fill`; or the folder cannot be written, or waiting timed out.
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
        """Remove a shard's files that are not in use."""
        if not self.folder.exists():
            return
        with hold_lock(self.folder / "lock"):
            for path in self.folder.glob(f"{key}-*.tar"):
                remove_unlocked(path)

    def make_room(self, part: PartialShard, size: int) -> None:
        """Grow a part to `size` bytes, after removing other files: leftovers first, then the least recently used.

        Raises:
            StorageError: it is larger than the cache, or the shards in use leave no space for it.
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
        """Remove files until `more` bytes fit; return whether they do."""
        files: list[tuple[bool, int, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a part that became a shard
                status = path.stat()
                files.append((path.suffix != ".part", order_of_use(status.st_atime_ns), status.st_size, path))
        over = sum(size for _, _, size, _ in files) + more - self.limit
        for is_whole, _, size, path in sorted(files):
            if path != keep and path.suffix in (".part", ".tar") and (over > 0 or not is_whole):
                over -= size if remove_unlocked(path) else 0
        return over <= 0

    def _find(self, key: str, sha256: str | None) -> CachedShard | None:
        for path in sorted(self.folder.glob(f"{key}-{sha256 or '*'}.tar")):
            try:
                file = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            fcntl.flock(file, fcntl.LOCK_SH)  # an exclusive lock is held only to remove the file or to finish it
            if is_at(file, path):
                with contextlib.suppress(PermissionError):  # another user's file; at worst it is removed too early
                    os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))
                return CachedShard(file, path.stem.rpartition("-")[2])
            os.close(file)
        return None

    def _begin(self, key: str, deadline: Deadline) -> PartialShard | None:
        """Return the part of a shard, locked; None while another process holds it."""
        path = self.folder / f"{key}.part"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if try_lock(file) and is_at(file, path):
            return PartialShard(self, path, file, deadline)
        os.close(file)
        return None

    def _finish(self, part: PartialShard, sha256: str | None, fill: Callable[[PartialShard], None]) -> CachedShard:
        try:
            found = self._find(part.path.stem, sha256)  # another process may have finished it just before the lock
            if found is None:
                fill(part)
                return part.seal()
        except BaseException:
            part.discard()
            raise
        part.discard()
        return found


class PartialShard:
    """A shard that is being downloaded.

    Args:
        cache: the cache that it belongs to.
        path: its file.
        file: descriptor of the file, exclusively locked.
        deadline: ends its waits.
    """

    def __init__(self, cache: ShardCache, path: Path, file: int, deadline: Deadline):
        self._cache, self.path, self._file, self.deadline = cache, path, file, deadline
        self.restart()

    def restart(self) -> None:
        """Discard the content."""
        os.ftruncate(self._file, 0)
        self.size = self.written = 0
        self._digest = hashlib.sha256()

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes in total; see `ShardCache.make_room`."""
        self._cache.make_room(self, size)

    def grow(self, size: int) -> None:
        """Allocate `size` bytes on the disk."""
        if size > self.size:
            os.posix_fallocate(self._file, 0, size)
            self.size = size

    def write(self, block: bytes) -> None:
        """Append bytes, and reserve more space if necessary."""
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

    def seal(self) -> CachedShard:
        """Give the complete shard its name in the cache."""
        sha256 = self._digest.hexdigest()
        os.ftruncate(self._file, self.written)
        os.fsync(self._file)
        os.utime(self._file)  # used now, not when the first byte came; otherwise it would be removed first
        os.replace(self.path, self.path.with_name(f"{self.path.stem}-{sha256}.tar"))
        sync_folder(self.path.parent)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        return CachedShard(self._file, sha256)

    def discard(self) -> None:
        """Remove the file."""
        if is_at(self._file, self.path):  # otherwise it has become a shard
            self.path.unlink()
        os.close(self._file)


class ShardInCache:
    """Base of shards whose tars are in the cache while they are used."""

    options: RemoteConfig

    @property
    def key(self) -> str:
        """Name in the cache."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove the copy in the cache, so that a damaged one is made again."""
        self._cache().remove(self.key)

    def _cache(self) -> ShardCache:
        return ShardCache(cache_folder() / "shards", self.options.cache_bytes)
