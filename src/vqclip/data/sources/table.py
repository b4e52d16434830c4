"""Tables that are read forward, of pyarrow's columns: the rows of Parquet files and of `datasets` as samples.

    schema, settings  ->  columns, classes
    rows in order     ->  neighbouring rows of one image  ->  their image, captions and class  ->  StreamSample

Columns are read by what their values are: text in a dictionary column is text, however it is stored.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vqclip.data.lookup import map_ahead
from vqclip.data.remote.files import fetch_bytes
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import display_url, local_path, protocol_of
from vqclip.data.sources.base import MAX_BYTES, RawSample, read_image
from vqclip.data.sources.class_names import Classes
from vqclip.data.sources.columns import (
    IMAGE_COLUMNS,
    TEXT_KEYS,
    ColumnConfig,
    Columns,
    ColumnType,
    Row,
    choose_columns,
    collect_captions,
    guess_columns,
    look_up,
    parse_text,
    plain_text,
)
from vqclip.data.sources.files import from_base64, resolve_path
from vqclip.data.sources.packed import PackedConfig, Piece, StreamSample, stamp
from vqclip.errors import ConfigError, DataError, StorageError, printable

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes", "image_data", "bytes")
_BASE64_COLUMNS = ("image_base64", "base64", "b64", "image_bytes", "image_data", "bytes")
_URLS = ("url", "image_url")
_HTML = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_MANY_CLASSES = 1000
"""With more classes than this, and a class for every second row, a column of texts is not one of classes."""
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

    def require_allowed(self, path: str, name: str) -> None:
        """Raise DataError, which begins with ``name``, for a URL that may not be fetched."""
        if protocol_of(path) not in (None, "file") and self.urls == "refuse":
            url = display_url(path)
            raise DataError(f"{name}: {url}: URLs in tables are not fetched unless urls: fetch is set", "URL")


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

    A subclass sets `pieces` and `ranges`.

    Args:
        config: the user's settings.
        schema: the table's pyarrow schema.
        name: the table, for messages.
        folder: the folder that relative paths of images refer to; None: paths are not read.
    """

    pieces: Sequence[Piece]
    ranges: Sequence[range]
    """Numbers of the rows of each piece in its file."""

    def __init__(self, config: TableConfig, schema: Any, name: str, folder: Path | None):
        self._config, self._name, self._folder = config, name, folder
        notes: list[str] = []
        columns = config.columns(schema, name, notes)
        self.image, self.captions, self.label = columns
        chosen = filter(None, (self.image, *self.captions, self.label))
        self.columns = list(dict.fromkeys(each if each in schema.names else each.partition(".")[0] for each in chosen))
        """Columns that are read, each once; of a key in a structure, the structure."""
        self.has_prompts = not self.captions
        self.notes: tuple[str, ...] = tuple(notes)
        self._classes = None if self.label is None else self._read_classes(schema, self.label)
        self.classnames: tuple[str, ...] = () if self._classes is None else self._classes.names
        if len(self.classnames) == 1 and self.has_prompts:
            self.notes += (
                f"all rows are of one class, {self.classnames[0][:80]!r}: prompts tell no image from another",
            )

    def __str__(self) -> str:
        return self._name

    @abstractmethod
    def rows(self, piece: int, start: int) -> Iterator[Row]:
        """Yield number and values of the rows of a piece's file from a row on, to its end, or what is wrong."""

    @abstractmethod
    def values(self, column: str) -> Iterator[list[Any]]:
        """Yield the values of a column of all rows, in blocks.

        Raises:
            ConfigError: the table would have to be read twice.
        """

    def read(self, piece: int) -> Iterator[StreamSample]:
        """Yield the samples of a piece; see `Stream.read`. Where images may be at URLs, several are fetched at once."""
        rows, parse = self.ranges[piece], partial(self._parse, where=self.pieces[piece].name)
        groups = self._group(self.rows(piece, max(rows.start - 1, 0)), rows)
        if self._config.urls == "refuse":
            yield from map(parse, groups)
            return
        pool = ThreadPoolExecutor(_THREADS, "images")
        try:
            yield from map_ahead(pool, parse, groups, _AHEAD)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read_classes(self, schema: Any, label: str) -> Classes:
        """Return the classes of the label: of the settings, or of the features that `datasets` stores in the schema.

        Without these they are the values of the column.

        Raises:
            ConfigError: nearly every row has its own class.
        """
        given = self._config.classnames
        if not given:
            with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
                names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
                given = tuple(names) if isinstance(names, list) and all(isinstance(each, str) for each in names) else ()
        classes, rows = Classes.read(given, Path(self._name)), 0
        if classes.names:
            return classes
        for block in self._labels(label):
            rows += len(block)
            for name in filter(None, block):
                classes.number(name)
        classes.sort()
        count = len(classes.names)
        if count > _MANY_CLASSES and 2 * count > rows:
            raise ConfigError(
                f"{self}: label: column {label!r} has {count} texts in {rows} rows; set captions to it, or classnames"
            )
        return classes

    def _labels(self, label: str) -> Iterator[list[str]]:
        """Yield the label of each row, in blocks; "" for a null."""
        column = label if label in self.columns else label.partition(".")[0]
        for block in self.values(column):
            yield [plain_text(look_up({column: value}, label)) for value in block]

    @cached_property
    def _counts_from_one(self) -> bool:
        """Return whether the labels are 1 to the number of names; False for a stream, which is not read twice."""
        with contextlib.suppress(ConfigError, DataError):
            found = {name for block in self._labels(self.label or "") for name in block}
            return "0" not in found and found.issuperset(map(str, range(1, len(self.classnames) + 1)))
        return False

    def _group(self, rows: Iterable[Row], wanted: range) -> Iterator[_Group]:
        """Yield the rows with the wanted numbers, those of one image and label together if they have captions.

        A group belongs to the piece in which its first row is. The rows begin with the one before the wanted ones.
        """
        former: object = None
        group: _Group | None = None
        for number, row in rows:
            key = None if isinstance(row, DataError) else self._key_of(row)
            continues, former = key is not None and key == former, key
            if continues and group is not None and not isinstance(row, DataError) and isinstance(group.values, list):
                group.values.append({column: look_up(row, column) for column in self.captions})
                continue
            if group is not None:
                yield group
                group = None
            if number >= wanted.stop:
                return
            if number >= wanted.start and not continues:  # otherwise it belongs to the piece before
                group = _Group(number, row if isinstance(row, DataError) else [row])
        if group is not None:
            yield group

    def _key_of(self, row: Mapping[str, Any]) -> object:
        """Return what neighbouring rows of one sample have in common; None for a row that stays alone."""
        value = content_of(look_up(row, self.image))
        if value is None or not self.captions:
            return None
        return value, look_up(row, self.label) if self.label else None

    def _parse(self, group: _Group, where: str) -> StreamSample:
        """Return the sample of the rows of one image, without captions if they are prompts; or what is wrong."""
        name, rows = printable(f"{where}: row {group.row}", one_line=True), group.values
        if isinstance(rows, DataError):
            prefix = "" if str(rows).startswith(where) else f"{name}: "
            return StreamSample(group.row, DataError(f"{prefix}{rows}", rows.kind))
        try:
            label = -1
            captions: dict[str, int] = {}
            if self._classes is not None and self.label is not None:
                found = plain_text(look_up(rows[0], self.label))
                try:
                    label = self._classes.number(found)
                except DataError as error:  # of the settings, not of the row
                    raise ConfigError(str(error)) from None
                except ValueError as error:
                    if found == str(len(self.classnames)) and self._counts_from_one:
                        raise self._classes.not_from_zero(self) from None
                    raise DataError(f"{name}: {self.label}: {error}", "class number") from None
            if self.captions:
                texts = {column: [parse_text(look_up(row, column)) for row in rows] for column in self.captions}
                pairs = collect_captions({**rows[0], **texts}, self.captions, name, "column", "damaged row")
                for text, number in zip(*pairs, strict=True):
                    captions.setdefault(text, number)
            keys = tuple(captions.values()) if self._config.caption_weights else ()
            sample = RawSample(self._image(look_up(rows[0], self.image), name), tuple(captions), label, keys)
        except StorageError:
            raise
        except DataError as error:
            return StreamSample(group.row, error, len(rows))
        return StreamSample(group.row, sample, len(rows))

    def _image(self, value: Any, name: str) -> bytes:
        if _is_list(value) and len(value) > 1:
            raise DataError(f"{name}: {self.image} has {len(value)} images; expected one", "two members")
        data = content_of(value)
        if data and isinstance(data, str):
            path, data = data, from_base64(data)
            if data is None:
                return self._read_image(path, name)
        if not data:
            raise DataError(f"{name}: {self.image} is null: it has no image", "missing member")
        return bytes(data)

    def _read_image(self, path: str, name: str) -> bytes:
        """Read or fetch the image at a path or URL."""
        self._config.require_allowed(path, name)
        try:
            if local_path(path) is None:
                data = fetch_bytes(path, self._config.remote, MAX_BYTES["image"])
                if _HTML.match(data):  # what servers send for images that are gone, with the status of success
                    raise StorageError(
                        f"{display_url(path)}: the server sent a page (HTML) instead of an image", "gone"
                    )
                return data
            if self._folder is None:
                raise DataError("the image is a path; a table at a URL has images or URLs in it", "path outside")
            file = self._folder / resolve_path(path, self._folder)
            return read_image(file, str(file))
        except StorageError as error:
            if error.kind == "gone" and self._config.urls == "fetch_or_replace":
                raise DataError(f"{name}: {error}", "gone") from None
            raise
        except DataError as error:
            raise DataError(f"{name}: {error}", error.kind) from None


class _Group(NamedTuple):
    """Neighbouring rows of one image."""

    row: int
    """Number of the first."""
    values: list[Mapping[str, Any]] | DataError
    """Their values; those after the first have captions alone. Or what is wrong with the only row."""


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
