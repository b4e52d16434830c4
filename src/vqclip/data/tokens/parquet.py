"""Token shards as Parquet: one row a sample. Needs pyarrow, ``pip install 'vqclip[parquet]'``.

Columns: ``key``, ``sample_id``, ``label`` (null without one), ``captions`` (list), ``image_ids`` (list, N·C numbers,
token after token), ``text_ids`` (list, the captions' ids one after the other), ``text_lengths`` (list, tokens of each
caption). The files hold no times: equal samples make equal bytes, with one version of pyarrow.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vqclip.data.libraries import name_errors, require_pyarrow
from vqclip.data.tokens.layout import IdLayout, TokenRecord, require_valid
from vqclip.errors import DataError, printable
from vqclip.io.files import open_regular

__all__ = ["ParquetShard", "write_parquet"]

_ROWS = 256
"""Largest number of rows of a group; a group is read as a whole."""
_GROUP_BYTES = 128 << 20
"""Largest size of a decompressed group."""
_KEPT_BYTES = 16 << 20
"""Largest size of the groups that an open file caches; the last one always stays."""
_MAX_CAPTIONS = 1 << 16
"""Largest mean number of captions of a sample in a group."""
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}
"""Allowed encodings, RLE for lengths only: others can decompress to many times their size."""


def write_parquet(
    file: BinaryIO, records: Iterable[TokenRecord], image: IdLayout | None, text: IdLayout | None
) -> None:
    """Write samples in their order."""
    arrow, parquet = require_pyarrow()
    rows = list(records)
    columns: dict[str, Any] = {
        "key": arrow.array([row.key for row in rows], arrow.string()),
        "sample_id": arrow.array([row.sample_id for row in rows], arrow.int64()),
        "label": arrow.array([row.label if row.label >= 0 else None for row in rows], arrow.int64()),
        "captions": arrow.array([list(row.captions) for row in rows], arrow.list_(arrow.string())),
    }
    if image is not None:
        columns["image_ids"] = _lists([row.image for row in rows], image.type)
    if text is not None:
        columns["text_ids"] = _lists([np.concatenate(row.texts or ()) for row in rows], text.type)
        lengths = [[len(ids) for ids in row.texts or ()] for row in rows]
        columns["text_lengths"] = arrow.array(lengths, arrow.list_(arrow.int32()))
    table = arrow.table(columns)
    # Fewer rows for large samples, so that every group is within the reader's limits. Plain encoding takes 4 bytes for
    # a one-byte id.
    largest = max((4 * _bytes(row) for row in rows), default=1)
    size = max(1, min(_ROWS, _GROUP_BYTES // largest))
    parquet.write_table(table, file, row_group_size=size, compression="zstd", use_dictionary=False)


def _bytes(row: TokenRecord) -> int:
    """Estimate the size of a sample in memory."""
    ids = (*(row.texts or ()), *(() if row.image is None else (row.image,)))
    return (
        len(row.key.encode()) + sum(each.nbytes for each in ids) + sum(len(each.encode()) + 8 for each in row.captions)
    )


def _lists(arrays: list[Any], kind: np.dtype) -> Any:
    arrow, _ = require_pyarrow()
    ends = np.cumsum([0, *(array.size for array in arrays)])
    values = np.concatenate([np.empty(0, kind), *(array.reshape(-1) for array in arrays)]).astype(kind)
    return arrow.ListArray.from_arrays(arrow.array(ends, arrow.int32()), arrow.array(values))


class ParquetShard:
    """Reads the samples of a Parquet file in any order, one group of rows at a time; the last groups are cached.

    Args:
        path: the file.
        image: layout of image ids; None without them.
        text: layout of text ids; None without them.

    Raises:
        DataError: it cannot be opened, is damaged, or lacks a column.
    """

    def __init__(self, path: Path, image: IdLayout | None, text: IdLayout | None):
        self._path, self._image, self._text = path, image, text
        _, parquet = require_pyarrow()
        with name_errors(f"{path}: cannot be read as Parquet"):
            self._file = parquet.ParquetFile(open_regular(path))  # a path has to be UTF-8
            _require_columns(self._file.schema_arrow, _schema(image, text), path)
            meta = self._file.metadata
            groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
            for group in groups:
                _require_small(group, image, text, path)
            self._ends = np.cumsum([0, *(group.num_rows for group in groups)])
            self._bytes = [group.total_byte_size for group in groups]
        self._groups: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, row: int) -> TokenRecord:
        """Read one sample.

        Raises:
            DataError: it is damaged; the message names it.
        """
        group = int(np.searchsorted(self._ends, row, side="right")) - 1
        columns, at = self._group(group), row - int(self._ends[group])
        key, label = columns["key"][at], columns["label"][at]
        place = printable(f"{self._path}: sample {key}", one_line=True)
        captions = tuple(columns["captions"][at] or ())
        image = self._rows(columns["image_ids"][at], self._image, place) if self._image else None
        texts = None
        if self._text:
            ids, lengths = self._rows(columns["text_ids"][at], self._text, place, whole=False), columns["text_lengths"]
            if sum(lengths[at]) != len(ids) or len(lengths[at]) != len(captions):
                raise DataError(f"{place}: text_lengths does not fit the ids or the captions", "damaged ids")
            parts = np.split(ids, np.cumsum(lengths[at])[:-1])
            texts = tuple(self._text.require(part, place) for part in parts)
        label = -1 if label is None else label
        return require_valid(TokenRecord(key, columns["sample_id"][at], label, captions, image, texts), place)

    def _rows(self, values: np.ndarray, layout: IdLayout, place: str, whole: bool = True) -> np.ndarray:
        codebooks = len(layout.codebook_sizes)
        if values.size % codebooks:
            raise DataError(f"{place}: {values.size} ids; expected {codebooks} for each token", "damaged ids")
        ids = values.reshape(-1, codebooks)
        return layout.require(ids, place) if whole else ids

    def _group(self, number: int) -> dict[str, Any]:
        columns = self._groups.pop(number, None)
        if columns is None:
            with name_errors(f"{self._path}: damaged"):
                table = self._file.read_row_group(number, use_threads=False)
                columns = {name: _plain(table.column(name).combine_chunks()) for name in table.column_names}
            rows = int(self._ends[number + 1] - self._ends[number])
            for name, column in columns.items():
                if len(column) != rows:
                    raise DataError(f"{self._path}: {name}: {len(column)} rows; its footer says {rows}")
        self._groups[number] = columns  # the most recently used is last
        while len(self._groups) > 1 and sum(self._bytes[each] for each in self._groups) > _KEPT_BYTES:
            self._groups.popitem(last=False)
        return columns

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)


def _schema(image: IdLayout | None, text: IdLayout | None) -> dict[str, Any]:
    """Return the types of the columns that `write_parquet` writes."""
    arrow, _ = require_pyarrow()
    columns = {
        "key": arrow.string(),
        "sample_id": arrow.int64(),
        "label": arrow.int64(),
        "captions": arrow.list_(arrow.string()),
    }
    if image is not None:
        columns["image_ids"] = arrow.list_(arrow.from_numpy_dtype(image.type))
    if text is not None:
        columns["text_ids"] = arrow.list_(arrow.from_numpy_dtype(text.type))
        columns["text_lengths"] = arrow.list_(arrow.int32())
    return columns


def _require_columns(schema: Any, wanted: dict[str, Any], path: Path) -> None:
    """Raise DataError for missing or unknown columns, or columns of other types."""
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{path}: has two columns of one name: not a token shard of this folder")
    types = {name: schema.field(name).type for name in schema.names}
    if missing := sorted(set(wanted) - set(types)):
        raise DataError(f"{path}: lacks {', '.join(missing)}: not a token shard of this folder")
    for name, kind in types.items():
        if name not in wanted or kind != wanted[name]:
            raise DataError(f"{path}: {name} {kind}; expected {wanted.get(name, 'no such column')}", "damaged ids")


def _require_small(group: Any, image: IdLayout | None, text: IdLayout | None, path: Path) -> None:
    """Raise DataError before a group is read that would decompress to more than its samples can have."""
    columns = {each.path_in_schema.split(".")[0]: each for each in map(group.column, range(group.num_columns))}
    rows = group.num_rows
    most = {"captions": rows * _MAX_CAPTIONS, "text_lengths": rows * _MAX_CAPTIONS}
    most |= {"image_ids": rows * image.size} if image else {}
    most |= {"text_ids": columns["text_lengths"].num_values * text.size} if text else {}
    if not 0 <= rows <= _ROWS or not 0 <= group.total_byte_size <= _GROUP_BYTES:
        raise DataError(
            f"{path}: a group of {rows} rows and {group.total_byte_size} bytes; expected at most {_ROWS} rows and "
            f"{_GROUP_BYTES} bytes"
        )
    for name, column in columns.items():
        if column.num_values > min(most.get(name, rows), _GROUP_BYTES // 4):  # nulls take no bytes
            raise DataError(f"{path}: {name}: {column.num_values} values in {rows} rows; too many", "damaged ids")
        if not set(column.encodings) <= _PLAIN:
            raise DataError(f"{path}: {name}: encoded as {', '.join(column.encodings)}; expected PLAIN", "damaged ids")


def _plain(column: Any) -> Any:
    """Convert a column to a list; columns of ids to lists of arrays."""
    arrow, _ = require_pyarrow()
    if not arrow.types.is_list(column.type) or not arrow.types.is_integer(column.type.value_type):
        return column.to_pylist()
    values, ends = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(ends)]
