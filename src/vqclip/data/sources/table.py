"""Rows of a table as samples: which columns hold image, captions and label, and how their values are read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vqclip.data.remote import RemoteConfig, display_url, fetch_image, local_path, protocol_of
from vqclip.data.sources.base import RawSample, SourceConfigBase
from vqclip.data.sources.captions import collect_captions
from vqclip.data.sources.prompts import DEFAULT_TEMPLATE, Prompts, Templates
from vqclip.data.sources.reader import MAX_IMAGE_BYTES, read_image
from vqclip.errors import ConfigError, DataError, StorageError

__all__ = ["Columns", "RowParser", "TableConfig", "find_columns", "holds_image", "image_path"]

_IMAGE_NAMES = ("image", "image_path", "filepath", "file_name", "path")
"""Columns of text that are plainly paths of images, if no column holds images themselves."""
_CAPTION_NAMES = ("caption", "captions", "text", "title")
_LABEL_NAMES = ("label", "labels", "cls")


class TableConfig(SourceConfigBase):
    """Settings that all tables have in common."""

    image: str | None = None
    """Column of the images: bytes, a struct of `bytes` and `path` (as Hugging Face writes it), paths, or URLs. null:
    the only column of bytes or of such structs, otherwise image, image_path, filepath, file_name or path."""
    captions: str | tuple[str, ...] | None = None
    """Columns of the captions: texts, or lists of texts. null: caption, captions, text or title; without them, the
    captions are the prompts of the label's class."""
    label: str | None = None
    """Column of class numbers, from 0. null: label, labels or cls if no captions are found."""
    classnames: tuple[str, ...] = ()
    """Names of the classes; may be left out if the table has them (a ClassLabel of Hugging Face)."""
    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name; used if the table has labels and no captions."""
    urls: Literal["refuse", "fetch", "fetch_or_replace"] = "refuse"
    """Images at URLs. refuse: an error. fetch: fetched into the cache; one that cannot be fetched ends the run.
    fetch_or_replace: one that is gone for good (such as 404) is a bad sample, so that what is learned depends on the
    servers."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of what is at URLs."""


class Columns(NamedTuple):
    """Columns that are read."""

    image: str
    captions: tuple[str, ...]
    """Empty if the captions are prompts."""
    label: str | None
    classnames: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All columns, each once."""
        return list(dict.fromkeys((self.image, *self.captions, *([self.label] if self.label else []))))


def find_columns(schema: Any, config: TableConfig, where: str) -> Columns:
    """Return the columns of a table: those of the configuration, otherwise those that are plain.

    Args:
        schema: the table's pyarrow schema.
        config: names that the user has given.
        where: the table, for messages.

    Raises:
        ConfigError: a column is missing, has a wrong type, or is not plain; the message lists all columns.
    """
    if len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"{where}: has two columns of one name; expected {_show(schema)} once each")
    given = (config.captions,) if isinstance(config.captions, str) else config.captions
    image = _find_image(schema, config.image, where)
    captions = given if given is not None else _only(schema, _CAPTION_NAMES, _is_text, "captions", where, image)
    for name in captions:
        _require(schema, name, "captions", _is_text, "text or lists of text", where)
    if config.image is not None and config.image in (captions or (() if config.label else _CAPTION_NAMES)):
        raise ConfigError(
            f"{where}: image: got {image!r}, a column of captions; set image to another of {_show(schema)}"
        )
    label = config.label
    if label is None and not captions:
        (label,) = _only(schema, _LABEL_NAMES, _is_integer, "label", where, image) or (None,)
        if label is None:
            raise ConfigError(
                f"{where}: captions: which column? None is called {', '.join(_CAPTION_NAMES)}, and no column of "
                f"integers {', '.join(_LABEL_NAMES)}; set captions or label to one of {_show(schema)}"
            )
    classnames = config.classnames
    if label is not None:
        _require(schema, label, "label", _is_integer, "integers", where)
        classnames = classnames or _class_label_names(schema, label)
        if not classnames:
            raise ConfigError(f"{where}: classnames: missing; expected the names of the classes in column {label!r}")
    elif classnames:
        raise ConfigError(
            f"{where}: classnames: set, and no column is read as label; set label to one of {_show(schema)}"
        )
    return Columns(image, tuple(captions), label, classnames)


def _find_image(schema: Any, name: str | None, where: str) -> str:
    if name is not None:
        expected = "bytes, structs of bytes and path, or text"
        _require(schema, name, "image", lambda kind: _is_image(kind) or _is_string(kind), expected, where)
        return name
    found = [each for each in schema.names if _is_image(schema.field(each).type)]
    found = found or [each for each in _IMAGE_NAMES if each in schema.names and _is_string(schema.field(each).type)]
    if len(found) != 1:
        which = f"{', '.join(found)} could all be it" if found else "none is plainly it"
        raise ConfigError(f"{where}: image: which column? {which}; set image to one of {_show(schema)}")
    return str(found[0])


def _only(schema: Any, names: tuple[str, ...], fits: Any, key: str, where: str, image: str) -> tuple[str, ...]:
    found = [each for each in names if each in schema.names and fits(schema.field(each).type) and each != image]
    if len(found) > 1:
        raise ConfigError(f"{where}: {key}: which column? It could be {', '.join(found)}; set {key}")
    return tuple(found)


def _require(schema: Any, name: str, key: str, fits: Any, expected: str, where: str) -> None:
    if name not in schema.names:
        raise ConfigError(f"{where}: {key}: no column {name!r}; its columns: {_show(schema)}")
    if not fits(schema.field(name).type):
        raise ConfigError(f"{where}: {key}: column {name!r} is {schema.field(name).type}; expected {expected}")


def _show(schema: Any) -> str:
    columns = [
        f"{name[:80]} ({str(schema.field(schema.names.index(name)).type)[:80]})"
        for name in dict.fromkeys(schema.names[:30])
    ]
    return ", ".join(columns) + (", ..." if len(schema.names) > 30 else "")


def _is_string(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_bytes(kind: Any) -> bool:
    return str(kind) in ("binary", "large_binary", "binary_view")


def _is_image(kind: Any) -> bool:
    names = [kind.field(number).name for number in range(kind.num_fields)] if str(kind).startswith("struct") else []
    return _is_bytes(kind) or (names.count("bytes") == 1 and _is_bytes(kind.field("bytes").type))


def _is_text(kind: Any) -> bool:
    return _is_string(kind) or ("list" in str(kind).partition("<")[0] and _is_string(kind.value_type))


def _is_integer(kind: Any) -> bool:
    return str(kind) in {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _class_label_names(schema: Any, label: str) -> tuple[str, ...]:
    """Return the class names that `datasets` stores in the metadata of its schemas; empty without them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


class RowParser:
    """Makes samples of the rows of a table.

    Args:
        columns: the columns that are read.
        config: prompts, and what to do with URLs.
    """

    def __init__(self, columns: Columns, config: TableConfig):
        self.columns, self._config = columns, config
        self.classnames = columns.classnames
        self.templates = () if columns.captions or columns.label is None else config.templates
        self._prompts = Prompts(self.templates, self.classnames)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Settings that change samples."""
        columns = self.columns
        found = {"image": columns.image, "captions": list(columns.captions), "label": columns.label}
        return {**found, "prompts_sha256": self._prompts.sha256}

    def parse(self, row: Mapping[str, Any], name: str) -> RawSample:
        """Return the sample of a row.

        Args:
            row: values by column.
            name: the row's name, for messages.

        Raises:
            DataError: it has no image, no caption or no valid class number.
        """
        captions, label = self.texts(row, name)
        if not captions:
            captions = self._prompts.of(label, name) if self.templates else self._captions(row, name)
        return RawSample(self._image(row[self.columns.image], name), captions, label)

    def texts(self, row: Mapping[str, Any], name: str) -> tuple[tuple[str, ...], int]:
        """Return captions and label of a row; no captions if it has none, or if they are prompts.

        Raises:
            DataError: the class number is not valid.
        """
        label = -1 if self.columns.label is None else self._label(row[self.columns.label], name)
        with contextlib.suppress(DataError):  # `parse` reports it
            return () if self.templates else self._captions(row, name), label
        return (), label

    def _captions(self, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
        return collect_captions(row, self.columns.captions, name, "column", "damaged row")

    def _label(self, value: Any, name: str) -> int:
        number = value if isinstance(value, int) else -1
        self._prompts.of(number, f"{name}: {self.columns.label} contains {str(value)[:20]!r}")
        return number

    def _image(self, value: Any, name: str) -> bytes:
        path = image_path(value)
        if path is not None:
            return self._fetch(path, name)
        data = value["bytes"] if isinstance(value, Mapping) else value
        if data is None:
            raise DataError(f"{name}: {self.columns.image} is null: it has no image", "missing member")
        if len(data) > MAX_IMAGE_BYTES:
            raise DataError(f"{name}: image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are read", "too many bytes")
        return bytes(data)

    def _fetch(self, path: str, name: str) -> bytes:
        try:
            if protocol_of(path) in (None, "file"):
                file = Path(path if protocol_of(path) is None else local_path(path))
                if not file.is_absolute():
                    raise DataError(
                        f"{path}: a relative path beside images or URLs; expected one of them in all rows",
                        "path outside",
                    )
                return read_image(file, path)
            if self._config.urls == "refuse":
                raise DataError(f"{display_url(path)}: URLs in tables are not fetched unless urls: fetch is set", "URL")
            return fetch_image(path, self._config.remote, MAX_IMAGE_BYTES)
        except StorageError as error:
            if error.kind == "gone" and self._config.urls == "fetch_or_replace":
                raise DataError(f"{name}: {error}", "gone") from None
            raise
        except DataError as error:
            raise DataError(f"{name}: {error}", error.kind) from None


def image_path(value: Any) -> str | None:
    """Return the path or URL in a value of an image column; None if it holds the image, or nothing."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else None
    return value if isinstance(value, str) else None


def holds_image(value: Any) -> bool:
    """Return whether a value of an image column is the image itself."""
    return isinstance(value.get("bytes") if isinstance(value, Mapping) else value, bytes)
