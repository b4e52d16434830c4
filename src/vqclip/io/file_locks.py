"""Locks on open files. They end with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["hold_lock", "is_at", "try_lock"]


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


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock on the file `path` and hold it; meant for work of milliseconds."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
