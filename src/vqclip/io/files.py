"""Find, open and write files safely, and wait until they are on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vqclip.errors import CheckpointError, ConfigError, DataError

PICKLED = (*(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".npy", ".npz", ".h5"), ".msgpack")
"""Endings of files of weights that could run code, or that nothing here reads; they are named, and never opened."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Names of models on the hub: ``owner/name``."""
OF_SYSTEMS = frozenset(
    {"__MACOSX", "@eaDir", "@tmp", "@Recycle", "#recycle", "#snapshot", "$RECYCLE.BIN", "System Volume Information"}
    | {"lost+found", "Thumbs.db", "desktop.ini"}
)
"""Files and folders that systems and disks leave behind."""
_MAX_VISITS = 1000
"""Paths through symbolic links to one folder; links to links could make their number astronomical."""


class Stamp(NamedTuple):
    """Size and time of the last change of a file; while both stay, its content counts as unchanged."""

    size: int
    """Bytes."""
    modified_ns: int

    @classmethod
    def of(cls, file: int | str | Path) -> Stamp:
        """Return the stamp of a path or descriptor; raises OSError if there is no such file."""
        status = os.stat(file)
        return cls(status.st_size, status.st_mtime_ns)


def cache_folder() -> Path:
    """Return the folder of indexes and drawn data: environment variable VQCLIP_CACHE, else ~/.cache/vqclip."""
    try:
        return Path(os.environ.get("VQCLIP_CACHE") or Path.home() / ".cache" / "vqclip")
    except RuntimeError:
        raise ConfigError("no folder for the cache: this user has no home folder; set VQCLIP_CACHE or HOME") from None


def expand_home(path: str | Path) -> Path:
    """Return a path with ``~`` replaced by the home folder; that of an unknown user stays, so that no file is found."""
    return Path(os.path.expanduser(path))


def find_folder(name: str | Path, revision: str | None, fetched: Sequence[str], left: Sequence[str] = ()) -> Path:
    """Return a local folder, or fetch a model on the hub into the hub's cache.

    Args:
        name: a folder, or a hub name ``owner/name``; an existing folder has precedence.
        revision: branch, tag or commit on the hub; None for the newest.
        fetched: patterns of the names of files to fetch.
        left: patterns of files among them that are not fetched.

    Raises:
        CheckpointError: neither exists, the hub cannot be reached, or a revision of a local folder is given.
    """
    path = expand_home(name)
    if path.exists() or not HUB_NAME.fullmatch(str(name)) or str(name).startswith("."):
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: no such folder; expected a folder that save_pretrained wrote, or the name owner/name of a "
                "model on the hub"
            )
        if revision is not None:
            raise CheckpointError(
                f"{name}: got revision {revision!r} of a local folder, expected none: only models on the hub have any"
            )
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                str(name), revision=revision, allow_patterns=list(fetched), ignore_patterns=list(left) or None
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" (revision {revision!r})"
        beside = ""
        with contextlib.suppress(OSError):
            others = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
            beside = f"; {path.parent} has {', '.join(others[:10])}" if others else ""
        raise CheckpointError(
            f"{name}{at}: neither a local folder nor a model on the hub that can be reached or is in its cache: "
            f"{type(error).__name__}: {error}; without a network, load it once on a machine with one, or copy the "
            f"folder{beside}"
        ) from error


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


def walk_files(
    folder: Path, *, hidden: bool = False, visit: Callable[[Path], object] = lambda path: None
) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, sorted, those of a folder before those of its subfolders.

    A link to a folder that contains it is skipped, and what systems leave behind.

    Args:
        folder: the folder.
        hidden: yield hidden files too, and enter hidden folders.
        visit: called with each folder before it is listed.

    Raises:
        DataError: a folder cannot be listed, or symbolic links lead to it in more than 1,000 ways.
    """
    left: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    visits = Counter[tuple[int, int]]()
    while left:  # not recursive: crafted folders are deeper than Python's stack
        relative, above = left.pop()
        here = folder / relative
        try:
            status = os.stat(here)
            identity = status.st_dev, status.st_ino
            if identity in above:
                continue
            visits[identity] += 1
            if visits[identity] > _MAX_VISITS:
                raise DataError(f"{here}: symbolic links lead to it in more than {_MAX_VISITS} ways; remove some")
            visit(here)
            names = sorted({name for name in os.listdir(here) if hidden or name[0] != "."} - OF_SYSTEMS)
        except OSError as error:
            raise DataError(f"{here}: cannot be read: {error.strerror}") from None
        inside = {name for name in names if os.path.isdir(here / name)}
        yield from (f"{relative}{name}" for name in names if name not in inside)
        left += [(f"{relative}{name}/", above | {identity}) for name in reversed(names) if name in inside]


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
    """Wait until the list of a folder's entries is on the disk; skipped where the system cannot do it or refuses."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # the last: it may not be listed
            raise


def format_bytes(size: float, binary: bool = False) -> str:
    """Return a number of bytes with three digits: 256 MB; in units of 1024 if ``binary``: 244 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB") if binary else ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit[0] == "P":
            return f"{size:,.3g} {unit}"
        size /= 1024 if binary else 1000
    raise AssertionError


def write_tar(file: BinaryIO, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write samples in their order, as pairs of a key and its members (ending → content), by webdataset.

    Equal samples make equal bytes: headers contain no time, user or machine.
    """
    from webdataset import TarWriter  # imports torch

    with TarWriter(file, user="", group="", mode=0o644, encoder=False, mtime=0) as tar:
        for key, members in samples:
            tar.write({"__key__": key, **members})
