"""Files and folders that are on the disk whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vqclip.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY = ".tmp-"
"""How the name of what is not finished begins."""
REPLACED = ".replaced-"
"""How the name of a folder begins that is being replaced."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is no regular file; a pipe or device is never waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "Is a directory" if stat.S_ISDIR(mode) else "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """The first ``limit + 1`` bytes of a file at most: more than ``limit`` of them mean that it is too large.

    Raises:
        OSError: it cannot be opened, or is no regular file; a pipe or device is never waited for.
    """
    with open_regular(path) as file:
        return file.read(limit + 1)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the system that name no file, such as that of a full disk, get the name of what is being written."""
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
    """`sync` for a folder, which some network file systems cannot do at all; they are let off."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_text(path: Path, text: str) -> None:
    """Put `text` into the file `path` in one stroke."""
    aside = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with named(path):
            aside.write_text(text, encoding="utf-8")
            sync(aside)
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write with safetensors' ``save_file`` as a file of the usual mode: it makes them for their owner alone."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file as save

    path.touch()  # the umask, and the folder's default access list, say which mode that is
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save(tensors, path, metadata=metadata)
    except SafetensorError as error:  # a full disk, as it comes out of the library
        raise OSError(f"{path}: cannot be written: {error}") from error
    path.chmod(mode)


def replace_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Make `target` from what `fill` writes into an empty folder beside it, and wait until it is on the disk.

    If `fill` fails, what was there stays. A process killed between the two renames leaves the former folder under
    `.replaced-<name>`, and the new one under `.tmp-<name>`; the next call, or `restore_folder`, puts the former back.
    """
    restore_folder(target)
    aside, former = _beside(target)
    aside.mkdir(parents=True)
    try:
        with named(target):
            fill(aside)
            _sync_tree(aside)
        if target.exists():
            target.rename(former)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def require_replaceable(target: Path, mark: str) -> None:
    """Refuse to let `replace_folder` take away what is not ours.

    Args:
        target: is missing, empty, or holds the file `mark`.
        mark: by which a folder of its kind is known.

    Raises:
        ConfigError: it is a file, or holds other things.
    """
    if target.is_dir() and ((target / mark).is_file() or not any(target.iterdir())):
        return
    if target.exists():
        found = ", ".join(sorted(path.name for path in target.iterdir())[:5]) if target.is_dir() else "a file"
        raise ConfigError(f"{target}: would be replaced, and holds no {mark} but {found}; expected a new folder")


def restore_folder(target: Path) -> None:
    """Finish what a killed `replace_folder` left: what is half made goes, and a missing `target` comes back."""
    aside, former = _beside(target)
    if aside.exists():
        shutil.rmtree(aside)
    if former.exists():
        shutil.rmtree(former) if target.exists() else former.rename(target)


def _beside(target: Path) -> tuple[Path, Path]:
    return target.with_name(f"{TEMPORARY}{target.name}"), target.with_name(f"{REPLACED}{target.name}")


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync_folder(path) if path.is_dir() else sync(path)
