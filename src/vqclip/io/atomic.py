"""Write files and folders whole or not at all, verify them by size and SHA-256, and lock them.

    write to .tmp-<name>  ->  fsync  ->  rename to <name>  ->  fsync the parent folder

Several processes may write one file at once: each uses a temporary file of its own and locks it, so that an unlocked
temporary file is a leftover of a killed process. A folder has one writer at a time. Locks are on open files, and end
with the process that holds them, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import io
import logging
import os
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, TextIO

from pydantic import Field

from vqclip.errors import CheckpointError, ConfigError, encodable
from vqclip.io.files import name_file_in_errors, open_regular, sync, sync_folder
from vqclip.io.json_files import Strict

logger = logging.getLogger(__name__)


def try_lock(file: int, wait: bool = False) -> bool:
    """Take the exclusive lock on an open file; return False if another process or file object holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_if_possible(file: int, path: Path, wait: bool = False) -> bool:
    """Lock the file open at a path as `try_lock` does; without locks it counts as locked, with one warning a folder."""
    try:
        return try_lock(file, wait)
    except OSError as error:
        _warn_of_locks(path.parent, error.strerror)
        return True


@functools.cache
def _warn_of_locks(folder: Path, reason: str) -> None:
    logger.warning("%s: files in it cannot be locked (%s): make sure that only one job uses it", folder, reason)


def _open_lock(path: str | Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file to lock it; one of another user for reading alone."""
    try:
        return os.open(path, flags, 0o666)
    except PermissionError:
        if not os.path.exists(path):
            raise
        return os.open(path, flags & ~(os.O_RDWR | os.O_CREAT | os.O_APPEND))


def is_at(file: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def remove_unlocked(path: Path) -> bool:
    """Remove a file unless a process has locked it or that cannot be known; return whether it is gone."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(file) and is_at(file, path):
                path.unlink()
        finally:
            os.close(file)
    return not path.exists()


@contextlib.contextmanager
def hold_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Wait for the exclusive lock on the file `path`, or try to take it; yield whether it is held."""
    file = _open_lock(path)
    try:
        yield lock_if_possible(file, path, wait)
    finally:
        os.close(file)


_files = weakref.WeakSet[TextIO]()
"""Files of process locks. A forked child closes them: it would hold their locks beyond the death of this process."""
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])


def _open_no_link(name: str, flags: int) -> int:
    return _open_lock(name, flags | os.O_NOFOLLOW)


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
            OSError: the file cannot be opened, the disk is full, or it is a symbolic link.
        """
        if self._file is not None and not is_at(self._file.fileno(), self._path):
            if self._is_held:
                logger.warning("%s was deleted or replaced while this job held it", self._path)
            self.release()
        if self._is_held:
            return None
        if self._file is None:  # never through a link: the file it points at would be overwritten
            self._file = open(self._path, "a+", encoding="utf-8", opener=_open_no_link)  # noqa: SIM115
        file = self._file
        _files.add(file)
        self._is_held = lock_if_possible(file.fileno(), self._path)
        with name_file_in_errors(self._path):
            if not self._is_held:
                file.seek(0)
                return file.read(200).strip() or "its name is not in the file"
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_RDWR:  # another user's file cannot be written to
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
        return None

    def release(self) -> None:
        """Give the lock back, if it is held."""
        file, self._file, self._is_held = self._file, None, False
        if file is not None:
            file.close()


TEMPORARY = ".tmp-"
"""Prefix of the name of an unfinished file or folder."""
REPLACED = ".replaced-"
"""Prefix of the name of a folder that is being replaced."""
_CHUNK = 1 << 20


class FileDigest(Strict):
    """Size and SHA-256 of a file."""

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the whole file, in hexadecimal digits."""


def digest_file(path: Path) -> FileDigest:
    """Return the digest of a file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return _digest_open(file)


def _digest_open(file: BinaryIO, limit: int | None = None) -> FileDigest:
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK if limit is None else min(_CHUNK, limit + 1 - size)):
        digest.update(chunk)
        size += len(chunk)
    return FileDigest(size=size, sha256=digest.hexdigest())


def verify_file(path: Path, expected: FileDigest, source: str) -> None:
    """Compare a file with its digest in the file `source`.

    Raises:
        CheckpointError: it is missing, has another size, or differs in a single bit.
    """
    try:
        with open_regular(path) as file:
            verify_open_file(file, path, expected, source)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def verify_open_file(file: BinaryIO, path: Path, expected: FileDigest, source: str) -> None:
    """Read a file that is open at its beginning to its end, and compare it as `verify_file` does.

    Raises:
        CheckpointError: it has another size, or differs in a single bit.
        OSError: it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    if size != expected.size:
        raise CheckpointError(f"{path}: {size} bytes; {source} says {expected.size}: the file is damaged or cut short")
    actual = _digest_open(file, limit=expected.size).sha256  # no further, should it grow meanwhile
    if actual != expected.sha256:
        raise CheckpointError(f"{path}: SHA-256 {actual}; {source} says {expected.sha256}: the file is damaged")


def write_file(path: Path, content: bytes | Callable[[BinaryIO], object]) -> FileDigest:
    """Write a file atomically. A device or a pipe, which cannot be replaced, is written to directly.

    Args:
        path: the file; replaced if it exists. A link stays, and what it points to is replaced.
        content: its bytes, or a function that writes them to an open file.

    Returns:
        Its digest, read back before the file gets its name.
    """
    if path.exists() and not path.is_file():
        buffer = io.BytesIO()
        buffer.write(content) if isinstance(content, bytes) else content(buffer)
        with name_file_in_errors(path):
            path.write_bytes(buffer.getvalue())
        return FileDigest(size=len(buffer.getvalue()), sha256=hashlib.sha256(buffer.getvalue()).hexdigest())
    path = path.resolve() if path.is_symlink() else path
    with _temporary_file(path, content) as temporary:
        digest = digest_file(temporary)
        os.replace(temporary, path)
    sync_folder(path.parent)
    return digest


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically; bytes of names in it that are not UTF-8 become escapes."""
    write_file(path, encodable(text).encode())


def write_file_once(path: Path, content: bytes) -> None:
    """Write a file atomically unless it exists. If several processes try, exactly one succeeds.

    Raises:
        ConfigError: the file system has no hard links, which decide who was first.
    """
    with _temporary_file(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be linked ({error.strerror}); expected a folder on a file system with hard links"
            ) from None
    sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder; those still being written stay.

    It lists the folder, so it is called once for a job and not for every file.
    """
    for temporary in folder.glob(f"{TEMPORARY}*"):
        remove_unlocked(temporary)


@contextlib.contextmanager
def _temporary_file(path: Path, content: bytes | Callable[[BinaryIO], object]) -> Iterator[Path]:
    """Yield a temporary file beside `path`: written, on the disk, locked; removed at the end unless renamed."""
    while True:
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:12]}")
        file = open(temporary, "xb")  # noqa: SIM115
        try:
            # Otherwise another process just removed it as a leftover.
            is_mine = try_lock(file.fileno()) and os.fstat(file.fileno()).st_nlink > 0
        except OSError:  # the file system has no locks, so leftovers are never removed
            is_mine = True
        if is_mine:
            break
        file.close()
    try:
        with name_file_in_errors(path), file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Replace `target` by what `fill` writes into an empty folder beside it, and wait until it is on the disk.

    A link stays, and what it points to is replaced.
    If `fill` fails, the existing folder stays. A process killed between the two renames leaves the former folder as
    `.replaced-<name>` and the new one as `.tmp-<name>`; the next call, or `restore_folder`, restores the former.
    """
    restore_folder(target)
    target, temporary, former = _places(target)
    temporary.mkdir(parents=True)
    try:
        with name_file_in_errors(target):
            fill(temporary)
            for path in (*temporary.rglob("*"), temporary):
                if not path.is_symlink():
                    sync_folder(path) if path.is_dir() else sync(path)
        if target.exists():
            target.rename(former)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def make_once(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make a folder of the cache atomically unless it is there; other processes wait for the one that makes it.

    Args:
        folder: the folder.
        fill: writes its files into an empty folder.

    Raises:
        OSError: it cannot be written.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            replace_folder(folder, fill)


def require_replaceable(target: Path, mark: str, *others: str) -> None:
    """Check that `replace_folder` would not delete files of another kind.

    Args:
        target: missing, empty, or with the file `mark` and `others` alone.
        mark: file by which a folder of this kind is recognised.
        others: names of its other files, or patterns such as ``*.onnx``.

    Raises:
        ConfigError: it is a file, or contains other things.
    """
    if not target.exists():
        return
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else ["a file"]
    foreign = [name for name in names if not any(fnmatch.fnmatchcase(name, each) for each in (mark, *others))]
    if foreign or (names and mark not in names):
        found = ", ".join(foreign[:5] or names[:5])
        raise ConfigError(f"{target}: would be replaced, and contains {found}; expected a new folder")


def restore_folder(target: Path) -> None:
    """Clean up after a killed `replace_folder`: remove the unfinished folder, restore a missing `target`."""
    target, temporary, former = _places(target)
    if former.exists() and not target.exists():
        former.rename(target)
    for left in (temporary, former):
        if left.exists():
            remove_folder(left)


def remove_folder(folder: Path) -> None:
    """Remove a folder, renamed first: an interruption leaves no half of it under its name.

    Files that cannot be removed, such as another user's, are a warning; they stay in a folder named `TEMPORARY`...
    """
    doomed = folder.with_name(f"{TEMPORARY}removed-{folder.name}-{uuid.uuid4().hex[:12]}")
    try:
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("%s: cannot be removed: %s", folder, error)
        shutil.rmtree(doomed, ignore_errors=True)


def _places(target: Path) -> tuple[Path, Path, Path]:
    target = target.resolve() if target.is_symlink() else target
    return target, target.with_name(f"{TEMPORARY}{target.name}"), target.with_name(f"{REPLACED}{target.name}")
