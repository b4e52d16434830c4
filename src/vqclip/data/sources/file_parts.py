"""Index of image files in parts: size, modification time and SHA-256 of every file.

Any rank can index a part; a file that is missing has the size -1.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vqclip.data.arrays import load_arrays, save_arrays
from vqclip.data.remote import display_url, local_path, protocol_of
from vqclip.data.sources.file_table import FileTable, checksum, versions
from vqclip.data.sources.reader import MAX_IMAGE_BYTES
from vqclip.errors import DataError
from vqclip.io.files import open_regular
from vqclip.process import progress

__all__ = ["MISSING", "FilePart", "PartIndex", "cut_path", "files_of", "skip_next_check"]

logger = logging.getLogger("vqclip.data")

MISSING = -1
"""Size of a file that could not be read."""
_HEARTBEAT = 200
"""Files between two signs of life."""
_SHOWN = 200
"""Characters of a path in messages."""

_checked: set[Path] = set()
"""Indexes that all ranks together have just compared with their files, so that `build` need not repeat it."""


def skip_next_check(parts: Iterable[object]) -> None:
    """Let the next `build` rely on the indexes of these parts: every rank has just checked some of them."""
    _checked.update(part.file for part in parts if isinstance(part, FilePart))


@dataclass(frozen=True)
class FilePart:
    """Some rows of a table, whose files are indexed together."""

    table: FileTable
    root: Path
    second: str
    """Ending of the caption file beside each image; "" without one."""
    start: int
    stop: int
    name: str
    file: Path
    """Its index in the cache."""

    def __str__(self) -> str:
        return f"{self.name}: images {self.start} to {self.stop}"

    def prepare(self, cache: Path | None = None) -> None:
        """Index the files unless they are indexed and unchanged."""
        self.load()

    def load(self) -> PartIndex:
        """Return the index of the files, after indexing those that have changed since.

        Raises:
            DataError: a file is written to while it is read, or the cache cannot be written.
        """
        paths = checksum(self.table.paths.span(self.start, self.stop), self.second.encode())
        facts = {**versions(self.name), "paths": paths}
        found = load_arrays(self.file, facts, self.name, lambda _, arrays: PartIndex(**arrays))
        fresh = found is not None and self.file in _checked
        _checked.discard(self.file)
        if fresh and found is not None:
            return found
        index = found or PartIndex.empty(self.stop - self.start, 2 if self.second else 1)
        changed = index.update(self)
        if changed or found is None:
            arrays = {"sizes": index.sizes, "modified_ns": index.modified_ns, "digests": index.digests}
            save_arrays(self.file, facts, arrays, self.name)
            logger.info("indexed %s: %d image files of samples %d to %d", self.name, changed, self.start, self.stop - 1)
        return index

    def files(self, index: int) -> list[str]:
        """Return the files of a row: the image, and that of the captions if there is one.

        Raises:
            DataError: the row's path is not allowed.
        """
        return files_of(self.table.paths[index], self.root, self.second)


@dataclass(frozen=True)
class PartIndex:
    """Size, modification time and checksum of the files of some rows."""

    sizes: np.ndarray
    """``(rows, files)`` int64: bytes; -1 for a file that could not be read."""
    modified_ns: np.ndarray
    """``(rows, files)`` int64."""
    digests: np.ndarray
    """``(rows, files, 32)`` uint8: SHA-256."""

    @classmethod
    def empty(cls, rows: int, files: int) -> PartIndex:
        """Return an index of files that have not been read yet."""
        shape = (rows, files)
        unknown = np.full(shape, MISSING - 1, np.int64)
        return cls(unknown, unknown.copy(), np.zeros((*shape, 32), np.uint8))

    def update(self, part: FilePart) -> int:
        """Read the files whose size or time differs from the index; return the number of their rows."""
        changed = set()
        states = np.stack([self.sizes, self.modified_ns], axis=-1).tolist()  # lists are faster to index
        for row, former in enumerate(states):
            if row % _HEARTBEAT == 0:
                progress.heartbeat()
            try:
                files = part.files(part.start + row)
            except DataError:  # it is reported when the sample is read
                files = [""] * len(former)
            for column, file in enumerate(files):
                if _stat(file) != former[column]:
                    changed.add(row)
                    self.sizes[row, column], self.modified_ns[row, column], digest = _hash(file)
                    self.digests[row, column] = np.frombuffer(digest, np.uint8)
        return len(changed)


def _stat(path: str) -> list[int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return [MISSING, 0]
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else [MISSING, 0]


def _hash(path: str) -> tuple[int, int, bytes]:
    """Return size, time and SHA-256 of a file; one that is too large to be used is not read, a missing one has -1."""
    try:
        with open_regular(Path(path)) as file:
            before = os.fstat(file.fileno())
            digest = hashlib.sha256(file.read() if before.st_size <= MAX_IMAGE_BYTES else b"")
            after = os.fstat(file.fileno())
    except (OSError, ValueError):
        return MISSING, 0, bytes(32)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path}: was written to while it was indexed; start again when it is complete")
    return before.st_size, before.st_mtime_ns, digest.digest()


def files_of(text: str, root: Path, second: str) -> list[str]:
    """Return the image that a path names, and the caption file beside it if ``second`` is its ending.

    Raises:
        DataError: the path is empty, a URL, or leaves the folder.
    """
    if not text:
        raise DataError("the path of the image is empty", "missing member")
    protocol = protocol_of(text)
    if protocol not in (None, "file"):
        raise DataError(
            f"{display_url(text)}: a URL; expected a file on this machine (img2dataset downloads tables of URLs)", "URL"
        )
    path = text if protocol is None else local_path(text)
    path = os.path.normpath(path) if os.pardir in path else path
    if path.split(os.sep, 1)[0] == os.pardir:
        raise DataError(
            f"{cut_path(text)}: leaves the folder {root}, which relative paths refer to; write the absolute path, or "
            "set images to another folder",
            "path outside",
        )
    image = os.path.join(root, path)
    return [image, os.path.splitext(image)[0] + second] if second else [image]


def cut_path(text: str) -> str:
    """Return the beginning of a long path, for messages."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
