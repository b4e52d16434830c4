"""Source of the rows of Parquet files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple

from pydantic import model_validator

from vqclip.data.lookup import name_errors, require_pyarrow
from vqclip.data.remote import RemoteShard, is_tar, protocol_of
from vqclip.data.shard import Part, Shard
from vqclip.data.sources.base import FolderContent, OpensSource, Source
from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.files import FileSourceConfig
from vqclip.data.sources.listing import Columns, Row, is_split, list_images
from vqclip.data.sources.packed import Piece, StreamSample, stamp
from vqclip.data.sources.paths import find_shards
from vqclip.data.sources.table import (
    RowParser,
    TableColumns,
    TableConfig,
    find_columns,
    group_rows,
    image_path,
    is_base64,
    kind_of,
    parse_groups,
    read_batch,
    read_classes,
    require_allowed,
)
from vqclip.errors import ConfigError, DataError, printable
from vqclip.io.files import open_regular

__all__ = ["ParquetConfig", "ParquetFile", "ParquetStream"]

_ENDINGS = (".parquet",)
_BATCH = 16
"""Rows that are decoded at a time; a few, since an image may have 64 MiB."""
_PIECE_BYTES, _PIECE_ROWS = 128 << 20, 10_000
"""A piece ends with the row group that makes it so large."""
_SUCCESS, _STATUS = "success", "status"
"""img2dataset keeps a row, without an image, for each failed download."""


class ParquetConfig(TableConfig):
    """Parquet files with a row for each image, or each caption: the bytes, path or URL, and captions or class.

    The layout of img2dataset is found out; rows of its failed downloads are left out. The rows are packed once into
    tars in the cache; images whose paths are in the rows are read where they are.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"parquet": _ENDINGS}

    kind: Literal["parquet"] = "parquet"
    """Parquet files."""
    path: str | tuple[str, ...]
    """A file, a folder of *.parquet, a pattern such as train-{00000..00041}.parquet or train-*.parquet, or a list of
    these. URLs (file, s3, gs, az, hf, http, https) work the same way; with http and https every file must be named, or
    written with braces."""

    @model_validator(mode="after")
    def _has_something_to_read(self) -> ParquetConfig:
        if not self.path:
            raise ValueError("path: got nothing; expected a folder, a file or a pattern")
        return self

    @property
    def has_classes(self) -> bool | None:
        """Return whether images have classes; None if the columns of the files decide."""
        return False if self.captions else True if self.label else None

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether there are Parquet files and no tars, beside which img2dataset writes tables of metadata."""
        return any(name.endswith(_ENDINGS) for name in content.files) and not any(map(is_tar, content.files))

    def files(self) -> list[Shard]:
        """Return the Parquet files; raises DataError if there are none, or one is missing."""
        return find_shards([self.path] if isinstance(self.path, str) else self.path, self.remote, _ENDINGS)

    @property
    def is_packed(self) -> bool:
        """Return whether the rows are packed; otherwise they name image files."""
        return self._image_files() is None

    def identity(self) -> dict[str, Any]:
        """See `PackedConfig.identity`; a file at a URL counts by its URL."""
        files = [[path.key] if isinstance(path, RemoteShard) else stamp([str(path)])[0] for path in self.files()]
        return {**self.settings(), "path": None, "files": files}

    def open_stream(self) -> ParquetStream:
        """See `PackedConfig.open_stream`."""
        return ParquetStream(self)

    def pieces(self) -> Sequence[Part]:
        """See `PackedConfig.pieces`; none if the rows name image files."""
        return () if self._image_files() else super().pieces()

    def shards(self) -> Sequence[Any]:
        """See `SourceConfigBase.shards`."""
        images = self._image_files()
        return images.shards() if images else super().shards()

    def in_chunks(self, chunk: int) -> OpensSource:
        """See `SourceConfigBase.in_chunks`."""
        return self._image_files() or super().in_chunks(chunk)

    def build(self, cache: Path | None = None) -> Source:  # type: ignore[override]
        """Open the files, after packing what is missing."""
        images = self._image_files()
        return images.build(cache) if images else super().build(cache)

    def _image_files(self) -> ParquetFiles | None:
        """Return the image files that the rows name; None if images or URLs are in the rows.

        The first row with either decides, if the images are a column of text.
        """
        if self._opened is not None:  # they are being packed
            return None
        for path in self.files():
            with ParquetFile(path).open() as (opened, _):
                columns = find_columns(opened.schema_arrow, self, str(path))
                if kind_of(opened.schema_arrow.field(columns.image).type) != "text":
                    return None
                for batch in opened.iter_batches(_BATCH, columns=[columns.image], use_threads=False):
                    for row in read_batch(batch):
                        value = None if isinstance(row, DataError) else image_path(row[columns.image])
                        if value is None:
                            continue
                        if is_base64(value):
                            return None
                        require_allowed(value, self, str(path))
                        return ParquetFiles(parquet=self) if protocol_of(value) in (None, "file") else None
        return None


class _Opened(NamedTuple):
    """An open Parquet file."""

    file: Any
    """pyarrow's ParquetFile."""
    stream: BinaryIO

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file, here or at a URL."""

    path: Shard

    def __str__(self) -> str:
        return str(self.path)

    def prepare(self, cache: Path | None = None) -> None:
        """Read the footer; raises DataError if the file is damaged."""
        self.open().stream.close()

    def open(self) -> _Opened:
        """Open the file.

        Raises:
            DataError: it is missing, damaged or not Parquet, or pyarrow is not installed.
            StorageError: it cannot be fetched.
        """
        _, parquet = require_pyarrow()
        try:
            stream = open_regular(self.path) if isinstance(self.path, Path) else os.fdopen(self.path.open(), "rb")
        except OSError as error:
            raise DataError(f"{self}: cannot be opened: {error.strerror}") from None
        hint = "if it is cut, copy it again, or leave it out (path may be a list of files)"
        try:
            with name_errors(f"{self}: cannot be read as Parquet; {hint}"):
                return _Opened(parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20), stream)
        except DataError:
            stream.close()
            if isinstance(self.path, RemoteShard):
                self.path.discard()  # otherwise the next start would find the same damage
            raise


class _Rows(NamedTuple):
    """Rows of a file that are packed together."""

    file: int
    start: int
    stop: int


class ParquetStream:
    """The rows of Parquet files, read forward; see `vqclip.data.sources.packed.Stream`."""

    def __init__(self, config: ParquetConfig):
        self._files = [ParquetFile(path) for path in config.files()]
        self._parts: list[_Rows] = []
        pieces: list[Piece] = []
        first = None
        for number, file in enumerate(self._files):
            with file.open() as (opened, _):
                schema = opened.schema_arrow
                if first is None:
                    first, self.columns = schema, find_columns(schema, config, str(file))
                _require_same(schema, first, self.columns, str(file), str(self._files[0]))
                pieces += self._divide(number, opened.metadata)
        self.pieces: Sequence[Piece] = pieces
        where = str(self._files[0])
        classes = read_classes(self.columns, config, where, lambda: self._values(self.columns.label or ""))
        local = self._files[0].path
        self.parser = RowParser(self.columns, config, classes, local.parent if isinstance(local, Path) else None)
        self.classnames, self.has_prompts = self.parser.classnames, self.parser.has_prompts
        self.notes = (*self.columns.notes, *_describe_splits(self._files))
        self._fetches = config.urls != "refuse"

    def __str__(self) -> str:
        return str(self._files[0]) + (f" and {len(self._files) - 1} more" if self._files[1:] else "")

    def read(self, piece: int) -> Iterator[StreamSample]:
        """Yield the samples of some row groups; see `Stream.read`."""
        file, start, stop = self._parts[piece]
        rows = self.rows(file, max(start - 1, 0))
        return parse_groups(
            group_rows(rows, start, stop, self.columns), self.parser, str(self._files[file]), self._fetches
        )

    def rows(self, file: int, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
        """Yield number and values of the rows of a file from a row on; a row in a damaged group is an error."""
        with self._files[file].open() as (opened, _):
            names = [*self.columns.names]
            marked = {"key", _STATUS} <= {*opened.schema_arrow.names}
            names += [_STATUS] if marked and _STATUS not in names else []
            at = 0
            for group in range(opened.metadata.num_row_groups):
                end = at + opened.metadata.row_group(group).num_rows
                if end <= start:
                    at = end
                    continue
                try:
                    for batch in opened.iter_batches(_BATCH, [group], names, use_threads=False):
                        for row in read_batch(batch):
                            if at >= end:
                                raise ValueError(f"row group {group} has more rows than its footer says")
                            failed = marked and isinstance(row, dict) and row[_STATUS] != _SUCCESS
                            if at >= start and not failed:
                                yield at, row
                            at += 1
                    if at < end:
                        raise ValueError("it has fewer rows than its footer says")
                except Exception as error:  # of pyarrow, for damaged pages
                    where = printable(
                        f"{self._files[file]}: row group {group} is damaged from row {at} on", one_line=True
                    )
                    for lost in range(at, end):
                        if lost >= start:
                            yield lost, DataError(f"{where} ({' '.join(str(error).split())[:200]})", "damaged shard")
                    at = end

    def _values(self, column: str) -> Iterator[list[Any]]:
        """Yield the values of a column in blocks."""
        for file in self._files:
            with file.open() as (opened, _), name_errors(f"{file}: column {column!r} cannot be read"):
                for batch in opened.iter_batches(1 << 14, columns=[column], use_threads=False):
                    yield batch.column(0).to_pylist()

    def _divide(self, file: int, metadata: Any) -> Iterator[Piece]:
        """Divide a file into pieces: whole row groups."""
        wanted, name = set(self.columns.names), str(self._files[file])
        start = at = size = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = [group.column(each) for each in range(group.num_columns)]
            size += sum(each.total_compressed_size for each in columns if each.path_in_schema.split(".")[0] in wanted)
            at += group.num_rows
            if size >= _PIECE_BYTES or at - start >= _PIECE_ROWS or number == metadata.num_row_groups - 1:
                self._parts.append(_Rows(file, start, at))
                yield Piece(name, size)
                start, size = at, 0


def _describe_splits(files: Sequence[ParquetFile]) -> list[str]:
    """Return a note on files whose names begin with those of several splits, such as train-00000-of-00002.parquet."""
    names = [str(file).rpartition("/")[2] for file in files]
    splits = Counter(re.split(r"[-_.]", name, maxsplit=1)[0] for name in names)
    if len(splits) < 2 or not all(map(is_split, splits)):
        return []
    found = ", ".join(f"{split} ({count})" for split, count in sorted(splits.items()))
    first = next((name for name in ("train", "training") if name in splits), min(splits))
    folder = str(files[0]).rpartition("/")[0]
    return [f"files of splits {found} are read together; path={folder}/{first}* reads one"]


def _require_same(schema: Any, first: Any, columns: TableColumns, name: str, other: str) -> None:
    """Raise DataError if a file lacks a column, or has other values in it than the first file."""
    for column in columns.names:
        wanted = first.field(column).type
        if column not in schema.names or kind_of(schema.field(column).type) != kind_of(wanted):
            got = schema.field(column).type if column in schema.names else "no such column"
            raise DataError(
                f"{name}: {column}: {got}; {other} has {wanted}, and all files of a source have the same columns"
            )


class ParquetFiles(FileSourceConfig):
    """Image files whose paths are in Parquet files: the same promises as for the files that a CSV lists."""

    kind: Literal["parquet"] = "parquet"
    """Parquet files."""
    parquet: ParquetConfig
    """The Parquet files."""

    @property
    def listing(self) -> Path:
        """The first Parquet file."""
        (path, *_) = self.parquet.files()
        if not isinstance(path, Path):
            raise ConfigError(f"{path}: a table at a URL has images or URLs in it; paths are not read")
        return path

    @property
    def root(self) -> Path:
        """The folder of the first file."""
        return self.listing.parent

    def table(self) -> FileTable:
        """Read paths, captions and labels of all rows."""
        config, builder, files = self.parquet, TableBuilder(), self.parquet.files()
        for path in files:
            builder.read_from(Path(str(path)))
        stream = ParquetStream(config)
        chosen, names = stream.columns, config.classnames or stream.classnames
        builder.notes += stream.notes
        columns = Columns(chosen.image, chosen.captions, chosen.label, names, config.templates)
        rows = (
            Row(number, {}, str(row)) if isinstance(row, DataError) else Row(number, row)
            for file in range(len(files))
            for number, row in stream.rows(file)
        )
        return list_images(rows, columns, builder, self.listing, self.root, look_beside=True)
