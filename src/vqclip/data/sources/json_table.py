"""Source of image files that a JSON file lists, in any of the usual shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from vqclip.data.sources.csv_table import is_utf8, read_text
from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.listing import ListConfig, Row, is_split
from vqclip.errors import DataError, quote_names
from vqclip.io.files import open_regular

__all__ = ["JsonConfig", "read_json", "read_json_lines", "read_objects"]

_MAX_JSON = 2 << 30
_LINES = (".jsonl", ".ndjson")
_ROWS = ("data", "rows", "samples", "items", "images", "annotations")
"""Keys of the list of rows beside other lists."""


class JsonConfig(ListConfig):
    """A JSON file, or one of JSON lines, with an object for each image or for each caption of one.

    Read are a list of objects, one object of files with their captions, COCO's captions and classes (`images` and
    `annotations`), Karpathy's splits (`sentences`), LLaVA's `conversations`, and objects of columns. Keys inside
    objects are named with a point: `meta.caption`.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"json": (".json", *_LINES)}

    kind: Literal["json", "coco"] = "json"
    """JSON; `coco` is another name of it."""

    def table(self) -> FileTable:
        """Read the file; raises DataError for a missing key, or a file without rows."""
        builder = TableBuilder()
        return self.list_rows(read_objects(builder.read_from(self.listing), builder.notes), builder)


def read_objects(path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the objects of a JSON file, or of one of JSON lines.

    Args:
        path: the file.
        notes: gets remarks.

    Raises:
        DataError: the file cannot be read, or has another shape.
    """
    if path.suffix.lower() in _LINES:
        yield from read_json_lines(path)
        return
    try:
        content = read_json(path)
    except DataError:
        first = next(read_text(path), "")
        if not first.strip().startswith("{") or not first.strip().endswith("}"):
            raise
        yield from read_json_lines(path)  # JSON lines, whatever the name says
        return
    yield from _rows(content, path, notes)


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


def read_json_lines(path: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines; one line that is none is a row with a problem."""
    for number, line in enumerate(read_text(path), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line) if is_utf8(line) else None
        except (ValueError, RecursionError) as error:
            yield Row(number, {}, f"is not JSON: {error}")
            continue
        yield _row(number, found, "" if is_utf8(line) else "not UTF-8")


def _row(number: int, value: Any, problem: str = "") -> Row:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        value = {"image": value[0], "caption": value[1]}
    if isinstance(value, dict):
        return Row(number, value)
    return Row(number, {}, problem or f"got a {type(value).__name__}; expected an object")


def _rows(content: Any, path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the rows in the content of a JSON file."""
    if isinstance(content, dict) and isinstance(content.get("images"), list) and "annotations" in content:
        yield from _coco(content, path, notes)
        return
    if isinstance(content, dict):
        content = _list_of(content, path)
    if not isinstance(content, list):
        raise DataError(f"{path}: got a {type(content).__name__}; expected a list of objects, or an object of files")
    yield from (_row(number, each) for number, each in enumerate(content, 1))


def _list_of(content: dict[str, Any], path: Path) -> list[Any]:
    """Return the rows of an object: those of its lists, columns, or files with their captions."""
    lists = {key: value for key, value in content.items() if _are_objects(value)}
    if len(lists) > 1 and all(map(is_split, lists)):
        return [{"split": split, **row} for split, rows in lists.items() for row in rows]
    columns = [*content.values()]
    if not any(map(_looks_like_file, content)):
        for name in (*_ROWS, *lists) if lists else ():
            if name in lists and (name in _ROWS or len(lists) == 1):
                return lists[name]
        if len(columns) > 1 and all(isinstance(each, dict) and "0" in each for each in columns):  # pandas' to_json
            columns = [[*each.values()] for each in columns]
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


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value[:50])


def _looks_like_file(key: str) -> bool:
    return "." in key[-6:] or "/" in key


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
            f"{path}: annotations have no caption and no category_id; their keys: {quote_names(objects[0])}; expected "
            "such as captions_train2017.json"
        )
    for each in objects:
        number = each.get("category_id")
        value = each.get("caption") if has_captions else names.get(str(number), number)
        found.setdefault(str(each.get("image_id")), []).append(value)
    if len(objects) < len(annotations):
        notes.append(f"left out: {len(annotations) - len(objects)} annotations that are not objects")
    seen: set[str] = set()
    for number, each in enumerate(content["images"], 1):
        key = str(each.get("id")) if isinstance(each, dict) else ""
        if key in seen or not isinstance(each, dict):
            yield _row(number, None, f"id {key} is that of another image" if key in seen else "")
            continue
        seen.add(key)
        values = found.get(key, [])
        if has_captions:
            yield Row(number, {**each, "caption": values})
        else:
            yield from (Row(number, {**each, "label": label}) for label in dict.fromkeys(values) or [None])
    if unknown := found.keys() - seen:
        count = sum(len(found[key]) for key in unknown)
        notes.append(f"left out: {count} annotations of images that are not listed, such as {min(unknown)}")
