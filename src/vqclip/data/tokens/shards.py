"""Token shards: the layout of their ids, `manifest.json` of their folder, and Parquet files with one row a sample.

    key        string                      name in the original shard
    sample_id  int64                       number over all original shards
    label      int64                       class number, null without one
    captions   list of string
    image_ids  fixed-size list of N·C ids  token after token; absent without an image tokenizer
    text_ids   list of lists of n·C ids    those of each caption, without padding; absent without a text tokenizer

Shapes: N token positions, n of them real, C codebooks a token. Ids are stored without their padding, ``(n, C)``, in the
smallest of uint8, uint16, uint32 and int64 for the largest codebook: no value is reserved for padding, and the array's
length is the number of tokens. They are delta-encoded, which packs them into the bits that they need (plain Parquet
spends 4 bytes on each), and the pages are compressed. Groups of 64 rows keep a random read cheap. The files contain no
times: equal samples make equal bytes with one version of pyarrow. Needs pyarrow, ``pip install 'vqclip[parquet]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from vqclip.config import Config
from vqclip.data.lookup import name_errors, require_pyarrow
from vqclip.data.work_folder import MANIFEST_FILE, SETTINGS_FILE, FolderManifest
from vqclip.errors import CheckpointError, DataError, ShapeError, count_noun, printable
from vqclip.io.files import open_regular
from vqclip.io.json_files import read_checked
from vqclip.nn.precision import Precision

SUFFIX = ".parquet"
"""Ending of the names of token shards."""
VERSIONS = {"format": "vqclip tokens", "format_version": 3}
"""Format and version of the JSON files."""

_MAX_IDS = 1 << 20
"""Largest N·C: a padded sample takes 8 MiB; no tokenizer has as many ids."""
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def id_type(codebook_sizes: Sequence[int]) -> np.dtype:
    """Return the smallest of uint8, uint16, uint32 and int64 for these codebooks."""
    smallest = np.min_scalar_type(max(codebook_sizes) - 1)
    return smallest if smallest.itemsize < 8 else np.dtype(np.int64)


class IdLayout(Config):
    """Shape and range of the ids of one modality."""

    num_tokens: int = Field(ge=1, le=_MAX_IDS)
    """N, the token positions of a sample."""
    codebook_sizes: tuple[Annotated[int, Field(ge=1, le=2**63)], ...] = Field(min_length=1, max_length=4096)
    """K of each of the C codebooks."""
    padded: bool
    """Whether a sample may have fewer than N tokens."""

    @model_validator(mode="after")
    def _check_size(self) -> IdLayout:
        if self.size > _MAX_IDS:
            raise ValueError(
                f"{self.num_tokens} tokens of {len(self.codebook_sizes)} ids; expected at most {_MAX_IDS} ids a sample"
            )
        return self

    @property
    def size(self) -> int:
        """N·C, the largest number of ids of a sample."""
        return self.num_tokens * len(self.codebook_sizes)

    @property
    def type(self) -> np.dtype:
        """Data type of stored ids."""
        return id_type(self.codebook_sizes)

    def read(self, stored: Any) -> np.ndarray:
        """Return the ids ``(n, C)`` of an image or text, whose pyarrow array has n·C of them, or is None.

        Raises:
            ValueError: there are too few or too many, or one is outside of its codebook.
        """
        width, count = len(self.codebook_sizes), 0 if stored is None else len(stored)
        if count % width or not (width if self.padded else self.size) <= count <= self.size:
            raise ValueError(f"has ids of another length than {self}")
        if stored.null_count:
            raise ValueError("has an id that is null")
        ids: np.ndarray = stored.to_numpy(zero_copy_only=True).reshape(-1, width)
        if ((ids < 0) | (ids > np.array([size - 1 for size in self.codebook_sizes]))).any():
            raise ValueError(f"has an id outside of its codebook, {self}")
        return ids

    def __str__(self) -> str:
        tokens = f"{'1 to ' if self.padded else ''}{count_noun(self.num_tokens, 'token')}"
        return f"{tokens} of the codebook sizes {', '.join(map(str, self.codebook_sizes))}"

    def pad(self, ids: np.ndarray) -> np.ndarray:
        """Convert stored ids ``(n, C)`` to the tokenizer's ``(N, C)`` int64, -1 at padding."""
        whole = np.full((self.num_tokens, len(self.codebook_sizes)), -1, dtype=np.int64)
        whole[: len(ids)] = ids
        return whole


class TokenizerInfo(Config):
    """The tokenizer that made the ids."""

    image: _Hash | None
    """`vqclip.tokenizer.stored.fingerprint` of the image tokenizer; None without image ids."""
    text: _Hash | None
    """Fingerprint of the text tokenizer; None without text ids."""
    weights: _Hash
    """SHA-256 of the folder's `model.safetensors`."""
    config: _Hash
    """SHA-256 of its `config.json`."""
    id_layout: int
    """Version of the layout of ids."""


class Settings(Config):
    """Everything that determines the bytes of token shards."""

    tokenizer: TokenizerInfo
    """The tokenizer."""
    image: IdLayout | None
    """Layout of image ids; None if images were not tokenized."""
    text: IdLayout | None
    """Layout of text ids; None if texts were not tokenized."""
    context_length: int | None
    """Longest text in tokens, beyond which captions were cut; None if texts were not tokenized."""
    batch_size: int = Field(ge=1)
    """Samples at once; the shape of a batch may change the last bits of the features before quantization."""
    precision: Precision
    """Floating-point type that the tokenizer computed in."""
    device: str
    """Type of the device."""
    threads: int = Field(ge=1)
    """CPU threads of a process, which change the order of sums."""
    max_pixels: int = Field(ge=1)
    """Larger images are bad samples."""
    made_with: dict[str, str]
    """Versions of the libraries that decode and compute."""
    data: dict[str, Any]
    """Fingerprint of the tokenized source."""
    shards: tuple[dict[str, Any], ...]
    """Its shards in order, as of `ShardedSource.shards`; each became one token shard."""


class Manifest(FolderManifest):
    """A whole folder of token shards."""

    settings: Settings
    """Settings of all shards."""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        for number, shard in enumerate(self.shards):
            if shard.name != f"{number:05d}{SUFFIX}":
                raise ValueError(f"shards: got {shard.name!r}, expected {number:05d}{SUFFIX}")
        if self.samples != (total := sum(shard.samples for shard in self.shards)):
            raise ValueError(f"samples: got {self.samples}, expected {total}, the sum over its shards")
        return self


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a finished folder.

    Raises:
        DataError: it is missing, damaged or of another version; the message says what to do.
    """
    path = folder / MANIFEST_FILE
    if not path.exists() and (folder / SETTINGS_FILE).exists():
        done = len([*folder.glob(f"*{SUFFIX}")])
        raise DataError(f"{folder}: is not finished ({done} shards are); run the same `vqclip tokenize` command again")
    remedy, hint = "tokenize again, or use the vqclip that wrote it", "; expected a folder that `vqclip tokenize` wrote"
    try:
        return read_checked(path, Manifest, VERSIONS, remedy, hint)
    except CheckpointError as error:
        raise DataError(str(error)) from None


_ROWS = 64
"""Largest number of rows of a group; a group is read as a whole."""
_GROUP_BYTES = 128 << 20
"""Largest size of a decompressed group."""
_MAX_CAPTIONS = 1 << 16
"""Largest mean number of captions of a sample in a group."""
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}
"""Allowed encodings, RLE for lengths only: others can decompress to many times their size."""
_PACKED = "DELTA_BINARY_PACKED"
"""Encoding of ids, allowed for them alone: their number bounds what they decompress to."""
_ID_COLUMNS = {"image_ids": "image_ids.list.element", "text_ids": "text_ids.list.element.list.element"}
"""Columns of ids, and their paths in a file."""


class TokenRecord(NamedTuple):
    """One sample of a token shard."""

    key: str
    """The sample's name in its original shard."""
    sample_id: int
    """Its number over all original shards, unusable samples included."""
    label: int
    """Class number; -1 without one."""
    captions: tuple[str, ...]
    """All captions, at least one."""
    image: np.ndarray | None
    """``(N, C)`` ids; None if images were not tokenized."""
    texts: tuple[np.ndarray, ...] | None
    """``(n, C)`` ids of each caption; None if texts were not tokenized."""


def strip_padding(ids: np.ndarray, codebook_sizes: Sequence[int]) -> np.ndarray:
    """Convert ids ``(N, C)`` int64 with -1 at padding to their stored form ``(n, C)``.

    Raises:
        ShapeError: a token without ids precedes one with ids, or a token has ids of only some codebooks.
    """
    real = (ids >= 0).any(axis=1)
    count = int(real.sum())
    if (ids[:count] < 0).any() or not count:
        raise ShapeError(
            f"ids: {count} tokens of {len(ids)} have ids; expected the first tokens to have ids of all codebooks"
        )
    return ids[:count].astype(id_type(codebook_sizes))


def write_shard(file: BinaryIO, records: Iterable[TokenRecord], image: IdLayout | None, text: IdLayout | None) -> None:
    """Write samples in their order.

    Args:
        file: where to.
        records: the samples, with ids of these layouts.
        image: layout of image ids; None without them.
        text: layout of text ids; None without them.

    Raises:
        DataError: pyarrow is not installed.
    """
    arrow, parquet = require_pyarrow()
    rows = list(records)
    schema = _schema(image, text)
    columns: dict[str, Any] = {
        "key": [row.key for row in rows],
        "sample_id": [row.sample_id for row in rows],
        "label": [row.label if row.label >= 0 else None for row in rows],
        "captions": [list(row.captions) for row in rows],
    }
    if image is not None:
        ids = np.concatenate(
            [np.empty(0, image.type), *(row.image.reshape(-1) for row in rows if row.image is not None)]
        )
        columns["image_ids"] = arrow.FixedSizeListArray.from_arrays(arrow.array(ids), image.size)
    if text is not None:
        columns["text_ids"] = [[ids.reshape(-1) for ids in row.texts or ()] for row in rows]
    table = arrow.table(columns, schema=arrow.schema(list(schema.items())))
    # Fewer rows for large samples, so that every group is within the reader's limits. Plain encoding takes 4 bytes for
    # a one-byte id.
    largest = max((4 * _size(row) for row in rows), default=1)
    encodings = {path: _PACKED for name, path in _ID_COLUMNS.items() if name in columns}
    parquet.write_table(
        table,
        file,
        row_group_size=max(1, min(_ROWS, _GROUP_BYTES // largest)),
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        column_encoding=encodings or None,
    )


def _size(row: TokenRecord) -> int:
    """Estimate the size of a sample in memory, in bytes."""
    ids = (*(row.texts or ()), *(() if row.image is None else (row.image,)))
    return (
        len(row.key.encode()) + sum(each.nbytes for each in ids) + sum(len(each.encode()) + 8 for each in row.captions)
    )


class TokenGroup:
    """Decoded rows of a token shard; each is checked when it is read.

    Args:
        table: all columns of some rows.
        image: layout of image ids; None without them.
        text: layout of text ids; None without them.
        place: name of the shard, for messages.
    """

    def __init__(self, table: Any, image: IdLayout | None, text: IdLayout | None, place: str):
        self._columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        self._image, self._text, self._place = image, text, place
        self.nbytes = int(table.nbytes)
        """Size in memory."""

    def record(self, row: int) -> TokenRecord:
        """Return a sample by its row in the group; its arrays are parts of the group's memory.

        Raises:
            DataError: the sample lacks something, or an id is outside of its codebook; the message names the sample.
        """
        cells = {name: column[row] for name, column in self._columns.items()}
        try:
            return self._parse(cells)
        except ValueError as error:
            name = printable(f"sample {cells['key'].as_py()}", one_line=True)
            raise DataError(f"{self._place}: {name} (row {row} of its group) {error}", "damaged ids") from None

    def _parse(self, cells: dict[str, Any]) -> TokenRecord:
        """Return the sample in the cells of a row; raise ValueError that says what is wrong with it."""
        key, sample_id, label, captions = (cells[name].as_py() for name in ("key", "sample_id", "label", "captions"))
        label = -1 if label is None else label
        image = texts = None
        if key is None:
            raise ValueError("has no key")
        if not captions:
            raise ValueError("has no captions")
        if None in captions:
            raise ValueError("has a caption that is null")
        if sample_id is None or sample_id < 0:
            raise ValueError("has no sample id")
        if label < -1:
            raise ValueError("has a negative label")
        if self._image is not None:
            if not cells["image_ids"].is_valid:
                raise ValueError("has no image ids")
            image = self._image.read(cells["image_ids"].values)
        if self._text is not None:
            ids = cells["text_ids"].values
            if ids is None or len(ids) != len(captions):
                raise ValueError("has another number of captions than of texts with ids")
            texts = tuple(self._text.read(each.values) for each in ids)
        return TokenRecord(key, sample_id, label, tuple(captions), image, texts)


class TokenShard:
    """An open token shard, which is read in groups of rows.

    Args:
        path: the file.
        image: layout of image ids; None without them.
        text: layout of text ids; None without them.

    Raises:
        DataError: it cannot be opened, is damaged, or has other columns.
    """

    def __init__(self, path: Path, image: IdLayout | None, text: IdLayout | None):
        self._path, self._image, self._text = path, image, text
        _, parquet = require_pyarrow()
        with name_errors(f"{path}: cannot be read as Parquet"):
            self._file = parquet.ParquetFile(open_regular(path), pre_buffer=False)  # a path has to be UTF-8
            _require_columns(self._file.schema_arrow, _schema(image, text), path)
            meta = self._file.metadata
            groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
            for group in groups:
                _require_small(group, image, text, path)
        self.ends = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        """Row at which each group begins, and the number of rows."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read_group(self, number: int) -> TokenGroup:
        """Read, decode and check a group of rows.

        Raises:
            DataError: it is damaged; the message names the sample if one is at fault.
        """
        with name_errors(f"{self._path}: damaged"):
            table = self._file.read_row_group(number, use_threads=False)
            rows = int(self.ends[number + 1] - self.ends[number])
            if len(table) != rows:
                raise DataError(f"{self._path}: {len(table)} rows in a group; its footer says {rows}", "damaged ids")
            return TokenGroup(table, self._image, self._text, str(self._path))

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)


def _schema(image: IdLayout | None, text: IdLayout | None) -> dict[str, Any]:
    """Return the types of the columns."""
    arrow, _ = require_pyarrow()
    columns = {
        "key": arrow.string(),
        "sample_id": arrow.int64(),
        "label": arrow.int64(),
        "captions": arrow.list_(arrow.string()),
    }
    if image is not None:
        columns["image_ids"] = arrow.list_(arrow.from_numpy_dtype(image.type), image.size)
    if text is not None:
        columns["text_ids"] = arrow.list_(arrow.list_(arrow.from_numpy_dtype(text.type)))
    return columns


def _require_columns(schema: Any, wanted: dict[str, Any], path: Path) -> None:
    """Raise DataError for missing or unknown columns, or columns of other types."""
    found = dict(zip(schema.names, schema.types, strict=True))
    if len(found) < len(schema.names):
        raise DataError(f"{path}: has two columns of one name: not a token shard of this folder")
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise DataError(
                f"{path}: {name} {found.get(name, 'is missing')}; expected {wanted.get(name, 'no such column')}",
                "damaged ids",
            )


def _require_small(group: Any, image: IdLayout | None, text: IdLayout | None, path: Path) -> None:
    """Raise DataError before a group is read that would decompress to more than its samples can have."""
    columns = {each.path_in_schema.split(".")[0]: each for each in map(group.column, range(group.num_columns))}
    rows = group.num_rows
    most = {"captions": rows * _MAX_CAPTIONS}
    most |= {"image_ids": rows * image.size} if image else {}
    most |= {"text_ids": columns["captions"].num_values * text.size} if text else {}
    if not 0 <= rows <= _ROWS or not 0 <= group.total_byte_size <= _GROUP_BYTES:
        raise DataError(
            f"{path}: a group of {rows} rows and {group.total_byte_size} bytes; at most {_ROWS} and {_GROUP_BYTES}"
        )
    for name, column in columns.items():
        if column.num_values > min(most.get(name, rows), _GROUP_BYTES // 4):  # nulls take no bytes
            raise DataError(f"{path}: {name}: {column.num_values} values in {rows} rows; too many", "damaged ids")
        allowed = _PLAIN | ({_PACKED} if name in _ID_COLUMNS else set())
        if not set(column.encodings) <= allowed:
            raise DataError(f"{path}: {name}: encoded as {', '.join(column.encodings)}; expected PLAIN", "damaged ids")
