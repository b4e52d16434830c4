"""Open files safely, and wait until they are on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PICKLED = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".npy", ".npz", ".h5"),
    ".msgpack",
)
"""Endings of files of weights that could run code, or that nothing here reads; they are named, and never opened."""


def expand_home(path: str | Path) -> Path:
    """Return a path with ``~`` replaced by the home folder; that of an unknown user stays, so that no file is found."""
    return Path(os.path.expanduser(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file. A pipe or device is never waited for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte, or half a character
        raise OSError(errno.EINVAL, f"no path of a file: {error}", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "Is a directory" if stat.S_ISDIR(mode) else "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """Return at most the first ``limit + 1`` bytes of a file: more than ``limit`` mean that the file is too large.

    Raises:
        OSError: it cannot be opened, or is not a regular file. A pipe or device is never waited for.
    """
    with open_regular(path) as file:
        return file.read(limit + 1)


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to system errors that lack one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the list of a folder's entries is on the disk; skipped on network file systems that cannot do it."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def format_bytes(size: float, binary: bool = False) -> str:
    """Return a number of bytes with three digits: 256 MB; in units of 1024 if ``binary``: 244 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB") if binary else ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit[0] == "P":
            return f"{size:,.3g} {unit}"
        size /= 1024 if binary else 1000
    raise AssertionError
