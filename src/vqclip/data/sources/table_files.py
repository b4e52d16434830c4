"""Read tables of texts: CSV, TSV and JSON lines, row by row, with bounded memory."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from vqclip.config import did_you_mean
from vqclip.errors import DataError, quote_names
from vqclip.io.files import open_regular

__all__ = ["find_column", "read_json", "read_json_lines", "read_rows"]

_MAX_LINE = 1 << 20
"""Characters of a line. The csv module itself limits a field to 131,072."""
_MAX_JSON = 2 << 30


def _open_text(path: Path) -> TextIO:
    """Open a text file in UTF-8, with a byte order mark or without; raises DataError if it cannot be opened."""
    try:
        return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a table, a text file") from None


def _read_lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; raises DataError for one that is not UTF-8 or far too long."""
    number = 1
    try:
        while line := file.readline(_MAX_LINE + 1):
            if len(line) > _MAX_LINE:
                raise DataError(f"{path}: line {number}: more than {_MAX_LINE} characters; expected a row of a table")
            if "\0" in line:
                raise DataError(f"{path}: line {number}: contains a zero byte; expected text in UTF-8")
            yield line
            number += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: after line {number - 1}: not UTF-8 ({error.reason}); save the table as UTF-8"
        ) from None


def read_rows(path: Path, separator: str, quotes: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV or TSV file with their numbers: 1 is the header.

    Args:
        path: the file.
        separator: one character.
        quotes: fields may be in double quotes; if False, quotes are like other characters.

    Raises:
        DataError: a row has more or fewer columns than the header, or wrong quotes; the message names the row.
    """
    width, number = 0, 0
    with _open_text(path) as file:
        rows = csv.reader(
            _read_lines(path, file),
            delimiter=separator,
            strict=quotes,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        )
        try:
            for number, row in enumerate(rows, 1):
                width = width or len(row)
                if not row:  # a blank line
                    continue
                if len(row) != width:
                    raise DataError(
                        f"{path}: row {number}: {len(row)} columns, but the header has {width}; put texts that contain "
                        f"{separator!r} in double quotes"
                    )
                yield number, row
        except csv.Error as error:
            raise DataError(
                f"{path}: row {number + 1}: {error}; if quotes are ordinary characters in this table, set quotes: false"
            ) from None
    if not width:
        raise DataError(f"{path}: is empty; expected a header with the names of the columns")


def find_column(path: Path, columns: Sequence[str], name: str, key: str) -> int:
    """Return the place of a column; raises DataError if there is none, or several, of this name."""
    if columns.count(name) == 1:
        return columns.index(name)
    if name in columns:
        raise DataError(f"{path}: {columns.count(name)} columns are called {name!r}; give each its own name")
    hint = did_you_mean(difflib.get_close_matches(name, [each[:80] for each in columns[:1000]], n=1))
    if len(columns) == 1 and any(mark in columns[0] for mark in ",\t;"):
        mark = next(mark for mark in "\t;," if mark in columns[0])
        hint = f"; it has a single column, so the separator may be {mark!r} (separator)"
    raise DataError(f"{path}: {key}: no column {name!r}; its columns: {quote_names(columns)}{hint}")


def read_json(path: Path) -> Any:
    """Read a JSON file of at most 2 GiB; raises DataError if it cannot be read."""
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_JSON + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a JSON file") from None
    if len(data) > _MAX_JSON:
        raise DataError(f"{path}: more than {_MAX_JSON} bytes, which are not read")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {error}") from None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines with their numbers; raises DataError for a line that is none."""
    with _open_text(path) as file:
        for number, line in enumerate(_read_lines(path, file), 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: row {number}: is not JSON: {error}") from None
            if not isinstance(found, dict):
                raise DataError(f"{path}: row {number}: got a {type(found).__name__}; expected an object")
            yield number, found
