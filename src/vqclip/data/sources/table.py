"""Tables that are read forward, of pyarrow's columns: the rows of Parquet files and of `datasets` as samples.

    schema, settings  ->  columns, classes
    rows in order     ->  neighbouring rows of one image  ->  their image, captions and class  ->  StreamSample

Columns are read by what their values are: text in a dictionary column is text, however it is stored.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vqclip.data.lookup import map_ahead
from vqclip.data.remote.files import fetch_bytes
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import display_url, local_path, protocol_of
from vqclip.data.sources.base import MAX_BYTES, RawSample, name_sample, read_image
from vqclip.data.sources.class_names import Classes
from vqclip.data.sources.columns import (
    IMAGE_COLUMNS,
    TEXT_KEYS,
    ColumnConfig,
    Columns,
    ColumnType,
    Row,
    choose_columns,
    guess_columns,
    look_up,
    plain_text,
    require_usable,
)
from vqclip.data.sources.files import from_base64, resolve_path
from vqclip.data.sources.packed import PackedConfig, Piece, StreamSample, stamp
from vqclip.errors import ConfigError, DataError, StorageError, printable

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes", "image_data", "bytes")
_BASE64_COLUMNS = ("image_base64", "base64", "b64", "image_bytes", "image_data", "bytes")
_URLS = ("url", "image_url")
_HTML = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
BATCH, _LABELS = 16, 4096
"""Rows that are decoded at a time, a few, since an image may have 64 MiB; and those of a column without images."""
_THREADS, _AHEAD = 16, 64
"""Requests for images at a time, and samples that wait for their turn."""


class TableConfig(ColumnConfig, PackedConfig):
    """Settings of tables that are read forward."""

    urls: Literal["refuse", "fetch", "fetch_or_replace"] = "refuse"
    """Images at URLs. refuse: an error. fetch: fetched once; one that cannot be fetched ends the run. fetch_or_replace:
    one that is gone for good (such as 404) is a bad sample, so that what is learned depends on the servers."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of what is at URLs."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide samples, with the time of a file of class names."""
        found = self.model_dump(mode="json", exclude={"weight", "remote", "templates"})
        if self.caption_weights:
            found["captions"] = dict.fromkeys(found["captions"])  # the weights do not change what is packed
        return {**found, "names": stamp([self.classnames]) if isinstance(self.classnames, Path) else None}

    def columns(self, schema: Any, path: object, notes: list[str]) -> Columns:
        """Return the columns of a pyarrow schema that are read, and note which are found by their names.

        Raises:
            ConfigError: a column has a wrong type.
            DataError: a column is missing or not plain; the message lists all columns.
        """
        if len({*schema.names}) < len(schema.names):
            raise ConfigError(
                f"{path}: has two columns of one name; expected {', '.join(dict.fromkeys(schema.names))} once each"
            )
        types = dict(_types_in(schema))
        names = [*types]
        images = [name for name in names if types[name].kind in ("bytes", "image")]
        images = [name for name in images if name in schema.names] or images
        if len(images) > 1:
            images = guess_columns(images, _IMAGES)
        elif not images:
            usual = [each for each in (*IMAGE_COLUMNS, *_BASE64_COLUMNS) if self.urls != "refuse" or each not in _URLS]
            images = guess_columns([name for name in names if types[name].kind in ("text", "texts")], usual)
        return choose_columns(self, names, images, path, notes, types)

    def require_allowed(self, path: str) -> None:
        """Raise DataError for a URL that may not be fetched."""
        if protocol_of(path) not in (None, "file") and self.urls == "refuse":
            raise DataError(f"{display_url(path)}: URLs in tables are not fetched unless urls: fetch is set", "URL")


def _types_in(fields: Any, prefix: str = "") -> Iterator[tuple[str, ColumnType]]:
    """Yield the columns of a schema, and those in structures such as ``meta.caption``, with their types."""
    for field in fields:
        kind = ColumnType(kind_of(field.type), str(field.type))
        yield prefix + field.name, kind
        if not kind.name.startswith("struct") or kind.kind == "image" or "." in field.name:  # see `look_up`
            continue
        if len({each.name for each in field.type}) == field.type.num_fields:
            yield from _types_in(field.type, f"{prefix}{field.name}.")


def kind_of(stored: Any) -> str:
    """Return what the values of a pyarrow type are; see `ColumnType`.

    Dictionaries, extensions, and the large, fixed and view forms of a type count as the type itself.
    """
    name = str(stored)
    if hasattr(stored, "storage_type"):
        return kind_of(stored.storage_type)
    if name.startswith(("dictionary", "run_end_encoded")):
        return kind_of(stored.value_type)
    if name in ("string", "large_string", "string_view"):
        return "text"
    if "binary" in name.partition("<")[0]:
        return "bytes"
    if name.startswith("struct"):
        fields = [stored.field(number) for number in range(stored.num_fields)]
        kinds = {field.name: kind_of(field.type) for field in fields}
        if len(kinds) < len(fields):
            return ""
        bytes_missing = any(field.name == "bytes" and str(field.type) == "null" for field in fields)
        if kinds.get("bytes") == "bytes" or (bytes_missing and kinds.get("path") == "text"):
            return "image"
        return "texts" if any(kinds.get(key) in ("text", "texts") for key in TEXT_KEYS) else ""
    if "list" in name.partition("<")[0]:
        if str(stored.value_type) == "uint8":
            return "bytes"
        return {"text": "texts", "texts": "texts", "image": "image"}.get(kind_of(stored.value_type), "")
    if name.lstrip("u").startswith("int") or name == "bool":
        return "integer"
    return "number" if name in ("float", "double", "halffloat") else ""


class TableStream(ABC):
    """Base of the rows of a table, read forward; see `vqclip.data.sources.packed.Stream`.

    A subclass sets `pieces` and `ranges`, and then calls `find_classes`.

    Args:
        config: the user's settings.
        schema: the table's pyarrow schema.
        name: the table, for messages.
        folder: the folder that relative paths of images refer to; None: paths are not read.
    """

    pieces: Sequence[Piece]
    ranges: Sequence[range]
    """Numbers of the rows of each piece in its file."""
    classnames: tuple[str, ...] = ()
    _unchecked = False
    """Whether the numbers of given classes may be from 1."""

    def __init__(self, config: TableConfig, schema: Any, name: str, folder: Path | None):
        self._config, self._name, self._folder, self._schema = config, name, folder, schema
        notes: list[str] = []
        self.columns = config.columns(schema, name, notes)
        chosen = filter(None, (self.columns.image, *self.columns.captions, self.columns.label, *self.columns.wanted))
        self.stored = list(dict.fromkeys(map(self._stored_name, chosen)))
        """Columns that are read, each once; of a key in a structure, the structure."""
        self.has_prompts = not self.columns.captions
        if split := next((name for name in schema.names if name.lower() == "split" and name not in self.stored), None):
            notes.append(f"rows of all values of column {split!r} are read; where: {{{split}: train}} reads some")
        self.notes: tuple[str, ...] = tuple(notes)

    def __str__(self) -> str:
        return self._name

    def _stored_name(self, column: str) -> str:
        return column if column in self._schema.names else column.partition(".")[0]

    def batch_size(self, columns: Sequence[str]) -> int:
        """Return the number of rows to decode at a time."""
        return BATCH if self._stored_name(self.columns.image) in columns else _LABELS

    @abstractmethod
    def rows(self, piece: int, start: int, columns: Sequence[str]) -> Iterator[Row]:
        """Yield number and values of the rows of a piece's file from a row on, to its end, or what is wrong."""

    def rows_of(self, piece: int, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a piece; see `rows`."""
        wanted = self.ranges[piece]
        return itertools.takewhile(lambda row: row[0] < wanted.stop, self.rows(piece, wanted.start, columns))

    def read(self, piece: int) -> Iterator[StreamSample]:
        """Yield the samples of a piece; see `Stream.read`. Where images may be at URLs, several are fetched at once."""
        groups, parse = self.group(piece), partial(self._parse, where=self.pieces[piece].name)
        if self._config.urls == "refuse":
            yield from map(parse, groups)
            return
        pool = ThreadPoolExecutor(_THREADS, "images")
        try:
            yield from map_ahead(pool, parse, groups, _AHEAD)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def find_classes(self, read_once: bool = False) -> None:
        """Find the classes of the label: of the settings, or of the features that `datasets` stores in the schema.

        Without these they are the values of the column.

        Args:
            read_once: the rows cannot be read in advance.

        Raises:
            ConfigError: nearly every row has its own class.
        """
        if (label := self.columns.label) is None:
            return
        given = self._config.classnames
        if not given:
            with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
                names = json.loads((self._schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
                given = tuple(names) if isinstance(names, list) and all(isinstance(each, str) for each in names) else ()
        classes = Classes.read(given, Path(self._name))
        self.columns = self.columns._replace(classes=classes)
        self._unchecked = bool(classes.names) and not read_once
        if read_once and not classes.names:
            raise ConfigError(f"{self}: classnames: missing; streaming does not find those in column {label!r}")
        if not classes.names:
            self._read_labels()
        self.classnames = classes.names
        if self.has_prompts:
            self.notes += classes.describe()

    def _read_labels(self) -> None:
        """Read the label of every row to find the classes, or to check the numbers of given ones."""
        classes, label, count = self.columns.classes, self.columns.label, 0
        assert classes is not None
        assert label is not None
        for piece in range(len(self.pieces)):
            chosen = dict.fromkeys(map(self._stored_name, (label, *self.columns.wanted)))
            for _, row in filter(self._is_wanted, self.rows_of(piece, [*chosen])):
                count += 1
                with contextlib.suppress(DataError):  # it is a bad sample when it is read
                    classes.number("" if isinstance(row, DataError) else plain_text(look_up(row, label)))
        classes.sort(count)

    def group(self, piece: int) -> Iterator[_Group]:
        """Yield the rows of a piece, those of one image and label together if they have captions.

        A group belongs to the piece in which its first row is.
        """
        wanted = self.ranges[piece]
        rows = self.rows(piece, max(wanted.start - 1, 0), self.stored)
        for _, same in itertools.groupby(rows, self._key_of):
            first = next(same)
            if first[0] >= wanted.stop:
                return
            same = filter(self._is_wanted, itertools.chain([first], same))
            if first[0] >= wanted.start and (found := next(same, None)):
                captions = (
                    {name: look_up(each, name) for name in self.columns.captions}
                    for _, each in same
                    if isinstance(each, Mapping)
                )
                yield _Group(found[0], [found[1], *captions])  # one image in memory

    def _is_wanted(self, numbered: Row) -> bool:
        return self.columns.wants(numbered[1])

    def _key_of(self, numbered: Row) -> object:
        """Return what neighbouring rows of one sample have in common; of a row that stays alone, its number."""
        number, row = numbered
        value = None if isinstance(row, DataError) else content_of(look_up(row, self.columns.image))
        if isinstance(row, DataError) or value is None or not self.columns.captions:
            return number
        return value, look_up(row, self.columns.label) if self.columns.label else None

    def _parse(self, group: _Group, where: str) -> StreamSample:
        """Return the sample of the rows of one image, or what is wrong."""
        sample: RawSample | DataError
        try:
            with name_sample(printable(f"{where}: row {group.row}", one_line=True)):
                sample = self._read(group.values)
        except StorageError:
            raise
        except DataError as error:
            sample = error
        return StreamSample(group.row, sample, len(group.values))

    def _read(self, rows: Sequence[Any]) -> RawSample:
        """Return the sample of the rows of one image, without captions if they are prompts.

        Raises:
            DataError: it is a bad sample.
            ConfigError: the numbers of given classes are not from 0, which is checked at the first wrong one.
        """
        if isinstance(rows[0], DataError):
            raise rows[0]
        try:
            captions, keys, label = self.columns.read(rows)
        except DataError as error:
            if error.kind == "class number" and self._unchecked:
                self._unchecked = False
                self._read_labels()
            raise
        key_of: dict[str, int] = {}
        for text, key in zip(captions, keys, strict=True):
            key_of.setdefault(text, key)
        what = f"the caption ({', '.join(self.columns.captions)})"
        texts = require_usable(key_of, what) if self.columns.captions else ()
        used = tuple(key_of.values()) if self._config.caption_weights else ()
        return RawSample(self._image(look_up(rows[0], self.columns.image)), texts, label, used)

    def _image(self, value: Any) -> bytes:
        if _is_list(value) and len(value) > 1:
            raise DataError(f"{self.columns.image} has {len(value)} images; expected one", "two members")
        data = content_of(value)
        if data and isinstance(data, str):
            path, data = data, from_base64(data)
            if data is None:
                return self._read_image(path)
        if not data:
            raise DataError(f"{self.columns.image} is null: it has no image", "missing member")
        return bytes(data)

    def _read_image(self, path: str) -> bytes:
        """Read or fetch the image at a path or URL."""
        self._config.require_allowed(path)
        if local_path(path) is not None:
            if self._folder is None:
                raise DataError("the image is a path; a table at a URL has images or URLs in it", "path outside")
            file = self._folder / resolve_path(path, self._folder)
            return read_image(file, str(file))
        try:
            data = fetch_bytes(path, self._config.remote, MAX_BYTES["image"])
            if _HTML.match(data):  # what servers send for images that are gone, with the status of success
                raise StorageError(f"{display_url(path)}: the server sent a page (HTML) instead of an image", "gone")
            return data
        except StorageError as error:
            if error.kind == "gone" and self._config.urls == "fetch_or_replace":
                raise DataError(str(error), "gone") from None
            raise


class _Group(NamedTuple):
    """Neighbouring rows of one image."""

    row: int
    """Number of the first."""
    values: Sequence[Any]
    """Their values, of those after the first the captions alone; or what is wrong with the only row."""


def content_of(value: Any) -> Any:
    """Return the bytes, path, URL or base64 text in a value of an image column; None if there is nothing."""
    if _is_list(value):
        return content_of(value[0]) if len(value) == 1 else None
    if isinstance(value, Mapping):
        return value.get("path") if value.get("bytes") is None else value["bytes"]
    return value


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of images rather than of bytes."""
    return isinstance(value, list) and not (value and isinstance(value[0], int))


def read_batch(batch: Any) -> Iterator[dict[str, Any] | DataError]:
    """Yield the rows of a pyarrow batch or table as values by column; one that cannot be read as an error."""
    names = batch.schema.names
    columns = [batch.column(number) for number in range(len(names))]
    for row in range(batch.num_rows):
        try:
            yield {name: column[row].as_py() for name, column in zip(names, columns, strict=True)}
        except Exception as error:  # such as text that is not UTF-8
            yield DataError(f"its values cannot be read ({' '.join(str(error).split())[:200]})", "damaged row")
