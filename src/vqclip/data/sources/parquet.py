"""Source of the rows of Parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vqclip.data.remote import display_url, is_tar
from vqclip.data.sources.base import FolderContent, RawSample
from vqclip.data.sources.paths import find_shards
from vqclip.data.sources.row_groups import ParquetPart, RowGroups, read_schema
from vqclip.data.sources.table import RowParser, TableConfig, find_columns
from vqclip.errors import DataError

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
    these. URLs (file, s3, gs, http, https) work the same way; with http and https every file must be named, or written
    with braces."""
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

    def shards(self) -> Sequence[ParquetPart]:
        """Return the files, for `vqclip.data.prepare_sources`.

        Raises:
            DataError: there are none, or one is missing.
        """
        paths = [self.path] if isinstance(self.path, str) else self.path
        return [ParquetPart(path) for path in find_shards(paths, self.remote, _ENDINGS)]

    def build(self, cache: Path | None = None) -> ParquetRows:
        """Open the files, after indexing those without an index."""
        return ParquetRows(self, cache)


class ParquetRows:
    """A `Source` of the rows of Parquet files.

    Args:
        config: the files and their columns.
        cache: folder of the indexes; default `vqclip.io.cache.cache_folder()`.

    Raises:
        DataError: no files, a damaged one, or no rows.
        ConfigError: a column is missing or not plain.
    """

    def __init__(self, config: ParquetConfig, cache: Path | None = None):
        self.config = config
        self._rows = RowGroups([part.path for part in config.shards()], config.memory_mib << 20, cache)
        schemas = [read_schema(facts) for facts in self._rows.facts]
        names = [display_url(str(path)) for path in self._rows.paths]
        self._parser = RowParser(find_columns(schemas[0], config, names[0]), config)
        columns = self._parser.columns
        for name, schema in zip(names[1:], schemas[1:], strict=True):
            for column in columns.names:
                if column not in schema.names or schema.field(column).type != schemas[0].field(column).type:
                    got = schema.field(column).type if column in schema.names else "no such column"
                    raise DataError(
                        f"{name}: {column}: {got}; {names[0]} has {schemas[0].field(column).type}, and all files of a "
                        "source have the same columns"
                    )
        if not len(self):
            raise DataError(f"{names[0]}: no rows with images in {len(names)} file{'s' if len(names) > 1 else ''}")
        self._rows.select(columns.names)
        self._rows.warn_if_slow()
        self.classnames, self.templates = self._parser.classnames, self._parser.templates
        self._width = len(str(max(sum(facts.rows) for facts in self._rows.facts)))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one row; see `Source.read`."""
        path = self._rows.paths[self._rows.locate(index)[0]]
        folder = path.parent if isinstance(path, Path) else None
        return self._parser.parse(self._rows.read(index), self.name(index), folder)

    def name(self, index: int) -> str:
        """Return file and row, for messages."""
        return self._rows.name(index)

    def key(self, index: int) -> str:
        """Return the row's number in its file; see `ShardedSource.key`."""
        return f"{self._rows.locate(index)[1]:0{self._width}d}"

    def place(self, index: int) -> str:
        """Return file and row; see `vqclip.data.images.ImageSource.place`."""
        return f"{self._rows.paths[self._rows.locate(index)[0]].name}/{self.key(index)}"

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """See `ShardedSource.shards`."""
        return self._rows.shards

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; of the tables alone if the images are at URLs."""
        digests = "".join(str(shard["sha256"]) for shard in self.shards)
        digest = hashlib.sha256(digests.encode()).hexdigest()
        return {"kind": "parquet", "samples": len(self), "sha256": digest, **self._parser.fingerprint}
