"""Tables of image files: CSV and TSV with all that people do to them, and JSON in any of the usual shapes."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import BeforeValidator, Field

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.lookup import name_errors
from vqclip.data.sources.columns import Row, is_split, parse_cell, plain_text
from vqclip.data.sources.files import ListConfig
from vqclip.errors import DataError, printable, quote_names
from vqclip.io.files import open_regular

_MAX_LINE = 1 << 20
"""Characters of a line. The csv module itself limits a field to 131,072."""
_MAX_LINES = 200
"""Lines of a row, whose texts in quotes may have line breaks."""
_SAMPLED = 50
"""First lines, from which the separator is found out."""
_SEPARATORS = (",", "\t", ";", "|")
_WORDS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "\\|": "|", "space": " "}
_URL = re.compile(r"[a-z][a-z0-9+]*://")
_NUMBERED = re.compile(r"\S+ \d+\s*")
"""Line of a list of images and class numbers, such as those of Places365."""
_MAX_JSON = 2 << 30
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
"""Bytes that are not UTF-8, as `_open_text` reads them."""
_LINES = (".jsonl", ".ndjson", ".jsonlines")
_ROWS = ("data", "rows", "samples", "items", "images", "annotations")
"""Keys of the list of rows beside other lists."""


def _to_separator(value: object) -> object:
    value = _WORDS.get(value, value) if isinstance(value, str) else value
    if value in ('"', "\n", "\r"):
        raise ValueError(f"got {value!r}; expected another character, or tab")
    return value


class CsvConfig(ListConfig):
    """A table with a header and a row for each image, or for each caption of one.

    Rows of the same image are one sample with several captions. A row that cannot be used is a bad sample.
    """

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

    def rows(self, path: Path, notes: list[str]) -> Iterator[Row]:
        """See `ListConfig.rows`; 1 is the number of the header. Rows that cannot be used are errors."""
        separator = self.separator
        with name_errors(f"{path}: cannot be read"), _open_text(path, self.encoding) as file:
            lines = _read_lines(file)
            first = list(itertools.islice(lines, _SAMPLED))
            if first and (match := re.fullmatch(r'"?sep=(.)"?\s*', first[0])):  # Excel's
                separator, first = separator or match[1], first[1:]
            if separator is None:
                default = "\t" if self.kind == "tsv" else ","
                separator = max((default, *_SEPARATORS), key=lambda each: _fits(first, each))
                if first and all(map(_NUMBERED.fullmatch, first)) and _is_image(first[0].split()[0]):
                    separator = separator if separator in first[0] else " "
            unbalanced: list[int] = []
            rows = _parse(itertools.chain(first, lines), separator, self.quotes, unbalanced)
            header = next(((number, cells) for number, cells in rows if any(map(str.strip, cells))), None)
            if header is None:
                raise DataError(f"{path}: is empty; expected a header with the names of the columns")
            cells = [cell.strip() for cell in header[1]]
            names = [*self.columns] or cells
            if not self.columns and any(map(_is_image, cells)):
                names = _name_columns(path, cells, notes)
            if names != cells:
                rows = itertools.chain([header], rows)
            while len(names) > 1 and not names[-1]:
                names.pop()
            counts = Counter(filter(None, names))
            notes += [
                f"{count} columns are called {name!r}; the first is read" for name, count in counts.items() if count > 1
            ]
            places = {name: names.index(name) for name in counts}
            for number, cells in rows:
                while len(cells) > len(names) and not cells[-1].strip():
                    cells.pop()
                if not any(map(str.strip, cells)) or [cell.strip() for cell in cells] == names:  # tables in one file
                    continue
                if (problem := _problem(cells, len(names), separator)) is not None:
                    yield number, DataError(problem)
                else:
                    yield number, {name: parse_cell(cells[place]) for name, place in places.items()}
        if unbalanced:
            notes.append(f"{len(unbalanced)} rows, such as {unbalanced[0]}, have an unclosed quote, read as it is")


def _problem(cells: Sequence[str], width: int, separator: str) -> str | None:
    text = separator.join(cells)
    if _NOT_UTF8.search(text):
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


def _name_columns(path: Path, cells: Sequence[str], notes: list[str]) -> list[str]:
    """Return names for the columns of a table whose first row looks like data; raises DataError if it is not plain."""
    shown = ", ".join(repr(printable(cell[:60])) for cell in cells[:5])
    image = next(place for place, cell in enumerate(cells) if _is_image(cell))
    if len(cells) == 2 and not _URL.match(cells[image]):
        other = "label" if re.fullmatch(r"\d+", cells[1 - image].strip()) else "caption"
        names = ["image", other] if image == 0 else [other, "image"]
        notes.append(f"no header: the first row is {shown}; columns: {names} are assumed, columns names others")
        return names
    what = "it has one column, or separator names the character between several"
    if len(cells) > 1:
        what = f"name its {len(cells)} columns, such as columns: [caption, image]"
    raise DataError(f"{path}: seems to have no header, since its first row is {shown}; {what}")


def _is_image(cell: str) -> bool:
    text = cell.strip().lower()
    return bool(_URL.match(text)) or re.sub(r"#\d+$", "", text).endswith(IMAGE_ENDINGS)


def _fits(lines: Sequence[str], separator: str) -> tuple[float, bool]:
    """Return the share of lines that a separator divides into as many columns as the first one.

    And whether a cell of the first one is then an image; otherwise a comma in each caption is as good as a tab.
    """
    widths = [line.count(separator) for line in lines if line.strip()]
    share = widths.count(widths[0]) / len(widths) if widths and widths[0] else 0.0
    return share, bool(lines) and any(map(_is_image, lines[0].split(separator)))


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
    escaped = [line.replace('\\"', '""') for line in lines]  # as MySQL and Spark write them
    is_open = False
    for tried, skips in ((lines, True), (escaped, True), (lines, False)):
        if is_open and not skips:  # a quote after a blank is open
            break
        try:
            (row,) = csv.reader(tried, delimiter=separator, strict=True, skipinitialspace=skips and separator != " ")
            return row
        except csv.Error as error:
            is_open |= "unexpected end" in str(error)
        except ValueError:  # several rows
            pass
    return None if is_open else []


def _open_bytes(path: Path) -> io.BufferedReader:
    """Open a file, which gzip may have compressed."""
    file = open_regular(path)
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if file.peek(2)[:2] == b"\x1f\x8b" else file  # type: ignore[attr-defined,return-value]


def _open_text(path: Path, encoding: str | None = None) -> TextIO:
    """Open a text file in UTF-8 or UTF-16, with a mark or without, gzipped or not."""
    file = _open_bytes(path)
    marked = file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")
    wanted = (encoding or ("utf-16" if marked else "utf-8")).lower()
    wanted = "utf-8-sig" if wanted in ("utf-8", "utf8") else wanted
    return io.TextIOWrapper(file, wanted, "surrogateescape" if wanted == "utf-8-sig" else "replace", newline="")


def _read_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; of one that is far too long, the beginning."""
    while line := file.readline(_MAX_LINE + 2):
        yield line
        while len(line) == _MAX_LINE + 2 and not line.endswith("\n"):
            line = file.readline(_MAX_LINE + 2)


class JsonConfig(ListConfig):
    """A JSON file, or one of JSON lines, with an object for each image or for each caption of one.

    Read are a list of objects, one object of files with their captions, COCO's captions and classes (`images` and
    `annotations`), Karpathy's splits (`sentences`), LLaVA's `conversations`, and objects of columns. Keys inside
    objects are named with a point: `meta.caption`.
    """

    kind: Literal["json", "coco"] = "json"
    """JSON; `coco` is another name of it."""

    def rows(self, path: Path, notes: list[str]) -> Iterator[Row]:
        """See `ListConfig.rows`."""
        if path.name.lower().removesuffix(".gz").endswith(_LINES):
            return read_json_lines(path)
        try:
            content = read_json(path)
        except DataError:
            _, first = next(read_json_lines(path), (1, {}))
            if isinstance(first, DataError) or not first:
                raise
            return read_json_lines(path)  # JSON lines, whatever the name says
        if isinstance(content, dict) and isinstance(content.get("images"), list) and "annotations" in content:
            return _coco(content, path, notes)
        content = _list_of(content, path) if isinstance(content, dict) else content
        if not isinstance(content, list):
            raise DataError(
                f"{path}: got a {type(content).__name__}; expected a list of objects, or an object of files"
            )
        return (_row(number, each) for number, each in enumerate(content, 1))


def read_json(path: Path) -> Any:
    """Read a JSON file of at most 2 GiB; raises DataError if it cannot be read."""
    with name_errors(f"{path}: cannot be read as JSON"), _open_bytes(path) as file:
        data = file.read(_MAX_JSON + 1)
        if len(data) > _MAX_JSON:
            raise DataError(f"{path}: more than {_MAX_JSON} bytes, which are not read")
        return json.loads(data)


def read_json_lines(path: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines; a line that is none is an error."""
    with name_errors(f"{path}: cannot be read"), _open_text(path) as file:
        for number, line in enumerate(_read_lines(file), 1):
            if not line.strip():
                continue
            try:
                if _NOT_UTF8.search(line):
                    raise ValueError("it is not UTF-8")
                yield _row(number, json.loads(line))
            except (ValueError, RecursionError) as error:
                yield number, DataError(f"is not JSON: {error}")


def _row(number: int, value: Any, problem: str = "") -> Row:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        value = {"image": value[0], "caption": value[1]}
    if isinstance(value, dict):
        return number, value
    return number, DataError(problem or f"got a {type(value).__name__}; expected an object")


def _list_of(content: dict[str, Any], path: Path) -> list[Any]:
    """Return the rows of an object: those of its lists, columns, or files with their captions."""
    lists = {key: value for key, value in content.items() if isinstance(value, list) and value}
    lists = {key: value for key, value in lists.items() if all(isinstance(each, dict) for each in value[:50])}
    if len(lists) > 1 and all(map(is_split, lists)):
        return [{"split": split, **row} for split, rows in lists.items() for row in rows]
    columns = [*content.values()]
    if not any("." in key[-6:] or "/" in key for key in content):  # keys that look like files
        for name in (*_ROWS, *lists) if lists else ():
            if name in lists and (name in _ROWS or len(lists) == 1):
                return lists[name]
        if len(lists) == len(columns) > 1 and all(
            any(_is_image(str(text)) for text in each[0].values()) for each in lists.values()
        ):
            return [{"class": name, **row} for name, rows in lists.items() for row in rows]
        if len(columns) > 1 and all(isinstance(each, dict) and each for each in columns):
            numbers = [*columns[0]]
            if all(each.keys() == {*numbers} and all(map(str.isdigit, each)) for each in columns):  # pandas' to_json
                columns = [[each[number] for number in numbers] for each in columns]
        if len(columns) > 1 and all(isinstance(each, list) and len(each) == len(columns[0]) for each in columns):
            return [dict(zip(content, values, strict=True)) for values in zip(*columns, strict=True)]
    columns = [*content.values()]
    if not content or not all(isinstance(each, (str, list, dict)) or each is None for each in columns):
        raise DataError(
            f"{path}: its keys: {quote_names(content)}; expected a list of objects, an object of files with captions, "
            "or COCO's images and annotations"
        )
    return [
        {"image": key, **value} if isinstance(value, dict) else {"image": key, "caption": value}
        for key, value in content.items()
    ]


def _coco(content: dict[str, Any], path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the images of a file in COCO's format in their order, with all their captions or their classes."""
    annotations = content["annotations"]
    if not isinstance(annotations, list):
        raise DataError(f"{path}: annotations: got a {type(annotations).__name__}; expected a list of objects")
    categories = content.get("categories")
    classes = categories if isinstance(categories, list) else []
    names = {str(each.get("id")): each.get("name") for each in classes if isinstance(each, dict)}
    found: dict[str, list[Any]] = {}
    objects = [each for each in annotations if isinstance(each, dict)]
    has_captions = any("caption" in each for each in objects)
    if objects and not has_captions and not any("category_id" in each for each in objects):
        raise DataError(
            f"{path}: annotations have no caption and no category_id; their keys: {quote_names(objects[0])}"
        )
    for each in objects:
        number = each.get("category_id")
        value = each.get("caption") if has_captions else names.get(str(number), number)
        found.setdefault(plain_text(each.get("image_id")), []).append(value)
    if len(objects) < len(annotations):
        notes.append(f"left out: {len(annotations) - len(objects)} annotations that are not objects")
    seen: dict[str, object] = {}
    for number, each in enumerate(content["images"], 1):
        key = plain_text(each.get("id")) if isinstance(each, dict) else ""
        if key in seen and seen[key] == each:
            continue
        if key in seen or not isinstance(each, dict):
            yield _row(number, None, f"id {key} is that of another image" if key in seen else "")
            continue
        seen[key] = each
        values = found.get(key, [])
        if has_captions:
            yield number, {**each, "caption": values}
        else:
            yield from ((number, {**each, "label": label}) for label in dict.fromkeys(values) or [None])
    if unknown := found.keys() - seen.keys():
        count = sum(len(found[key]) for key in unknown)
        notes.append(f"left out: {count} annotations of images that are not listed, such as {min(unknown)}")
