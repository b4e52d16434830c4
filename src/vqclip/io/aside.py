"""Files that several processes may write at once, whole or not at all, and the clearing up after killed ones.

Each process writes under a name of its own and locks what it writes, so that a file that nobody locks is left over.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from vqclip.errors import ConfigError
from vqclip.io.file_locks import try_lock
from vqclip.io.files import TEMPORARY, named, sync_folder
from vqclip.io.sealed import Facts, facts_of

__all__ = ["clear", "put", "put_bytes", "put_first"]


def put(path: Path, fill: Callable[[BinaryIO], object]) -> Facts:
    """Make the file `path` from what `fill` writes, in one stroke, and wait until it is on the disk.

    Returns:
        Its size and hash, read back before it gets its name.
    """
    with _written(path, fill) as aside:
        facts = facts_of(aside)
        os.replace(aside, path)
    sync_folder(path.parent)
    return facts


def put_bytes(path: Path, data: bytes) -> None:
    """`put` for what is in memory."""
    put(path, lambda file: file.write(data))


def put_first(path: Path, data: bytes) -> None:
    """`put_bytes`, unless the file is there: of several processes one alone writes it, and the others leave it.

    Raises:
        ConfigError: the file system has no hard links, without which nobody can tell who was first.
    """
    with _written(path, lambda file: file.write(data)) as aside:
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be linked ({error.strerror}); expected a folder on a file system with hard links"
            ) from None
    sync_folder(path.parent)


def clear(folder: Path) -> None:
    """Remove what killed processes have left in a folder; what others still write stays."""
    for aside in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), aside.open("r+b") as file:  # gone, or held by its writer
            if try_lock(file.fileno()):
                aside.unlink()


@contextlib.contextmanager
def _written(path: Path, fill: Callable[[BinaryIO], object]) -> Iterator[Path]:
    """A file beside `path`, filled, on the disk and locked; gone at the end, if it still has that name."""
    aside, file = _opened(path)
    try:
        with named(path), file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            yield aside
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _opened(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        aside = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:12]}")
        file = open(aside, "xb")  # noqa: SIM115
        try:
            locked = try_lock(file.fileno())
        except OSError:  # the file system has no locks, and nothing is cleared
            return aside, file
        if locked and os.fstat(file.fileno()).st_nlink:  # else somebody clears up at this moment
            return aside, file
        file.close()
