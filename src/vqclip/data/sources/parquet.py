"""Source of the rows of Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vqclip.data.remote import display_url, is_tar, protocol_of
from vqclip.data.shard import Part, Shard
from vqclip.data.sources.base import FolderContent, NumberedSource, RawSample, Source
from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.files import FileSourceConfig
from vqclip.data.sources.paths import find_shards, strip_common_folders
from vqclip.data.sources.row_groups import ParquetPart, RowGroups, read_schema
from vqclip.data.sources.table import Columns, RowParser, TableConfig, find_columns, holds_image, image_path
from vqclip.errors import ConfigError, DataError

__all__ = ["ParquetConfig", "ParquetRows"]

_ENDINGS = (".parquet",)


class ParquetConfig(TableConfig):
    """Parquet files with a row for each image: its bytes, path or URL, and captions or a class number.

    The layout of img2dataset is found out; rows of its failed downloads are left out.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"parquet": _ENDINGS}

    kind: Literal["parquet"] = "parquet"
    """Parquet files."""
    path: str | tuple[str, ...]
    """A file, a folder of *.parquet, a pattern such as train-{00000..00041}.parquet or train-*.parquet, or a list of
    these. URLs (file, s3, gs, az, hf, http, https) work the same way; with http and https every file must be named, or
    written with braces."""
    memory_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """Decoded row groups that each process keeps, in MiB; the last one always stays, whatever its size."""

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

    def shards(self) -> Sequence[Shard | Part]:
        """Return the files, and the images that they name, for `vqclip.data.prepare_sources`.

        Raises:
            DataError: there are none, or one is missing.
            ConfigError: a column is missing or not plain.
        """
        images = find_image_files(self)
        return [*map(ParquetPart, self.files())] if images is None else images.shards()

    def build(self, cache: Path | None = None) -> Source:
        """Open the files, after indexing those without an index."""
        images = find_image_files(self)
        return ParquetRows(self, cache) if images is None else images.build(cache)


def open_rows(config: ParquetConfig, cache: Path | None = None) -> tuple[RowGroups, Columns]:
    """Open the files and find their columns.

    Raises:
        DataError: no files, a damaged one, no rows, or files of other columns.
        ConfigError: a column is missing or not plain.
    """
    rows = RowGroups(config.files(), config.memory_mib << 20, cache)
    schemas = [read_schema(facts) for facts in rows.facts]
    names = list(map(str, rows.paths))
    columns = find_columns(schemas[0], config, names[0])
    for name, schema in zip(names[1:], schemas[1:], strict=True):
        for column in columns.names:
            if column not in schema.names or schema.field(column).type != schemas[0].field(column).type:
                got = schema.field(column).type if column in schema.names else "no such column"
                raise DataError(
                    f"{name}: {column}: {got}; {names[0]} has {schemas[0].field(column).type}, and all files of a "
                    "source have the same columns"
                )
    if not len(rows):
        raise DataError(f"{names[0]}: no rows with images in {len(names)} file{'s' if len(names) > 1 else ''}")
    rows.select(columns.names)
    return rows, columns


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
        """Read paths, captions and labels of all rows; raises DataError for a wrong class number."""
        builder = TableBuilder()
        for path in self.parquet.files():
            builder.read_from(Path(str(path)))
        rows, columns = open_rows(self.parquet)
        parser = RowParser(columns, self.parquet)
        for index in range(len(rows)):
            row = rows.read(index)
            builder.add(image_path(row[columns.image]) or "", *parser.texts(row, rows.name(index)), index)
        return builder.finish(parser.classnames, parser.templates)


def find_image_files(config: ParquetConfig) -> ParquetFiles | None:
    """Return the image files that the rows name; None if the images, or URLs that may be fetched, are in the rows.

    The first row with either of them decides.

    Raises:
        DataError: URLs that may not be fetched, or see `open_rows`.
    """
    if config.urls != "refuse":
        return None
    for file in config.files():
        rows = RowGroups([file], config.memory_mib << 20)
        columns = find_columns(read_schema(rows.facts[0]), config, str(file))
        rows.select([columns.image])
        for index in range(len(rows)):
            value = rows.read(index)[columns.image]
            path = image_path(value)
            if path is not None and protocol_of(path) not in (None, "file"):
                raise DataError(
                    f"{rows.name(index)}: {display_url(path)}: URLs in tables are not fetched unless urls: fetch is set"
                )
            if path is not None:
                return ParquetFiles(parquet=config)
            if holds_image(value):
                return None
    return None


class ParquetRows(NumberedSource):
    """A `Source` of the rows of Parquet files.

    Args:
        config: the files and their columns.
        cache: folder of the indexes; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: no files, a damaged one, or no rows.
        ConfigError: a column is missing or not plain.
    """

    def __init__(self, config: ParquetConfig, cache: Path | None = None):
        self.config = config
        self._rows, columns = open_rows(config, cache)
        self._parser = RowParser(columns, config)
        self._rows.warn_if_slow()
        self.shards = self._rows.shards
        self.classnames, self.templates = self._parser.classnames, self._parser.templates
        self._places = strip_common_folders([str(path) for path in self._rows.paths])
        self._width = len(str(max(sum(facts.rows) for facts in self._rows.facts)))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one row; see `Source.read`."""
        return self._parser.parse(self._rows.read(index), self.name(index))

    def name(self, index: int) -> str:
        """Return file and row, for messages."""
        return self._rows.name(index)

    def place(self, index: int) -> str:
        """Return file and row; see `vqclip.data.images.ImageSource.place`."""
        file, row = self._rows.locate(index)
        return f"{self._places[file]}/{row:0{self._width}d}"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; of the tables alone if the images are at URLs."""
        return {"kind": "parquet", "samples": len(self), "sha256": self.sha256, **self._parser.fingerprint}
