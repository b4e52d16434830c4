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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vqclip.data.remote import RemoteConfig, display_url, local_path, protocol_of
from vqclip.data.remote.shard import fetch_bytes
from vqclip.data.sources.base import RawSample
from vqclip.data.sources.captions import DEFAULT_TEMPLATE, Templates, collect_captions
from vqclip.data.sources.csv_table import parse_cell
from vqclip.data.sources.file_table import TableBuilder
from vqclip.data.sources.listing import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    Classes,
    ClassNames,
    describe_ids,
    find_column,
    guess_captions,
    guess_column,
    plain_text,
)
from vqclip.data.sources.packed import PackedConfig, StreamSample, stamp
from vqclip.data.sources.reader import MAX_IMAGE_BYTES, read_image
from vqclip.errors import ConfigError, DataError, StorageError, printable, quote_names

__all__ = [
    "Group",
    "RowParser",
    "TableColumns",
    "TableConfig",
    "find_columns",
    "group_rows",
    "image_path",
    "is_base64",
    "kind_of",
    "parse_groups",
    "read_batch",
    "read_classes",
    "require_allowed",
]

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes", "image_data", "bytes")
_BASE64_COLUMNS = ("image_base64", "base64", "b64")
_URLS = ("url", "image_url")
_BASE64 = ("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")
"""Beginnings of images in base64."""
_MANY_CLASSES = 1000
"""With more classes than this, and a class for every second row, a column of texts is not one of classes."""
_THREADS, _AHEAD = 16, 64
"""Requests for images at a time, and samples that wait for their turn."""


class TableConfig(PackedConfig):
    """Settings that all tables have in common.

    Names of columns are found in any case, if no column has exactly the name.
    """

    image: str | None = None
    """Column of the images: bytes, base64, a structure of `bytes` and `path` (as Hugging Face writes it), paths, or
    URLs. null: the only column of bytes or of such structures, otherwise one with a usual name, such as filepath."""
    captions: str | tuple[str, ...] | None = None
    """Columns of the captions: texts, or lists of texts. null: a usual name, such as caption or text; without one, the
    captions are the prompts of the label's class."""
    label: str | None = None
    """Column of the classes: numbers from 0, or names. null: a usual name, such as label, if there are no captions."""
    classnames: ClassNames = ()
    """Names of the classes in the order of their numbers, or a file of them; may be left out if the table has them (a
    ClassLabel of Hugging Face), or if the label is a column of names: then its values, sorted."""
    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name; used if the table has labels and no captions."""
    urls: Literal["refuse", "fetch", "fetch_or_replace"] = "refuse"
    """Images at URLs. refuse: an error. fetch: fetched once; one that cannot be fetched ends the run. fetch_or_replace:
    one that is gone for good (such as 404) is a bad sample, so that what is learned depends on the servers."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of what is at URLs."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide samples, with the time of a file of class names."""
        found = self.model_dump(mode="json", exclude={"weight", "remote", "templates"})
        return {**found, "names": stamp([self.classnames]) if isinstance(self.classnames, Path) else None}


class TableColumns(NamedTuple):
    """Columns that are read."""

    image: str
    captions: tuple[str, ...]
    """Empty if the captions are prompts."""
    label: str | None
    classnames: tuple[str, ...]
    """Names of the classes in the table itself; empty without them."""
    notes: tuple[str, ...] = ()
    """Columns that were found by their names."""

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
        bytes_missing = any(field.name == "bytes" and str(field.type) == "null" for field in fields)
        if kinds.get("bytes") == "bytes" or (bytes_missing and kinds.get("path") == "text"):
            return "image"
        return "texts" if guess_column([each for each in kinds if kinds[each] == "text"], CAPTION_COLUMNS) else ""
    if "list" in name.partition("<")[0]:
        if str(stored.value_type) == "uint8":
            return "bytes"
        return "texts" if kind_of(stored.value_type) in ("text", "texts") else ""
    if name.lstrip("u").startswith("int"):
        return "integer"
    return "number" if name in ("float", "double", "halffloat") else ""


def find_columns(schema: Any, config: TableConfig, where: str) -> TableColumns:
    """Return the columns of a table: those of the configuration, otherwise those with usual names.

    Args:
        schema: the table's pyarrow schema.
        config: names that the user has given.
        where: the table, for messages.

    Raises:
        ConfigError: a column is missing, has a wrong type, or is not plain; the message lists all columns.
        DataError: no column has a name that the user has given.
    """
    if len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"{where}: has two columns of one name; expected {_show(schema)} once each")
    kinds = {name: kind_of(schema.field(name).type) for name in schema.names}
    guessed: list[str] = []

    def find_given(name: str, setting: str, allowed: Sequence[str], expected: str) -> str:
        found = find_column(schema.names, name, setting, Path(where))
        if kinds[found] not in allowed:
            stored = schema.field(found).type
            raise ConfigError(f"{where}: {setting}: column {found!r} is {stored}; expected {expected}")
        return found

    def guess(setting: str, allowed: Sequence[str], usual: Sequence[str], taken: str = "") -> str | None:
        found = guess_column([name for name in schema.names if kinds[name] in allowed and name != taken], usual)
        guessed.extend([f"{setting} {found!r}"] if found is not None else [])
        return found

    stored = [name for name in schema.names if kinds[name] in ("bytes", "image")]
    paths = [name for name in (*IMAGE_COLUMNS, *_BASE64_COLUMNS) if config.urls != "refuse" or name not in _URLS]
    if config.image is not None:
        image: str | None = find_given(
            config.image, "image", ("bytes", "image", "text"), "bytes, structs with bytes, or text"
        )
    elif len(stored) == 1:
        (image,) = stored
    else:
        image = guess("image", ("bytes", "image"), _IMAGES) if stored else guess("image", ("text",), paths)
    if image is None:
        which = f"{', '.join(stored)} could all be it" if stored else "none is plainly it"
        hint = " and urls: fetch, if they are URLs" if guess_column(schema.names, _URLS) else ""
        raise ConfigError(f"{where}: image: which column? {which}; set image to one of {_show(schema)}{hint}")
    captions: tuple[str, ...] = ()
    if config.captions is not None:
        names = (config.captions,) if isinstance(config.captions, str) else config.captions
        captions = tuple(find_given(name, "captions", ("text", "texts"), "text or lists of text") for name in names)
    else:
        captions = guess_captions([name for name in schema.names if kinds[name] in ("text", "texts") and name != image])
        guessed.extend(f"captions {name!r}" for name in captions)
    label = config.label
    if label is not None:
        label = find_given(label, "label", ("integer", "number", "text"), "class numbers or names")
    elif not captions:
        unread = guess_column([name for name in schema.names if name != image], CAPTION_COLUMNS)
        if config.captions is None and unread is not None:
            raise ConfigError(
                f"{where}: captions: column {unread!r} is {schema.field(unread).type}; expected text or lists of text. "
                f"Set captions to another of {_show(schema)}, or set label, whose prompts are then the captions"
            )
        label = guess("label", ("integer", "number", "text"), LABEL_COLUMNS, image)
        if label is None:
            raise ConfigError(
                f"{where}: captions: which column? None has a usual name of captions or of classes; set captions or "
                f"label to one of {_show(schema)}"
            )
    if label is None and config.classnames:
        raise ConfigError(
            f"{where}: classnames: set, and no column is read as label; set label to one of {_show(schema)}"
        )
    classnames = _class_label_names(schema, label) if label else ()
    if label is not None and not (config.classnames or classnames) and kinds[label] != "text":
        raise ConfigError(f"{where}: classnames: missing; expected the names of the classes in column {label!r}")
    others = [name for name in schema.names if name not in (image, label, *captions)]
    more = f" (others: {quote_names(others[:5])})" if others else ""
    notes = (f"columns found by their names: {', '.join(guessed)}{more}",) if guessed and others else ()
    return TableColumns(image, captions, label, classnames, notes)


def _show(schema: Any) -> str:
    columns = [f"{name[:80]} ({str(kind)[:80]})" for name, kind in zip(schema.names[:30], schema.types, strict=False)]
    return ", ".join(columns) + (", ..." if len(schema.names) > 30 else "")


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
        ConfigError: they are ids, or nearly every row has its own.
    """
    found: set[str] = set()
    rows = 0
    for block in values:
        rows += len(block)
        found.update(name for each in block if (name := plain_text(each)))
    if ids := describe_ids(sorted(found)):
        raise ConfigError(f"{where}: classnames: missing: {ids}")
    if len(found) > _MANY_CLASSES and 2 * len(found) > rows:
        raise ConfigError(
            f"{where}: label: column {column!r} has {len(found)} different texts in {rows} rows; are they captions? "
            "Set captions to it, or classnames"
        )
    return tuple(sorted(found))


def read_classes(
    columns: TableColumns, config: TableConfig, where: str, values: Callable[[], Iterable[Sequence[Any]]]
) -> Classes | None:
    """Return the classes of the label: those of the settings, of the table's features, or the values of the column.

    Args:
        columns: the columns.
        config: the user's choice.
        where: the table, for messages.
        values: reads the values of the label, in blocks.
    """
    if columns.label is None:
        return None
    classes = Classes.read(config.classnames or columns.classnames, Path(where), TableBuilder())
    return classes if classes.names else Classes(find_classes(values(), columns.label, where), Path(where))


class RowParser:
    """Makes samples of the rows of a table.

    Args:
        columns: the columns that are read.
        config: prompts, and what to do with URLs.
        classes: the classes of the label.
        folder: the folder that relative paths of images refer to; None: paths are not read.
    """

    def __init__(self, columns: TableColumns, config: TableConfig, classes: Classes | None, folder: Path | None):
        self.columns, self._config, self._classes, self._folder = columns, config, classes, folder
        self.classnames = () if classes is None else classes.names
        self.has_prompts = not columns.captions

    def parse(self, rows: Sequence[Mapping[str, Any]], name: str) -> RawSample:
        """Return the sample of the rows of one image, without captions if they are prompts.

        Args:
            rows: values by column; the image is that of the first.
            name: the first row's name, for messages.

        Raises:
            DataError: it has no image, no caption or no valid class.
        """
        columns, label = self.columns, -1
        captions: tuple[str, ...] = ()
        if self._classes is not None and columns.label is not None:
            try:
                label = self._classes.number(plain_text(rows[0][columns.label]))
            except DataError as error:  # of the settings, not of the row
                raise ConfigError(str(error)) from None
            except ValueError as error:
                raise DataError(f"{name}: {columns.label}: {error}", "class number") from None
        if columns.captions:
            texts = {column: [_in_cell(row[column]) for row in rows] for column in columns.captions}
            captions = collect_captions({**rows[0], **texts}, columns.captions, name, "column", "damaged row")
        return RawSample(self._image(rows[0][columns.image], name), tuple(dict.fromkeys(captions)), label)

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


def _in_cell(value: Any) -> Any:
    """Return the list or object that a text spells, as in cells of a CSV; other values as they are."""
    return parse_cell(value) if isinstance(value, str) else value


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


class Group(NamedTuple):
    """Neighbouring rows of one image."""

    row: int
    """Number of the first."""
    values: list[dict[str, Any]] | DataError
    """Their values; the image is in the first alone. Or what is wrong with the only row."""


def group_rows(
    rows: Iterable[tuple[int, dict[str, Any] | DataError]], start: int, stop: int, columns: TableColumns
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


def _key_of(row: Mapping[str, Any], columns: TableColumns) -> object:
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
    pool = ThreadPoolExecutor(_THREADS, "images")
    waiting: deque[Future[StreamSample]] = deque()
    try:
        for group in groups:
            waiting.append(pool.submit(parse, group))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
