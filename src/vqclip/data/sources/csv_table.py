"""Source of image files that a CSV or TSV file lists."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TextIO

from pydantic import BeforeValidator, Field

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.listing import ListConfig, Row
from vqclip.errors import DataError, printable
from vqclip.io.files import open_regular

__all__ = ["CsvConfig", "is_utf8", "parse_cell", "read_table", "read_text"]

_MAX_LINE = 1 << 20
"""Characters of a line. The csv module itself limits a field to 131,072."""
_MAX_LINES = 200
"""Lines of a row, whose texts in quotes may have line breaks."""
_SAMPLED = 50
"""First lines, from which the separator is found out."""
_SEPARATORS = (",", "\t", ";", "|")
_WORDS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "\\|": "|", "space": " "}
_URL = re.compile(r"[a-z][a-z0-9+]*://")


def _to_separator(value: object) -> object:
    value = _WORDS.get(value, value) if isinstance(value, str) else value
    if value in ('"', "\n", "\r"):
        raise ValueError(f"got {value!r}; expected another character, or tab")
    return value


class CsvConfig(ListConfig):
    """A table with a header and a row for each image, or for each caption of one.

    Rows of the same image are one sample with several captions. A row that cannot be used is a bad sample.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"csv": (".csv", ".txt", ".token"), "tsv": (".tsv", ".tab")}

    kind: Literal["csv", "tsv"] = "csv"
    """csv: columns are usually separated by commas; tsv: by tabs."""
    separator: Annotated[str, BeforeValidator(_to_separator), Field(min_length=1, max_length=1)] | None = None
    """Character between columns, or `tab`. null: a comma or a tab as the kind says, or what the first lines have
    instead: comma, tab, ";" or "|"."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a table without a header."""
    quotes: bool = True
    """Fields may be in double quotes; false: quotes are ordinary characters, as in the tables of CC3M."""
    encoding: str | None = None
    """Encoding of the file, such as latin-1; null: UTF-8, or UTF-16 with its mark."""

    def table(self) -> FileTable:
        """Read the table; raises DataError for a missing column, or one without rows."""
        builder, path = TableBuilder(), self.listing
        builder.read_from(path)
        default = "\t" if self.kind == "tsv" else ","
        return self.list_rows(
            read_table(path, self.separator, default, self.quotes, self.columns, self.encoding, builder.notes), builder
        )


def read_table(
    path: Path,
    separator: str | None = None,
    default: str = ",",
    quotes: bool = True,
    columns: Sequence[str] = (),
    encoding: str | None = None,
    notes: list[str] | None = None,
) -> Iterator[Row]:
    """Yield the rows below the header of a CSV or TSV file; 1 is the number of the header.

    Args:
        path: the file.
        separator: one character; None finds it out.
        default: the separator to prefer.
        quotes: fields may be in double quotes; if False, quotes are like other characters.
        columns: names of the columns of a file without a header.
        encoding: see `CsvConfig`.
        notes: gets remarks.

    Raises:
        DataError: the file cannot be read, is empty, or seems to have no header.
    """
    notes = [] if notes is None else notes
    with _open_text(path, encoding) as file:
        lines = _read_lines(path, file)
        first = list(itertools.islice(lines, _SAMPLED))
        if first and (match := re.fullmatch(r'"?sep=(.)"?\s*', first[0])):  # Excel's
            separator, first = separator or match[1], first[1:]
        if separator is None:
            separator = max((default, *_SEPARATORS), key=lambda each: _share(first, each))
        unbalanced: list[int] = []
        rows = _parse(itertools.chain(first, lines), separator, quotes, unbalanced)
        header = next(((number, cells) for number, cells in rows if any(map(str.strip, cells))), None)
        if header is None:
            raise DataError(f"{path}: is empty; expected a header with the names of the columns")
        cells = [cell.strip() for cell in header[1]]
        names = [*columns] or cells
        if not columns and any(map(_is_image, cells)):
            names = _name_columns(path, cells, notes)
        if names != cells:
            rows = itertools.chain([header], rows)
        while len(names) > 1 and not names[-1]:
            names.pop()
        for name, count in Counter(filter(None, names)).items():
            if count > 1:
                notes.append(f"{count} columns are called {name!r}; the first is read")
        yield from _check(rows, names, separator)
    if unbalanced:
        notes.append(
            f"{len(unbalanced)} rows, such as {unbalanced[0]}, have a quote that does not close; their quotes are "
            "ordinary characters"
        )


def _check(rows: Iterator[tuple[int, list[str]]], names: Sequence[str], separator: str) -> Iterator[Row]:
    """Yield the rows with their columns by name, those of another width or with damaged text as problems."""
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        if name:
            places.setdefault(name, place)
    for number, cells in rows:
        while len(cells) > len(names) and not cells[-1].strip():
            cells.pop()
        if not any(map(str.strip, cells)):
            continue
        if (problem := _problem(cells, len(names), separator)) is not None:
            yield Row(number, {}, problem)
        else:
            yield Row(number, {name: parse_cell(cells[place]) for name, place in places.items()})


def _problem(cells: Sequence[str], width: int, separator: str) -> str | None:
    text = separator.join(cells)
    if not is_utf8(text):
        return f"not UTF-8: {printable(text[:80])}; if the table has another encoding, set encoding, such as latin-1"
    if "\0" in text:
        return "contains a zero byte"
    if len(text) > _MAX_LINE:
        return f"more than {_MAX_LINE} characters; expected a row of a table"
    if len(cells) > width:
        return f"{len(cells)} columns, but the header has {width}; texts that contain {separator!r} need double quotes"
    if len(cells) < width:
        return f"{len(cells)} columns, but the header has {width}"
    return None


def parse_cell(cell: str) -> object:
    """Return the list of texts or the object in a cell, as pandas writes them; other cells as they are."""
    text = cell.strip()
    if text[:2] not in ('["', "['", '{"', "{'") or text[-1] not in "]}":
        return cell
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict) or (isinstance(found, list) and all(isinstance(each, str) for each in found)):
            return found
    return cell


def _name_columns(path: Path, cells: Sequence[str], notes: list[str]) -> list[str]:
    """Return names for the columns of a table whose first row looks like data; raises DataError if it is not plain."""
    shown = ", ".join(repr(printable(cell[:60])) for cell in cells[:5])
    image = next(place for place, cell in enumerate(cells) if _is_image(cell))
    if len(cells) == 2 and not _URL.match(cells[image]):
        other = "label" if re.fullmatch(r"\d+", cells[1 - image].strip()) else "caption"
        names = ["image", other] if image == 0 else [other, "image"]
        notes.append(f"no header: the first row is {shown}; columns: {names} are assumed, columns names others")
        return names
    raise DataError(
        f"{path}: seems to have no header, since its first row is {shown}; name the columns, such as columns: "
        "[caption, image]"
    )


def _is_image(cell: str) -> bool:
    text = cell.strip().lower()
    return bool(_URL.match(text)) or re.sub(r"#\d+$", "", text).endswith(IMAGE_ENDINGS)


def _share(lines: Sequence[str], separator: str) -> float:
    """Return the share of lines that a separator divides into as many columns as the first one."""
    widths = [line.count(separator) for line in lines if line.strip()]
    return widths.count(widths[0]) / len(widths) if widths and widths[0] else 0.0


def _parse(
    lines: Iterator[str], separator: str, quotes: bool, unbalanced: list[int]
) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each row.

    A row continues in the next lines while a quote is open. If it never closes, or the next line is a row of its own,
    its quotes are ordinary characters; the numbers of such rows are appended to ``unbalanced``.
    """
    waiting: deque[str] = deque()

    def following() -> str | None:
        return waiting.popleft() if waiting else next(lines, None)

    number = 0
    while (line := following()) is not None:
        number += 1
        plain = line.rstrip("\r\n").split(separator)
        if not quotes or '"' not in line:
            yield number, plain
            continue
        taken = [line]
        cells = _split(taken, separator)
        while cells is None and len(taken) < _MAX_LINES and (more := following()) is not None:
            taken.append(more)
            alone = more.rstrip("\r\n").split(separator)
            if len(alone) == len(plain) and any(map(_is_image, alone)):
                break
            cells = _split(taken, separator)
        if not cells:
            unbalanced.append(number)
            waiting.extendleft(reversed(taken[1:]))
        yield number, cells or plain


def _split(lines: Sequence[str], separator: str) -> list[str] | None:
    """Return the cells of a row; None if a quote is open at its end, none if one is where it does not belong."""
    try:
        (row,) = csv.reader(lines, delimiter=separator, strict=True)
    except csv.Error as error:
        return None if "unexpected end" in str(error) else []
    except ValueError:  # several rows
        return []
    return row


def _open_text(path: Path, encoding: str | None = None) -> TextIO:
    """Open a text file in UTF-8 or UTF-16, with a mark or without; raises DataError if it cannot be opened."""
    try:
        file = open_regular(path)
        marked = file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")  # type: ignore[attr-defined]
        wanted = (encoding or ("utf-16" if marked else "utf-8")).lower()
        wanted = "utf-8-sig" if wanted in ("utf-8", "utf8") else wanted
        return io.TextIOWrapper(file, wanted, "surrogateescape" if wanted == "utf-8-sig" else "replace", newline="")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a table, a text file") from None
    except LookupError:
        raise DataError(
            f"{path}: encoding: got {encoding!r}; expected one that Python knows, such as latin-1"
        ) from None


def _read_lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; of one that is far too long, the beginning."""
    while line := file.readline(_MAX_LINE + 2):
        yield line
        rest = line
        while len(rest) == _MAX_LINE + 2 and not rest.endswith("\n"):
            rest = file.readline(_MAX_LINE + 2)


def read_text(path: Path) -> Iterator[str]:
    """Yield the lines of a text file; raises DataError if it cannot be opened."""
    with _open_text(path) as file:
        yield from _read_lines(path, file)


def is_utf8(text: str) -> bool:
    """Return whether a text that `read_text` or `read_table` has read was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
