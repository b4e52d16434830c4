"""Source of the rows of Parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vqclip.data.lookup import name_errors, require_pyarrow
from vqclip.data.remote.files import RemoteShard, Shard
from vqclip.data.remote.urls import digest, protocol_of
from vqclip.data.sources.base import Places, name_sample
from vqclip.data.sources.columns import ColumnConfig, Row
from vqclip.data.sources.files import ListConfig, from_base64
from vqclip.data.sources.listing import FileTable, TableBuilder, list_images
from vqclip.data.sources.packed import Packable, Piece, stamp
from vqclip.data.sources.paths import describe_splits, find_shards
from vqclip.data.sources.table import BATCH, TableConfig, TableStream, content_of, kind_of, read_batch
from vqclip.errors import ConfigError, DataError, StorageError
from vqclip.io.files import open_regular

_BUFFER = 4 << 20
"""Bytes of a column that are read at a time; of a file at a URL by one request."""
_PIECE_BYTES, _PIECE_ROWS = 128 << 20, 10_000
"""A piece ends with the row group that makes it so large."""
_SUCCESS, _STATUS = "success", "status"
"""img2dataset keeps a row, without an image, for each failed download."""


class ParquetConfig(TableConfig):
    """Parquet files with a row for each image, or each caption: the bytes, path or URL, and captions or class.

    The layout of img2dataset is found out; rows of its failed downloads are left out. The rows are packed once into
    tars in the cache; images whose paths are in the rows are read where they are.
    """

    kind: Literal["parquet"] = "parquet"
    """Parquet files."""
    path: Places
    """A file, a folder of *.parquet, a pattern such as train-{00000..00041}.parquet or train-*.parquet, or a list of
    these. URLs (file, s3, gs, az, hf, http, https) work the same way; with http and https every file must be named, or
    written with braces."""

    def files(self) -> list[Shard]:
        """Return the Parquet files; raises DataError if there are none, or one is missing."""
        return find_shards(self.path, self.remote, (".parquet",))

    def without_damaged(self) -> tuple[ParquetConfig, dict[str, str]]:
        """Return the settings without files that cannot be opened, unless none can, and what is wrong with each."""
        whole, damaged = list[str](), dict[str, str]()
        for file in self.files():
            try:
                with open_parquet(file):  # reads the footer
                    whole.append(file.url if isinstance(file, RemoteShard) else str(file))
            except DataError as error:
                damaged[str(file)] = str(error).removeprefix(f"{file}: ")
        return self.model_copy(update={"path": tuple(whole)}) if whole and damaged else self, damaged

    def find(self, known: Mapping[str, Any] | None = None) -> Packable:
        """See `PackedConfig.find`; a file at a URL counts by its URL."""
        files = [
            [digest(path.url)] if isinstance(path, RemoteShard) else stamp([str(path)])[0] for path in self.files()
        ]
        return Packable({**self.settings(), "path": None, "files": files}, partial(ParquetStream, self))

    def image_files(self) -> _ImageFiles | None:
        """See `PackedConfig.image_files`; the first row with an image decides, if the images are a column of text."""
        if self.packed_path(self.find().identity).exists():  # found out before
            return None
        for path in self.files():
            with open_parquet(path) as opened:
                column, schema = self.columns(opened.schema_arrow, path, []).image, opened.schema_arrow
                if column not in schema.names or kind_of(schema.field(column).type) not in ("text", "texts"):
                    return None
                batches = opened.iter_batches(BATCH, columns=[column], use_threads=False)
                rows = (row for batch in batches for row in read_batch(batch) if not isinstance(row, DataError))
                text = next((text for row in rows if (text := content_of(row[column])) is not None), None)
            if text is None:
                continue
            if from_base64(text) is not None:
                return None
            with name_sample(str(path)):
                self.require_allowed(text)
            if protocol_of(text) not in (None, "file"):
                return None
            if not isinstance(path, Path):
                raise ConfigError(f"{path}: a table at a URL has images or URLs in it; paths are not read")
            found = self.model_dump(include={*ColumnConfig.model_fields} - {"kind", "weight"})
            return _ImageFiles(path=str(path), parquet=self, **found)
        return None


class _ImageFiles(ListConfig):
    """Image files whose paths are in Parquet files: the same promises as for the files that a CSV lists."""

    kind: Literal["parquet"] = "parquet"
    """Parquet files."""
    parquet: ParquetConfig
    """The Parquet files."""

    def table(self) -> FileTable:
        """Read paths, captions and labels of all rows."""
        builder = TableBuilder()
        for path in self.parquet.files():
            builder.read_from(Path(str(path)))
        stream = ParquetStream(self.parquet)
        builder.notes += stream.notes
        found = {**stream.columns._asdict(), "classnames": stream.classnames}
        found["captions"] = self.captions if self.caption_weights else stream.columns.captions or None
        rows = (row for piece in range(len(stream.pieces)) for row in stream.rows_of(piece, stream.stored))
        return list_images(rows, self.model_copy(update=found), builder, self.listing, self.root, look_beside=True)


@contextlib.contextmanager
def open_parquet(path: Shard) -> Iterator[Any]:
    """Open a Parquet file, here or at a URL, as pyarrow's ParquetFile.

    Raises:
        DataError: it is missing, damaged or not Parquet, or pyarrow is not installed.
        StorageError: it cannot be fetched.
    """
    _, parquet = require_pyarrow()
    try:
        stream = open_regular(path) if isinstance(path, Path) else path.open()
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from None
    hint = "if it is cut, copy it again, or leave it out (path may be a list of files)"
    with stream:
        with name_errors(f"{path}: cannot be read as Parquet; {hint}"):
            opened = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=_BUFFER)
        yield opened


class ParquetStream(TableStream):
    """The rows of Parquet files, read forward; see `vqclip.data.sources.packed.Stream`."""

    def __init__(self, config: ParquetConfig):
        self._files = config.files()
        first = self._files[0]
        with open_parquet(first) as opened:
            schema = opened.schema_arrow
        super().__init__(config, schema, str(first), first.parent if isinstance(first, Path) else None)
        found: list[tuple[int, Piece, range]] = []
        for number, file in enumerate(self._files):
            with open_parquet(file) as opened:
                self._require_same(opened.schema_arrow, schema, file)
                found += ((number, *each) for each in self._divide(file, opened.metadata))
        self._file_of = [number for number, _, _ in found]
        self.pieces, self.ranges = [piece for _, piece, _ in found], [rows for _, _, rows in found]
        self.find_classes()
        self.notes += describe_splits(self._files)

    def __str__(self) -> str:
        return self._name + (f" and {len(self._files) - 1} more" if self._files[1:] else "")

    def rows(self, piece: int, start: int, columns: Sequence[str]) -> Iterator[Row]:
        """See `TableStream.rows`; a row in a damaged group is an error."""
        with open_parquet(self._files[self._file_of[piece]]) as opened:
            marked = {"key", _STATUS} <= {*opened.schema_arrow.names}
            names = [*columns, _STATUS] if marked and _STATUS not in columns else columns
            at, size = 0, self.batch_size(columns)
            for group in range(opened.metadata.num_row_groups):
                end = at + opened.metadata.row_group(group).num_rows
                if end <= start:
                    at = end
                    continue
                try:
                    for batch in opened.iter_batches(size, [group], names, use_threads=False):
                        for row in read_batch(batch):
                            if at >= end:
                                raise ValueError(f"row group {group} has more rows than its footer says")
                            failed = marked and isinstance(row, dict) and row[_STATUS] != _SUCCESS
                            if at >= start and not failed:
                                yield at, row
                            at += 1
                    if at < end:
                        raise ValueError("it has fewer rows than its footer says")
                except StorageError:
                    raise
                except Exception as error:  # of pyarrow, for damaged pages
                    what = f"row group {group} is damaged from row {at} on ({' '.join(str(error).split())[:200]})"
                    for lost in range(max(at, start), end):
                        yield lost, DataError(what, "damaged shard")
                    at = end

    def _require_same(self, schema: Any, first: Any, file: Shard) -> None:
        """Raise DataError if a file lacks a column, or has other values in it than the first file."""
        for column in self.stored:
            wanted = first.field(column).type
            if column not in schema.names or kind_of(schema.field(column).type) != kind_of(wanted):
                got = schema.field(column).type if column in schema.names else "no such column"
                raise DataError(
                    f"{file}: {column}: {got}; {self._name} has {wanted}; all files of a source have the same columns"
                )

    def _divide(self, file: Shard, metadata: Any) -> Iterator[tuple[Piece, range]]:
        """Yield the pieces of a file, whole row groups, and their rows."""
        start = at = size = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(each) for each in range(group.num_columns)]
            size += sum(
                each.total_compressed_size for each in chunks if each.path_in_schema.split(".")[0] in self.stored
            )
            at += group.num_rows
            if size >= _PIECE_BYTES or at - start >= _PIECE_ROWS or number == metadata.num_row_groups - 1:
                yield Piece(str(file), size), range(start, at)
                start, size = at, 0
