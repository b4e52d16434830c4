"""Source of image files that a CSV or TSV file lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.files import ListConfig
from vqclip.data.sources.prompts import DEFAULT_TEMPLATE, Templates
from vqclip.data.sources.table_files import find_column, read_rows
from vqclip.errors import DataError

__all__ = ["CsvConfig"]


class CsvConfig(ListConfig):
    """A table with a header and a row for each image: the path of its file, and captions or a class.

    Relative paths refer to the folder of the table, or to `images`; they cannot leave it. Absolute paths are read
    wherever they point to: use tables from people that you trust with the images on your machine.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"csv": (".csv",), "tsv": (".tsv",)}

    kind: Literal["csv", "tsv"] = "csv"
    """csv: columns are separated by commas; tsv: by tabs."""
    image: str = "filepath"
    """Column of the paths of the images."""
    captions: str | tuple[str, ...] | None = None
    """Column or columns of the captions. null: title; with `label`, the captions are the prompts of the class."""
    label: str | None = None
    """Column of the class of each image: its name, or its number in `classnames`, from 0."""
    classnames: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers; empty: the names in column `label`, sorted."""
    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name, which are the captions where there are only classes."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Character between columns; null: that of the kind."""
    quotes: bool = True
    """Fields may be in double quotes; false: quotes are ordinary characters, as in the tables of CC3M."""

    @model_validator(mode="after")
    def _columns_fit(self) -> CsvConfig:
        if self.captions == ():
            raise ValueError("captions: got an empty list; expected names of columns, or null")
        if self.classnames and self.label is None:
            raise ValueError("classnames: got them without label; expected the column of the classes")
        if self.separator in ('"', "\n", "\r"):
            raise ValueError(f"separator: got {self.separator!r}; expected another character")
        return self

    @property
    def has_classes(self) -> bool | None:
        """Return whether images have classes, if the configuration decides it."""
        return None if self.label is not None else False

    @property
    def _caption_columns(self) -> tuple[str, ...]:
        if self.captions is None:
            return ("title",) if self.label is None else ()
        return (self.captions,) if isinstance(self.captions, str) else self.captions

    def table(self) -> FileTable:
        """Read the table; raises DataError for a missing column or a damaged row."""
        builder, path = TableBuilder(), self.listing
        separator = self.separator or ("\t" if self.kind == "tsv" else ",")
        rows = read_rows(builder.read_from(path), separator, self.quotes)
        _, columns = next(rows)
        image = find_column(path, columns, self.image, "image")
        captions = [find_column(path, columns, name, "captions") for name in self._caption_columns]
        label = None if self.label is None else find_column(path, columns, self.label, "label")
        classes = _Classes(self.classnames, path)
        for number, row in rows:
            builder.add(
                row[image].strip(),
                [row[column] for column in captions],
                -1 if label is None else classes.number(row[label].strip(), number),
                number,
            )
        if not len(builder):
            raise DataError(f"{path}: no rows below the header; expected one for each image")
        table = builder.finish(templates=() if label is None or captions else self.templates)
        return table if label is None else classes.sort(table)


class _Classes:
    """Numbers the classes of a column.

    Args:
        names: the known classes; empty: they are found.
        path: the table, for messages.
    """

    def __init__(self, names: tuple[str, ...], path: Path):
        self._given, self._path = names, path
        self._numbers = {name: number for number, name in enumerate(names)}

    def number(self, value: str, row: int) -> int:
        """Return the number of a class; raises DataError for one that is not among the given names."""
        if not value:
            raise DataError(f"{self._path}: row {row}: the class is empty")
        if not self._given:
            return self._numbers.setdefault(value, len(self._numbers))
        if value in self._numbers:
            return self._numbers[value]
        if value.isascii() and value.isdigit() and len(value) < 19 and int(value) < len(self._given):
            return int(value)
        raise DataError(
            f"{self._path}: row {row}: class {value[:80]!r}; expected one of classnames, or its number, 0 to "
            f"{len(self._given) - 1}"
        )

    def sort(self, table: FileTable) -> FileTable:
        """Return the table with its class names, sorted unless they are given."""
        if self._given:
            return dataclasses.replace(table, classnames=self._given)
        if all(name.isascii() and name.isdigit() for name in self._numbers):
            raise DataError(f"{self._path}: the classes are numbers without names; set classnames")
        names = sorted(self._numbers)
        places = {name: place for place, name in enumerate(names)}
        order = np.array([places[name] for name in self._numbers], np.int64)
        return dataclasses.replace(table, labels=order[table.labels], classnames=tuple(names))
