"""Files that several processes may write at once, whole or not at all, and the clearing up after killed ones.

Each process writes under a name of its own and locks what it writes, so that a file that nobody locks is left over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from vqclip.files import TEMPORARY, sync_folder
from vqclip.sealed import Facts, facts_of

__all__ = ["clear", "put", "put_bytes"]


def put(path: Path, fill: Callable[[BinaryIO], object]) -> Facts:
    """Make the file `path` from what `fill` writes, in one stroke, and wait until it is on the disk.

    Returns:
        Its size and hash, read back before it gets its name.
    """
    aside, file = _opened(path)
    try:
        with file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            facts = facts_of(aside)
            os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)
    return facts


def put_bytes(path: Path, data: bytes) -> None:
    """`put` for what is in memory."""
    put(path, lambda file: file.write(data))


def clear(folder: Path) -> None:
    """Remove what killed processes have left in a folder; what others still write stays."""
    for aside in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), aside.open("r+b") as file:  # gone, or held by its writer
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.unlink()


def _opened(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        aside = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:12]}")
        file = open(aside, "xb")  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # EAGAIN: somebody clears up at this moment. Else the file system has no locks, and nothing is cleared.
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return aside, file
        if os.fstat(file.fileno()).st_nlink:
            return aside, file
        file.close()
