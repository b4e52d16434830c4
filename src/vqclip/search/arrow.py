"""Embedded codes of an index as Arrow tables, for databases of vectors. Needs ``pip install 'vqclip[parquet]'``.

Columns: ``item`` and ``place`` (int64; number in the index, and in its source), ``name`` (string), ``ids``
(fixed_size_list of N·C integers, token after token; -1 for absent tokens), ``vector`` (fixed_size_list of E float32 or
float16, the unit-norm embedding of the ids). The metadata of the schema names the tokenizer by its fingerprint.

Shapes: n items, N tokens, C codebooks, E embedding width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch

from vqclip.data.lookup import name_errors, require_pyarrow
from vqclip.data.tokens.manifest import id_type
from vqclip.errors import CheckpointError, ConfigError, DataError, encodable
from vqclip.io.atomic import write_file
from vqclip.io.files import open_regular
from vqclip.search.index import CodeIndex
from vqclip.search.scan import require_tokenizer
from vqclip.tokenizer import Tokenizer
from vqclip.tokenizer.fingerprint import fingerprint
from vqclip.tokenizer.folder import ID_LAYOUT_VERSION

__all__ = ["VectorType", "export_vectors", "read_vectors", "vectors_of"]

VectorType = Literal["float32", "float16"]
"""Type of the numbers in a vector."""

_METADATA = "vqclip"
_ROWS = 4096
"""Items embedded at a time; rows of a group."""
_NORM_ERROR = 1e-2
"""Largest distance of a vector's length from 1; float16 alone gives 1e-3."""
_PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
_FILES = (".parquet", ".arrow")


def export_vectors(index: CodeIndex, tokenizer: Tokenizer, path: str | Path, dtype: VectorType = "float32") -> None:
    """Write the names, ids and embeddings of an index to one file: ``.parquet``, or ``.arrow`` to map into memory.

    Neither is compressed, because numbers of embeddings do not compress. Parquet has a checksum for every page.

    Args:
        index: the index.
        tokenizer: the tokenizer that the index was built with, in evaluation mode.
        path: the file; an existing one is replaced atomically.
        dtype: type of the numbers in a vector.

    Raises:
        CheckpointError: another tokenizer than the one that made the codes.
        ConfigError: another suffix or dtype.
    """
    path = Path(path)
    if path.suffix not in _FILES:
        raise ConfigError(f"{path}: got the suffix {path.suffix!r}; expected {' or '.join(_FILES)}")
    if dtype not in get_args(VectorType):
        raise ConfigError(f"dtype: got {dtype!r}; expected one of {', '.join(get_args(VectorType))}")
    arrow, parquet = require_pyarrow()
    require_tokenizer(index, tokenizer)
    schema = _schema(tokenizer, index.packing.absent, dtype)

    def write(file: BinaryIO) -> None:
        with (
            parquet.ParquetWriter(file, schema, **_PLAIN)
            if path.suffix == ".parquet"
            else arrow.ipc.new_file(file, schema)
        ) as writer:
            for batch in _batches(index, tokenizer, schema):
                writer.write_batch(batch)

    write_file(path, write)


def read_vectors(path: str | Path, tokenizer: Tokenizer) -> Any:
    """Read a Parquet file of `export_vectors`, which may come from others, as a `pyarrow.Table`.

    Args:
        path: the file. Arrow files are for tools that map them; this function does not read them.
        tokenizer: the tokenizer that made the ids.

    Raises:
        CheckpointError: another tokenizer made the ids.
        DataError: the file is damaged, has other columns, is compressed, or contains NaN.
    """
    path = Path(path)
    _, parquet = require_pyarrow()
    with (
        name_errors(f"{path}: cannot be read; expected a .parquet file of `vqclip search export`"),
        open_regular(path) as stream,  # a path has to be UTF-8
        parquet.ParquetFile(stream, page_checksum_verification=True) as file,
    ):
        _require_schema(file.schema_arrow, tokenizer, path)
        _require_bounded(file.metadata, file.schema_arrow, path)
        table = file.read(use_threads=False)
        table.validate(full=True)
    vectors_of(table, tokenizer, str(path))
    return table


def vectors_of(table: Any, tokenizer: Tokenizer, name: str = "table") -> np.ndarray:
    """Return the vectors of a table as an array ``(n, E)``, without a copy if they are one chunk.

    Args:
        table: a `pyarrow.Table` with the metadata of `export_vectors`, such as one that a database returns.
        tokenizer: the tokenizer that made the ids.
        name: of the table, for messages.

    Raises:
        CheckpointError: another tokenizer made the ids, or the metadata is missing.
        DataError: the column ``vector`` is missing or of another type, or a vector is null, not finite or not of
            length 1.
    """
    _require_origin(table.schema, tokenizer, name)
    _require_vector_column(table.schema, tokenizer, name)
    column = table.column("vector")
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    values = chunk.flatten()  # of the rows that are not null
    if column.null_count or values.null_count:
        raise DataError(f"{name}: vector: got null; expected a vector in every row", "damaged vectors")
    vectors = values.to_numpy(zero_copy_only=True).reshape(-1, tokenizer.embed_dim)
    for start in range(0, len(vectors), _ROWS):
        norms = np.linalg.norm(vectors[start : start + _ROWS].astype(np.float32), axis=1)
        wrong = ~(np.abs(norms - 1) <= _NORM_ERROR)  # true for NaN
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"{name}: vector: row {start + row} has the length {norms[row]}; expected 1", "damaged vectors"
            )
    return vectors


@torch.no_grad()
def _batches(index: CodeIndex, tokenizer: Tokenizer, schema: Any) -> Iterator[Any]:
    arrow, _ = require_pyarrow()
    for items in torch.arange(len(index)).split(_ROWS):
        ids = index.ids(items)
        vectors = tokenizer.embed(ids.to(tokenizer.device)).float().cpu()
        places = items if index.places is None else index.places[items]
        names = [encodable(index.names[item]) for item in items.tolist()]
        rows = (items.numpy(), places.numpy(), names, _list(ids.numpy(), schema), _list(vectors.numpy(), schema))
        yield arrow.record_batch(list(rows), schema=schema)


def _list(values: np.ndarray, schema: Any) -> Any:
    """Convert an array ``(n, ...)`` to the type of its column, ``ids`` or ``vector``."""
    arrow, _ = require_pyarrow()
    kind = schema.field("ids" if values.dtype == np.int64 else "vector").type
    flat = values.reshape(-1).astype(kind.value_type.to_pandas_dtype(), copy=False)
    return arrow.FixedSizeListArray.from_arrays(arrow.array(flat), type=kind)


def _schema(tokenizer: Tokenizer, absent: bool, dtype: VectorType) -> Any:
    arrow, _ = require_pyarrow()
    codes, size = id_type(tokenizer.codebook_sizes), tokenizer.num_tokens * len(tokenizer.codebook_sizes)
    codes = np.result_type(codes, np.int8) if absent else codes  # the next signed type holds -1 as well
    fields = {
        "item": arrow.int64(),
        "place": arrow.int64(),
        "name": arrow.string(),
        "ids": arrow.list_(arrow.from_numpy_dtype(codes), size),
        "vector": arrow.list_(arrow.from_numpy_dtype(np.dtype(dtype)), tokenizer.embed_dim),
    }
    return arrow.schema(list(fields.items()), {_METADATA: json.dumps(_origin(tokenizer))})


def _origin(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "format": "vqclip-vectors",
        "id_layout": ID_LAYOUT_VERSION,
        "modality": tokenizer.modality,
        "tokenizer_sha256": fingerprint(tokenizer),
        "num_tokens": tokenizer.num_tokens,
        "codebook_sizes": list(tokenizer.codebook_sizes),
    }


def _require_origin(schema: Any, tokenizer: Tokenizer, name: str) -> None:
    """Check that the metadata names this tokenizer."""
    text = (schema.metadata or {}).get(_METADATA.encode())
    if text is None:
        raise CheckpointError(
            f"{name}: its schema has no metadata {_METADATA!r}, so nothing says which tokenizer made it; expected a "
            "table of `vqclip search export`"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    ours = _origin(tokenizer)
    if found != ours:
        theirs = found if isinstance(found, dict) else {}
        different = [
            f"{key} {theirs.get(key)!r:.100}, not {ours[key]!r:.100}" for key in ours if theirs.get(key) != ours[key]
        ]
        raise CheckpointError(
            f"{name}: made by another tokenizer than this one: {'; '.join(different) or 'unknown keys'}; load the "
            "tokenizer of the index that was exported"
        )


def _require_vector_column(schema: Any, tokenizer: Tokenizer, name: str) -> None:
    arrow, _ = require_pyarrow()
    got = schema.field("vector").type if schema.names.count("vector") == 1 else "no such column"
    wanted = [arrow.list_(kind, tokenizer.embed_dim) for kind in (arrow.float32(), arrow.float16())]
    if got not in wanted:
        raise DataError(
            f"{name}: vector: got {got}; expected fixed_size_list of {tokenizer.embed_dim} float32 or float16",
            "damaged vectors",
        )


def _require_schema(schema: Any, tokenizer: Tokenizer, path: Path) -> None:
    """Check all columns of a file of `export_vectors`."""
    _require_origin(schema, tokenizer, str(path))
    _require_vector_column(schema, tokenizer, str(path))
    expected = [_schema(tokenizer, absent, dtype) for absent in (False, True) for dtype in get_args(VectorType)]
    if not any(schema.equals(each) for each in expected):
        columns = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise DataError(
            f"{path}: got the columns {columns:.500}; expected those of `vqclip search export`", "damaged vectors"
        )


def _require_bounded(metadata: Any, schema: Any, path: Path) -> None:
    """Check, before anything is read, that the rows take no more memory than the file has bytes."""
    sizes = {"ids": schema.field("ids").type.list_size, "vector": schema.field("vector").type.list_size}
    width = sizes["vector"] * schema.field("vector").type.value_type.bit_width // 8
    if not 0 <= metadata.num_rows <= path.stat().st_size // width:
        raise DataError(f"{path}: {metadata.num_rows} rows in {path.stat().st_size} bytes; too many", "damaged vectors")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema.split(".")[0]
            encodings = ", ".join(sorted({*column.encodings} - {"PLAIN", "RLE", "BIT_PACKED"}))
            if column.compression != "UNCOMPRESSED" or encodings:
                raise DataError(
                    f"{path}: {name}: {column.compression} {encodings}; expected UNCOMPRESSED and PLAIN, as "
                    "`vqclip search export` writes. If you trust the file, read it with pyarrow, and use `vectors_of`"
                )
            if not 0 <= column.num_values <= metadata.num_rows * sizes.get(name, 1):
                raise DataError(f"{path}: {name}: {column.num_values} values; too many for its rows", "damaged vectors")
