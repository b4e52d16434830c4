"""Base of sources whose rows are read by another library: Hugging Face's `datasets`, torchvision.

The samples themselves are digested, in blocks that the ranks divide among themselves, since the files of the library
depend on its version and the place. The digests are stored in the cache; `Rows.identity` decides whether they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vqclip.data.sources.base import NumberedSource, RawSample
from vqclip.data.sources.records import load_record
from vqclip.errors import DataError, StorageError, printable
from vqclip.process import progress

__all__ = ["Block", "RowSource", "Rows", "divide", "stamp"]

BLOCK = 2000
"""Rows that are digested by one rank at a time, and become one token shard."""
_HEARTBEAT = 200
"""Rows between two signs of life."""


class Rows(Protocol):
    """Rows of another library as samples."""

    classnames: tuple[str, ...]
    templates: tuple[str, ...]
    identity: str
    """Text that differs if the samples may differ: settings, and sizes and times of files."""
    content: str | None
    """Text that stands for all samples, which are then not read in advance; None: they are digested."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __str__(self) -> str:
        """Return the name of the data, for messages."""
        ...

    def read(self, index: int, name: str) -> RawSample:
        """Return the sample of a row; raises DataError, with ``name``, if it is bad."""
        ...


@dataclass(frozen=True)
class Block:
    """Rows that are digested together."""

    rows: Rows
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.rows}: rows {self.start} to {self.stop}"

    def prepare(self, cache: Path | None = None) -> dict[str, Any]:
        """Return the number of bytes of the block's images and the digest of its samples, from the cache if possible.

        Raises:
            DataError: the cache cannot be written.
            StorageError: a row cannot be fetched.
        """
        if self.rows.content is not None:
            return {"bytes": 0, "sha256": hashlib.sha256(f"{self.rows.content} {self.start}".encode()).hexdigest()}
        return load_record(f"rows {self.start} {self.stop} {self.rows.identity}", self._digest, cache=cache)

    def _digest(self) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0
        for index in range(self.start, self.stop):
            if index % _HEARTBEAT == 0:
                progress.heartbeat()
            try:
                sample = self.rows.read(index, "")
            except StorageError:
                raise
            except DataError as error:  # it is reported when the sample is read
                sample = RawSample(b"", (error.kind,), -2)
            parts = [sample.image, *(caption.encode() for caption in sample.captions), str(sample.label).encode()]
            digest.update("".join(f"{len(part)} " for part in parts).encode() + b"\n")
            for part in parts:
                digest.update(part)
            size += len(sample.image)
        return {"bytes": size, "sha256": digest.hexdigest()}


def divide(rows: Rows) -> list[Block]:
    """Divide rows into blocks."""
    return [Block(rows, start, min(start + BLOCK, len(rows))) for start in range(0, len(rows), BLOCK)]


def stamp(paths: Sequence[str | Path]) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of files; raises StorageError for a missing one."""
    found = []
    for path in paths:
        try:
            status = Path(path).stat()
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}", "unreadable file") from None
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return found


class RowSource(NumberedSource):
    """A `Source` of the rows of another library.

    Args:
        rows: the rows.
        kind: kind of the source, for the fingerprint.
        cache: folder of the digests; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, rows: Rows, kind: str, cache: Path | None = None):
        if not len(rows):
            raise DataError(f"{rows}: has no rows")
        self.rows, self._kind = rows, kind
        self.classnames, self.templates = rows.classnames, rows.templates
        self.shards = []
        for number, block in enumerate(divide(rows)):
            facts = block.prepare(cache)
            name = f"{kind}-{number:05d}"
            self.shards.append({"name": name, "samples": block.stop - block.start, **facts})

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one row; see `Source.read`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.rows.read(index, self.name(index))

    def name(self, index: int) -> str:
        """Return data set and row, for messages."""
        return printable(f"{self.rows}: row {index}", one_line=True)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; of the samples, so neither the place nor the version of the library counts."""
        return {"kind": self._kind, "samples": len(self), "sha256": self.sha256}
