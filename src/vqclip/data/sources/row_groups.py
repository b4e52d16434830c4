"""Random access to the rows of Parquet files.

A file's facts (rows of each group, schema, SHA-256) are found out once and stored in the cache, as the index of a tar
is. A row is read by decoding its group, since pyarrow decodes nothing smaller at random; the last groups stay in
memory, up to a limit.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vqclip.data.libraries import name_errors, require_pyarrow
from vqclip.data.remote import GzipShard, RemoteShard
from vqclip.data.shard import Shard
from vqclip.data.sources.records import load_record
from vqclip.errors import DataError, StorageError, printable
from vqclip.io.files import open_regular

__all__ = ["ParquetFacts", "ParquetPart", "RowGroups", "read_schema"]

logger = logging.getLogger("vqclip.data")

_BATCH = 16
"""Rows that are decoded at a time, so that a group that is larger than its footer says is noticed early."""
_MAX_GROUP_BYTES = 2 << 30
"""Larger groups are refused: each process would hold one in memory."""
_WORTH_A_WARNING = 8 << 20
"""Size of a group whose decoding takes longer than that of an image."""
_FOOTERS = 64
"""Files whose footers stay in memory."""
_SUCCESS, _STATUS = "success", "status"
"""img2dataset keeps a row, without an image, for each failed download."""


@dataclass(frozen=True)
class ParquetFacts:
    """Facts about one Parquet file."""

    length: int
    """Size in bytes."""
    modified_ns: int
    """Modification time."""
    sha256: str
    """SHA-256 of the whole file."""
    schema: str
    """The schema in Arrow's form, base64."""
    rows: list[int]
    """Rows of each group."""
    sizes: list[int]
    """Decompressed bytes of each group."""
    skipped: list[int]
    """Rows that are left out: failed downloads of img2dataset."""


@dataclass(frozen=True)
class ParquetPart:
    """A Parquet file to prepare."""

    path: Shard

    def __str__(self) -> str:
        return str(self.path)

    def prepare(self, cache: Path | None = None) -> ParquetFacts:
        """Return the file's facts, after finding them out if they are missing or outdated.

        Raises:
            DataError: the file is missing, damaged or not Parquet, or pyarrow is not installed.
        """
        key = self.path.key if isinstance(self.path, RemoteShard) else str(self.path)
        return ParquetFacts(**load_record(f"parquet {key}", self._find_out, self._is_current, cache))

    def _is_current(self, facts: dict[str, Any]) -> bool:
        if not isinstance(self.path, Path):
            return True  # the server is not asked; see `RemoteShard.open`
        try:
            status = self.path.stat()
        except OSError as error:
            raise DataError(f"{self}: cannot be opened: {error.strerror}") from None
        return (status.st_size, status.st_mtime_ns) == (facts["length"], facts["modified_ns"])

    def _find_out(self) -> dict[str, Any]:
        try:
            return self._examine()
        except StorageError:
            raise
        except DataError:
            if isinstance(self.path, RemoteShard):
                self.path.discard()  # otherwise the next start would find the same damage
            raise

    def _examine(self) -> dict[str, Any]:
        _, parquet = require_pyarrow()
        try:
            stream = open_file(self.path)
        except OSError as error:
            raise DataError(f"{self}: cannot be opened: {error.strerror}") from None
        with stream:
            before = os.fstat(stream.fileno())
            digest = hashlib.sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
            stream.seek(0)
            with name_errors(f"{self}: cannot be read as Parquet; if it is cut, copy it again"):
                opened = parquet.ParquetFile(stream)
                facts = _describe(opened)
            after = os.fstat(stream.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(f"{self}: was written to while it was indexed; start again when it is complete")
        logger.info("indexed %s: %d rows", self, sum(facts["rows"]))
        return {"length": before.st_size, "modified_ns": before.st_mtime_ns, "sha256": digest.hexdigest(), **facts}


def _describe(opened: Any) -> dict[str, Any]:
    groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
    schema, skipped = opened.schema_arrow, []
    if {"key", _STATUS} <= set(schema.names) and str(schema.field(_STATUS).type) == "string":
        row = 0
        for batch in opened.iter_batches(columns=[_STATUS], use_threads=False):
            values = batch.column(0).to_pylist()
            skipped += [row + at for at, value in enumerate(values) if value != _SUCCESS]
            row += len(values)
    rows, sizes = [group.num_rows for group in groups], [group.total_byte_size for group in groups]
    if min(rows + sizes, default=0) < 0:
        raise ValueError("a negative number of rows or bytes")
    return {
        "schema": base64.b64encode(schema.serialize()).decode(),
        "rows": rows,
        "sizes": sizes,
        "skipped": skipped,
    }


def read_schema(facts: ParquetFacts) -> Any:
    """Return the pyarrow schema of a file."""
    arrow, _ = require_pyarrow()
    return arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(facts.schema)))


def open_file(path: Shard, facts: ParquetFacts | None = None) -> BinaryIO:
    """Open a file on this machine or at a URL; it must be as its facts say.

    Raises:
        OSError: it cannot be opened.
        StorageError: it cannot be fetched, or has changed.
    """
    if not isinstance(path, Path):
        return os.fdopen(path.open() if facts is None else path.open(facts.length, facts.sha256), "rb")
    stream = open_regular(path)
    status = os.fstat(stream.fileno())
    if facts is not None and (status.st_size, status.st_mtime_ns) != (facts.length, facts.modified_ns):
        stream.close()
        raise StorageError(f"{path}: the file has changed since it was indexed; start the run again", "changed shard")
    return stream


class _Group(NamedTuple):
    """A decoded row group."""

    size: int
    """Bytes."""
    batches: list[Any]
    """Its rows, 16 at a time."""


class RowGroups:
    """Reads rows of Parquet files by number, in any process, also after a fork.

    Files are open only while a group is decoded. Without threads of pyarrow, which a fork would lose.

    Args:
        paths: Parquet files, here or at URLs.
        memory: largest size in bytes of the decoded groups that stay in memory; the last one always does.
        cache: folder of the facts; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: a file is missing or damaged, or a group is larger than 2 GiB.
    """

    def __init__(self, paths: Sequence[Shard], memory: int, cache: Path | None = None):
        assert not any(isinstance(path, GzipShard) for path in paths)
        self.paths = list(paths)
        self.facts = [ParquetPart(path).prepare(cache) for path in paths]
        self._kept = [_kept_rows(facts) for facts in self.facts]
        self._counts = [sum(facts.rows) - len(facts.skipped) for facts in self.facts]
        self._ends = np.cumsum(self._counts, dtype=np.int64)
        self._starts = [np.cumsum([0, *facts.rows]) for facts in self.facts]
        self._memory = memory
        self._groups: OrderedDict[tuple[int, int], _Group] = OrderedDict()
        self._held = 0
        self._footers: OrderedDict[int, Any] = OrderedDict()
        self._columns: list[str] | None = None
        for path, facts in zip(paths, self.facts, strict=True):
            if max(facts.sizes, default=0) > _MAX_GROUP_BYTES:
                raise _too_large(path, max(facts.sizes))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def select(self, columns: Sequence[str]) -> None:
        """Set the columns to read."""
        self._columns = list(columns)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file and the row in it, skipped ones counted."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[file - 1]) if file else 0)
        kept = self._kept[file]
        return file, row if kept is None else int(kept[row])

    def name(self, index: int) -> str:
        """Return file and row, for messages."""
        file, row = self.locate(index)
        return printable(f"{self.paths[file]}: row {row}", one_line=True)

    def read(self, index: int) -> dict[str, Any]:
        """Return the values of one row by column.

        Raises:
            DataError: the file is damaged; the message names file, row and group.
            StorageError: the file cannot be read or fetched, or has changed.
        """
        file, row = self.locate(index)
        group = int(np.searchsorted(self._starts[file], row, side="right")) - 1
        try:
            found = self._group(file, group)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.name(index)}: cannot be read: {error.strerror}", "unreadable shard") from None
        except DataError as error:
            raise DataError(f"{self.name(index)}: {error}", error.kind) from None
        at = row - int(self._starts[file][group])
        batch = found.batches[at // _BATCH]
        try:
            return {name: batch.column(name)[at % _BATCH].as_py() for name in batch.schema.names}
        except Exception:
            with name_errors(f"{self.name(index)}: damaged"):
                raise

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """File name, size, samples and SHA-256 of every file."""
        return [
            {"name": path.name, "bytes": facts.length, "samples": count, "sha256": facts.sha256}
            for path, facts, count in zip(self.paths, self.facts, self._counts, strict=True)
        ]

    def warn_if_slow(self) -> None:
        """Log the price of random access if the groups are large and do not fit in memory."""
        sizes = [size for facts in self.facts for size in facts.sizes]
        total = sum(sizes)
        mean = total / max(len(sizes), 1)
        if total > self._memory and mean > _WORTH_A_WARNING:
            logger.warning(
                "%s: row groups of %.0f MiB on average, %.2f GiB in all, of which each process keeps %.0f MiB "
                "(memory_mib). Training reads in random order and decodes a whole group for nearly every sample: at "
                "1 GiB/s about %.3g samples a second and process. Write the data as shards (vqclip data pack), or with "
                "row groups of about 100 rows; reading in order is not affected",
                self.paths[0],
                mean / 2**20,
                total / 2**30,
                self._memory / 2**20,
                2**30 / mean,
            )

    def _group(self, file: int, group: int) -> _Group:
        found = self._groups.pop((file, group), None)
        self._held -= found.size if found else 0
        path, facts = self.paths[file], self.facts[file]
        if found is None or isinstance(path, Path):
            with open_file(path, facts) as stream:  # before every read, since the file may have changed
                if found is None:
                    found = self._decode(stream, file, group)
        self._groups[file, group] = found  # the most recently used is last
        self._held += found.size
        while len(self._groups) > 1 and self._held > self._memory:
            self._held -= self._groups.popitem(last=False)[1].size
        return found

    def _decode(self, stream: Any, file: int, group: int) -> _Group:
        _, parquet = require_pyarrow()
        batches: list[Any] = []
        size = 0
        with name_errors(f"row group {group} is damaged"):
            opened = parquet.ParquetFile(stream, metadata=self._footers.pop(file, None))
            self._footers[file] = opened.metadata
            if len(self._footers) > _FOOTERS:
                self._footers.popitem(last=False)
            reader = opened.iter_batches(_BATCH, [group], self._columns, use_threads=False)
            for batch in reader:
                batches.append(batch)
                size += batch.nbytes
                if size > _MAX_GROUP_BYTES:
                    raise _too_large(f"row group {group}", size)
        rows = self.facts[file].rows[group]
        if sum(len(batch) for batch in batches) != rows or any(len(b) != _BATCH for b in batches[:-1]):
            raise DataError(f"row group {group} has other rows than its footer says", "damaged shard")
        return _Group(size, batches)

    def __getstate__(self) -> dict[str, object]:
        # Decoded groups are not sent to a spawned worker.
        return {**self.__dict__, "_groups": OrderedDict(), "_footers": OrderedDict(), "_held": 0}


def _kept_rows(facts: ParquetFacts) -> np.ndarray | None:
    return np.delete(np.arange(sum(facts.rows)), facts.skipped) if facts.skipped else None


def _too_large(where: object, size: int) -> DataError:
    return DataError(
        f"{where}: a row group of {size / 2**30:.2f} GiB; at most {_MAX_GROUP_BYTES >> 30} GiB are decoded at once. "
        "Write the file again with smaller groups, such as pyarrow.parquet.write_table(..., row_group_size=100)",
        "row group too large",
    )
