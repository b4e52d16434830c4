"""Rows of a table as samples: which columns hold image, captions and label, and how their values are read.

    schema and settings  ->  find_columns  ->  RowParser(columns).parse(row)  ->  RawSample
    rows in order        ->  group_rows    ->  one sample for neighbouring rows of one image

Columns are read by what their values are: text in a dictionary column is text, however it is stored.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vqclip.data.remote import RemoteConfig, display_url, local_path, protocol_of
from vqclip.data.remote.shard import fetch_bytes
from vqclip.data.sources.base import RawSample
from vqclip.data.sources.captions import DEFAULT_TEMPLATE, Prompts, Templates, require_usable
from vqclip.data.sources.packed import PackedConfig, StreamSample
from vqclip.data.sources.reader import MAX_IMAGE_BYTES, read_image
from vqclip.errors import ConfigError, DataError, StorageError, printable, quote_names

__all__ = [
    "Columns",
    "Group",
    "RowParser",
    "TableConfig",
    "find_classes",
    "find_columns",
    "group_rows",
    "image_path",
    "is_base64",
    "kind_of",
    "parse_groups",
    "read_batch",
    "require_allowed",
]

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes", "image_data", "bytes")
_PATHS = ("image", "image_path", "filepath", "file_name", "path")
_OTHER_PATHS = ("img", "img_path", "filename", "file", "image_file", "image_name", "image_base64", "base64", "b64")
_URLS = ("url", "image_url", "img_url", "photo_image_url")
_CAPTIONS = ("caption", "captions", "text", "title")
_OTHER_CAPTIONS = ("texts", "sentence", "sentences", "description", "alt_text", "alt", "raw", "prompt", "comment")
_LABELS = ("label", "labels", "cls")
_OTHER_LABELS = ("class", "target", "category", "class_name", "classname", "class_id", "label_id", "species")
_TEXT_FIELDS = ("raw", "caption", "text", "sentence")
"""Field of a structure that holds its text, such as the sentences of Karpathy's files."""
_BASE64 = ("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")
"""Beginnings of images in base64."""
_MANY_CLASSES = 1000
"""With more classes than this, and a class for every second row, a column of texts is not one of classes."""


class TableConfig(PackedConfig):
    """Settings that all tables have in common.

    Names of columns are found in any case, if no column has exactly the name.
    """

    image: str | None = None
    """Column of the images: bytes, base64, a structure of `bytes` and `path` (as Hugging Face writes it), paths, or
    URLs. null: the only column of bytes or of such structures, otherwise one with a usual name, such as image, jpg,
    filepath."""
    captions: str | tuple[str, ...] | None = None
    """Columns of the captions: texts, or lists of texts. null: caption, captions, text or title, otherwise another
    usual name, such as sentences; without them, the captions are the prompts of the label's class."""
    label: str | None = None
    """Column of the classes: numbers from 0, or names. null: label, labels, cls, class, target or another usual name if
    no captions are found."""
    classnames: tuple[str, ...] = ()
    """Names of the classes; may be left out if the table has them (a ClassLabel of Hugging Face), or if the label is a
    column of names: then its values, sorted."""
    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name; used if the table has labels and no captions."""
    urls: Literal["refuse", "fetch", "fetch_or_replace"] = "refuse"
    """Images at URLs. refuse: an error. fetch: fetched once; one that cannot be fetched ends the run. fetch_or_replace:
    one that is gone for good (such as 404) is a bad sample, so that what is learned depends on the servers."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of what is at URLs."""


class Columns(NamedTuple):
    """Columns that are read."""

    image: str
    captions: tuple[str, ...]
    """Empty if the captions are prompts."""
    label: str | None
    classnames: tuple[str, ...]
    """Empty if they are the values of the label."""

    @property
    def names(self) -> list[str]:
        """All columns, each once."""
        return list(dict.fromkeys((self.image, *self.captions, *([self.label] if self.label else []))))


def kind_of(stored: Any) -> str:
    """Return what the values of a pyarrow type are: text, texts, bytes, image (a structure), integer, number, or "".

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
        if kinds.get("bytes") == "bytes":
            return "image"
        return "texts" if any(kinds.get(field) == "text" for field in _TEXT_FIELDS) else ""
    if "list" in name.partition("<")[0]:
        if str(stored.value_type) == "uint8":
            return "bytes"
        return "texts" if kind_of(stored.value_type) in ("text", "texts") else ""
    if name.lstrip("u").startswith("int"):
        return "integer"
    return "number" if name in ("float", "double", "halffloat") else ""


def find_columns(schema: Any, config: TableConfig, where: str) -> Columns:
    """Return the columns of a table: those of the configuration, otherwise those that are plain.

    Args:
        schema: the table's pyarrow schema.
        config: names that the user has given.
        where: the table, for messages.

    Raises:
        ConfigError: a column is missing, has a wrong type, or is not plain; the message lists all columns.
    """
    table = _Schema(schema, where)
    if len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"{where}: has two columns of one name; expected {table} once each")
    image = table.image(config)
    given = (config.captions,) if isinstance(config.captions, str) else config.captions
    if given is not None:
        captions = [table.require(name, "captions", ("text", "texts"), "text or lists of text") for name in given]
    else:
        captions = table.find("captions", (_CAPTIONS, _OTHER_CAPTIONS), ("text", "texts"), image)
    if config.image is not None and (image in captions or (given is None and not config.label and image in _CAPTIONS)):
        raise ConfigError(f"{where}: image: got {image!r}, a column of captions; set image to another of {table}")
    label, readable = config.label, ("integer", "number", "text")
    if label is not None:
        label = table.require(label, "label", readable, "class numbers or names")
    elif not captions:
        unread = [name for name in table.matching(_CAPTIONS + _OTHER_CAPTIONS) if name != image]
        if given is None and unread:
            raise ConfigError(
                f"{where}: captions: column {unread[0]!r} is {schema.field(unread[0]).type}; expected text or lists of "
                f"text. Set captions to another of {table}, or set label, whose prompts are then the captions"
            )
        (label,) = table.find("label", (_LABELS, _OTHER_LABELS), readable, image) or (None,)
        if label is None:
            raise ConfigError(
                f"{where}: captions: which column? None is called {', '.join(_CAPTIONS)}, and no column of classes "
                f"{', '.join(_LABELS)}; set captions or label to one of {table}"
            )
    if label is None and config.classnames:
        raise ConfigError(f"{where}: classnames: set, and no column is read as label; set label to one of {table}")
    classnames = config.classnames or (_class_label_names(schema, label) if label else ())
    if label is not None and not classnames and kind_of(schema.field(label).type) != "text":
        raise ConfigError(f"{where}: classnames: missing; expected the names of the classes in column {label!r}")
    return Columns(image, tuple(captions), label, classnames)


class _Schema:
    """The columns of a table, looked up by names of any case."""

    def __init__(self, schema: Any, where: str):
        self._schema, self._where = schema, where

    def __str__(self) -> str:
        names = dict.fromkeys(self._schema.names[:30])
        columns = [f"{name[:80]} ({str(self._schema.types[self._schema.names.index(name)])[:80]})" for name in names]
        return ", ".join(columns) + (", ..." if len(self._schema.names) > 30 else "")

    def kind(self, name: str) -> str:
        return kind_of(self._schema.field(name).type)

    def matching(self, wanted: Sequence[str]) -> list[str]:
        """Return the columns with one of these names, in any case, in the order of the table."""
        return [each for each in self._schema.names if each.strip().lower() in wanted]

    def find(self, key: str, tiers: Sequence[Sequence[str]], kinds: Sequence[str], image: str) -> list[str]:
        """Return the only column of these kinds with a usual name; those of the first tier go before the others."""
        for wanted in tiers:
            found = [name for name in self.matching(wanted) if name != image and self.kind(name) in kinds]
            if len(found) > 1:
                raise ConfigError(f"{self._where}: {key}: which column? It could be {', '.join(found)}; set {key}")
            if found:
                return found
        return []

    def require(self, given: str, key: str, kinds: Sequence[str], expected: str) -> str:
        """Return the column of a name that the user has given."""
        found = [given] if given in self._schema.names else self.matching([given.strip().lower()])
        if len(found) != 1:
            raise ConfigError(f"{self._where}: {key}: no column {given!r}; its columns: {self}")
        if self.kind(found[0]) not in kinds:
            stored = self._schema.field(found[0]).type
            raise ConfigError(f"{self._where}: {key}: column {given!r} is {stored}; expected {expected}")
        return found[0]

    def image(self, config: TableConfig) -> str:
        """Return the column of the images."""
        if config.image is not None:
            expected = "bytes, structs of bytes and path, or text"
            return self.require(config.image, "image", ("bytes", "image", "text"), expected)
        found = [name for name in self._schema.names if self.kind(name) in ("bytes", "image")]
        if len(found) > 1:
            found = [name for name in found if name in self.matching(_IMAGES)] or found
        for wanted in (_PATHS, _OTHER_PATHS, *([_URLS] if config.urls != "refuse" else [])):
            found = found or [name for name in self.matching(wanted) if self.kind(name) == "text"]
        if len(found) != 1:
            which = f"{', '.join(found)} could all be it" if found else "none is plainly it"
            hint = " If it is a column of URLs, set urls: fetch too." if self.matching(_URLS) and not found else ""
            raise ConfigError(f"{self._where}: image: which column? {which}; set image to one of {self}{hint}")
        return found[0]


def _class_label_names(schema: Any, label: str) -> tuple[str, ...]:
    """Return the class names that `datasets` stores in the metadata of its schemas; empty without them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def find_classes(values: Iterable[Sequence[Any]], column: str, where: str) -> tuple[str, ...]:
    """Return the class names in a column, sorted.

    Args:
        values: those of the column, in blocks.
        column: its name, for messages.
        where: the table, for messages.

    Raises:
        ConfigError: they are numbers without names, or nearly every row has its own.
    """
    found: set[str] = set()
    rows = 0
    for block in values:
        rows += len(block)
        found.update(name for each in block if isinstance(each, str) and (name := each.strip()))
    if all(name.isdecimal() for name in found):
        raise ConfigError(f"{where}: classnames: missing; expected the names of the classes in column {column!r}")
    if len(found) > _MANY_CLASSES and 2 * len(found) > rows:
        raise ConfigError(
            f"{where}: label: column {column!r} has {len(found)} different texts in {rows} rows; are they captions? "
            "Set captions to it, or classnames"
        )
    return tuple(sorted(found))


class RowParser:
    """Makes samples of the rows of a table.

    Args:
        columns: the columns that are read, with the names of all classes.
        config: prompts, and what to do with URLs.
        folder: the folder that relative paths of images refer to; None: paths are not read.
    """

    def __init__(self, columns: Columns, config: TableConfig, folder: Path | None):
        self.columns, self._config, self._folder = columns, config, folder
        self.templates = () if columns.captions or columns.label is None else config.templates
        self._prompts = Prompts(self.templates, columns.classnames)
        names = columns.classnames
        self._numbers = {name: number for number, name in enumerate(names) if names.count(name) == 1}

    def parse(self, rows: Sequence[Mapping[str, Any]], name: str) -> RawSample:
        """Return the sample of the rows of one image.

        Args:
            rows: values by column; the image is that of the first.
            name: the first row's name, for messages.

        Raises:
            DataError: it has no image, no caption or no valid class.
        """
        label = -1 if self.columns.label is None else self.label(rows[0][self.columns.label], name)
        captions = self._prompts.of(label, name) if self.templates else self.captions(rows, name)
        return RawSample(self._image(rows[0][self.columns.image], name), captions, label)

    def captions(self, rows: Sequence[Mapping[str, Any]], name: str) -> tuple[str, ...]:
        """Return the captions of rows, each once, without nulls and empty ones; raises DataError if none is left."""
        found: dict[str, None] = {}
        for row in rows:
            for column in self.columns.captions:
                texts = _texts(row[column], f"{name}: column {column!r}")
                found |= dict.fromkeys(text.strip() for text in texts if text.strip())
        if not found:
            shown = ", ".join(map(repr, self.columns.captions))
            raise DataError(f"{name}: no caption under {shown}; its columns: {quote_names(rows[0])}", "no caption")
        return require_usable(tuple(found), name)

    def label(self, value: Any, name: str) -> int:
        """Return the number of a class, from its number or name; raises DataError for another value."""
        names, number = self.columns.classnames, -1
        if isinstance(value, str):
            text = value.strip()
            number = self._numbers.get(text, -1)
            if number < 0 and text in names:
                raise DataError(
                    f"{name}: {self.columns.label} contains {text[:80]!r}, which is in classnames more than once; "
                    "expected class numbers",
                    "class number",
                )
            if number < 0 and text.isascii() and text.isdecimal() and len(text) < 19:
                number = int(text)
        elif isinstance(value, (int, float)) and value == value and value == int(value):
            number = int(value)
        self._prompts_of(number, f"{name}: {self.columns.label} contains {str(value)[:80]!r}")
        return number

    def _prompts_of(self, number: int, where: str) -> None:
        if not 0 <= number < len(self.columns.classnames):
            last = len(self.columns.classnames) - 1
            raise DataError(f"{where}; expected a class number, 0 to {last}, or one of classnames", "class number")

    def _image(self, value: Any, name: str) -> bytes:
        path = image_path(value)
        data = value["bytes"] if isinstance(value, Mapping) else value
        if path is not None:
            data = _from_base64(path)
            if data is None:
                return self._read(path, name)
        if data is None:
            raise DataError(f"{name}: {self.columns.image} is null: it has no image", "missing member")
        if len(data) > MAX_IMAGE_BYTES:
            raise DataError(f"{name}: image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are read", "too many bytes")
        return bytes(data)

    def _read(self, path: str, name: str) -> bytes:
        """Read or fetch the image at a path or URL."""
        require_allowed(path, self._config, name)
        try:
            if protocol_of(path) not in (None, "file"):
                return fetch_bytes(path, self._config.remote, MAX_IMAGE_BYTES)
            file = path if protocol_of(path) is None else local_path(path)
            if self._folder is None:
                raise DataError("the image is a path; a table at a URL has images or URLs in it", "path outside")
            if not path or os.path.normpath(file).split(os.sep, 1)[0] == os.pardir:
                raise DataError(f"{path!r}: no path of a file below {self._folder}", "path outside")
            return read_image(self._folder / file, str(self._folder / file))
        except StorageError as error:
            if error.kind == "gone" and self._config.urls == "fetch_or_replace":
                raise DataError(f"{name}: {error}", "gone") from None
            raise
        except DataError as error:
            raise DataError(f"{name}: {error}", error.kind) from None


def require_allowed(path: str, config: TableConfig, name: str) -> None:
    """Raise DataError, which begins with ``name``, for a URL that may not be fetched."""
    if protocol_of(path) not in (None, "file") and config.urls == "refuse":
        raise DataError(f"{name}: {display_url(path)}: URLs in tables are not fetched unless urls: fetch is set", "URL")


def image_path(value: Any) -> str | None:
    """Return the path, URL or base64 text in a value of an image column; None if it holds the image, or nothing."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else None
    return value if isinstance(value, str) else None


def _from_base64(text: str) -> bytes | None:
    """Return the image that a text holds in base64; None if the text is a path or URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    elif not text.startswith(_BASE64) or len(text) < 64:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def is_base64(text: str) -> bool:
    """Return whether a text is an image in base64, not a path or URL."""
    return _from_base64(text) is not None


def _texts(value: Any, name: str) -> Iterator[str]:
    """Yield the texts in a value: a text, a list of such values, or a structure with a usual field; nulls are skipped.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each, name)
    elif isinstance(value, Mapping) and (fields := [field for field in _TEXT_FIELDS if field in value]):
        yield from _texts(value[fields[0]], name)
    elif value is not None and value == value:  # pandas writes NaN for a missing text
        raise DataError(f"{name} contains a {type(value).__name__}; expected text or a list of texts", "damaged row")


class Group(NamedTuple):
    """Neighbouring rows of one image."""

    row: int
    """Number of the first."""
    values: list[dict[str, Any]] | DataError
    """Their values; the image is in the first alone. Or what is wrong with the only row."""


def group_rows(
    rows: Iterable[tuple[int, dict[str, Any] | DataError]], start: int, stop: int, columns: Columns
) -> Iterator[Group]:
    """Yield the rows from ``start`` to ``stop``, those of one image and label together if they have captions.

    A group belongs to the part of a table in which its first row is.

    Args:
        rows: number and values of the rows in order, from the row before ``start`` on, to the end of the table.
        start: first row.
        stop: row after the last.
        columns: the columns.
    """
    former: object = None
    group: Group | None = None
    for number, row in rows:
        key = None if isinstance(row, DataError) else _key_of(row, columns)
        continues, former = key is not None and key == former, key
        if continues and group is not None and isinstance(row, dict) and isinstance(group.values, list):
            group.values.append({**row, columns.image: None})
            continue
        if group is not None:
            yield group
            group = None
        if number >= stop:
            return
        if number >= start and not continues:  # otherwise it belongs to the part before
            group = Group(number, row if isinstance(row, DataError) else [row])
    if group is not None:
        yield group


def _key_of(row: Mapping[str, Any], columns: Columns) -> object:
    """Return what neighbouring rows of one sample have in common; None for a row that stays alone."""
    value = row[columns.image]
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None or not columns.captions:
        return None
    return value, row[columns.label] if columns.label else None


def read_batch(batch: Any) -> Iterator[dict[str, Any] | DataError]:
    """Yield the rows of a pyarrow batch or table as values by column; one that cannot be read as an error."""
    names = batch.schema.names
    columns = [batch.column(number) for number in range(len(names))]
    for row in range(batch.num_rows):
        try:
            yield {name: column[row].as_py() for name, column in zip(names, columns, strict=True)}
        except Exception as error:  # such as text that is not UTF-8
            yield DataError(f"its values cannot be read ({' '.join(str(error).split())[:200]})", "damaged row")


_THREADS, _AHEAD = 16, 64
"""Requests for images at a time, and samples that wait for their turn."""


def parse_groups(groups: Iterable[Group], parser: RowParser, where: str, fetches: bool) -> Iterator[StreamSample]:
    """Yield the samples of groups of rows, in order.

    Args:
        groups: see `group_rows`.
        parser: reads them.
        where: name of the table, for messages.
        fetches: whether images may be at URLs; then several are fetched at a time.
    """

    def parse(group: Group) -> StreamSample:
        name = printable(f"{where}: row {group.row}", one_line=True)
        if isinstance(group.values, DataError):
            prefix = "" if str(group.values).startswith(where) else f"{name}: "
            return StreamSample(group.row, DataError(f"{prefix}{group.values}", group.values.kind))
        try:
            return StreamSample(group.row, parser.parse(group.values, name), len(group.values))
        except StorageError:
            raise
        except DataError as error:
            return StreamSample(group.row, error, len(group.values))

    if not fetches:
        yield from map(parse, groups)
        return
    with ThreadPoolExecutor(_THREADS, "images") as pool:
        waiting: deque[Future[StreamSample]] = deque()
        for group in groups:
            waiting.append(pool.submit(parse, group))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
