"""Lists of image files: one row for each sample, in arrays that take little memory for millions of rows.

rows of a table (CSV, JSON, Parquet, a folder's metadata) -> choose the columns -> find the folder -> path, captions,
class -> rows that name the same image with the same class are one sample with the captions of all

Rows that cannot be used stay as bad samples, with what is wrong with them in place of captions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.remote.urls import protocol_of
from vqclip.data.sources.class_names import Classes
from vqclip.data.sources.columns import (
    IMAGE_COLUMNS,
    ColumnConfig,
    Row,
    choose_columns,
    guess_columns,
    is_split,
    look_up,
    path_in,
)
from vqclip.data.table_file import Texts
from vqclip.errors import DataError, count_noun, quote_names
from vqclip.io.files import Stamp

PROBLEM = -2
"""Label of a row that cannot be used; its one caption says why."""
_SAMPLED = 50
"""First rows, from which columns and the place of the images are found out."""
_MAX_SPLITS = 20
_MAX_PROBLEM = 300
"""Characters of what is wrong with a row."""


def versions(name: str) -> dict[str, object]:
    """Return the facts by which a stored table or index of image files is known."""
    return {"format": "vqclip-files", "version": 11, "name": name}


class Listed(NamedTuple):
    """A sample whose image is a file."""

    path: str
    """Path of the file, relative to the folder of the source, or absolute; "" in a row without one."""
    row: int = -1
    """Number of its first row in the user's file, for messages; -1 without one."""
    label: int = -1
    """Class number; -1 without one; `PROBLEM` in a row that cannot be used."""
    captions: Sequence[str] = ()
    """Captions as they are in the table, or what is wrong with a row that cannot be used."""
    keys: Sequence[int] = ()
    """Number of the column of each caption, if columns have weights."""
    text: str = ""
    """Path of the file with its captions; "" if they are in the table, or are prompts."""


@dataclass(frozen=True)
class FileTable:
    """Image files with their captions and labels, as they are stored."""

    facts: dict[str, Any]
    """``classnames`` and ``templates``, the prompts that are the captions (empty if there are other captions);
    ``notes``, ``texts_sha256`` of captions and labels, and what else a kind has found out."""
    arrays: dict[str, np.ndarray]
    """JSON texts: the samples, and name, size and time of each file and folder that the table was made from."""

    def __len__(self) -> int:
        return len(self.arrays["sample_ends"])

    def read(self, index: int) -> Listed:
        """Return a sample."""
        return Listed(*json.loads(Texts(self.arrays["samples"], self.arrays["sample_ends"]).read(index)))

    @property
    def is_current(self) -> bool:
        """Return whether the files and folders that the table was made from are unchanged."""
        inputs = Texts(self.arrays["inputs"], self.arrays["input_ends"])
        found = (json.loads(inputs.read(number)) for number in range(len(inputs.ends)))
        return all(state_of(path) == state for path, state in found)


class TableBuilder:
    """Collects the rows of a `FileTable`; those of the same image and class are one sample."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Sentences on what is left out, grouped or ambiguous."""
        self._samples: list[Listed] = []
        self._numbers: dict[tuple[str, int], int] = {}
        """Image and class → number of the sample."""
        self._rows: dict[int, list[Listed]] = {}
        """Number of the sample → its rows after the first."""
        self._inputs: dict[str, list[int]] = {}

    def read_from(self, path: Path) -> Path:
        """Record that the table depends on a file or folder, which is about to be read, and return it."""
        self._inputs[str(path)] = state_of(path)
        return path

    def add(self, row: Listed) -> None:
        """Add a row; with `PROBLEM` as label, the one caption is what is wrong with it."""
        if row.path and row.label != PROBLEM:
            plain = os.path.normpath(row.path) if "./" in row.path or "//" in row.path else row.path
            number = self._numbers.setdefault((plain, row.label), len(self))
            if number < len(self):
                self._rows.setdefault(number, []).append(row)
                return
        self._samples.append(row)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def finish(
        self,
        classnames: Sequence[str] = (),
        templates: Sequence[str] = (),
        relabel: Mapping[int, int] | None = None,
        **facts: Any,
    ) -> FileTable:
        """Return the table.

        Args:
            classnames: names of the classes.
            templates: prompts that are the captions.
            relabel: new labels of some.
            **facts: JSON values, which are kept.
        """
        if self._rows:
            images, rows = count_noun(len(self._rows), "image"), sum(map(len, self._rows.values())) + len(self._rows)
            self.notes.append(
                f"rows of the same image file are one sample with all their captions: {images}, {rows} rows"
            )
        if several := sum(count > 1 for count in Counter(path for path, _ in self._numbers).values()):
            self.notes.append(
                f"{several} {'image has' if several == 1 else 'images have'} rows of different classes: a sample for "
                "each class"
            )
        samples = self._samples
        for number, later in self._rows.items():
            every = samples[number], *later
            captions = [caption for each in every for caption in each.captions]
            samples[number] = every[0]._replace(captions=captions, keys=[key for each in every for key in each.keys])
        if relabel:
            samples = [each._replace(label=relabel.get(each.label, each.label)) for each in samples]
        texts = Texts.join(text for each in samples if each.label != PROBLEM for text in each.captions)
        numbers = (np.cumsum([len(each.captions) for each in samples]), np.array([each.label for each in samples]))
        arrays = (*texts, *(each.astype(np.int64) for each in numbers))
        made = {
            "classnames": [*classnames],
            "templates": [*templates],
            "notes": self.notes,
            "texts_sha256": checksum(*(each.tobytes() for each in arrays)),
        }
        stored = {}
        for name, values in (("sample", samples), ("input", self._inputs.items())):
            stored[f"{name}s"], stored[f"{name}_ends"] = Texts.join(map(json.dumps, values))
        return FileTable({**facts, **made}, stored)


def state_of(path: str | Path) -> list[int]:
    """Return size and modification time of a file or folder; -1 if there is none."""
    try:
        return [*Stamp.of(path)]
    except (OSError, ValueError):
        return [-1, -1]


def list_images(
    rows: Iterator[Row],
    given: ColumnConfig,
    builder: TableBuilder,
    path: Path,
    root: Path,
    look_beside: bool = False,
) -> FileTable:
    """Make a table of image files of the rows of a table.

    Args:
        rows: the rows.
        given: the user's choice of columns.
        builder: gets the rows.
        path: the table, for messages.
        root: folder that relative paths refer to.
        look_beside: if the first images are not there, look for a folder beside the table that has them.

    Raises:
        DataError: a column is missing, or there are no rows; a row that cannot be used becomes a bad sample.
    """
    first = list(itertools.islice(rows, _SAMPLED))
    usable = [row for _, row in first if not isinstance(row, DataError)]
    if not first:
        raise DataError(f"{path}: no rows; expected one for each image")
    if not usable:
        raise DataError(f"{path}: none of the first {len(first)} rows can be used; row {first[0][0]}: {first[0][1]}")
    names = list(dict.fromkeys(name for row in usable for name in _names(row)))
    images = sorted(guess_columns(names, IMAGE_COLUMNS), key=lambda name: not _names_files(usable, name, root))
    if {"filepath", "filename"} <= {*images}:  # Karpathy's: folder and name
        images = ["filename"]
    chosen = choose_columns(given, names, images, path, builder.notes)
    for column in filter(None, (chosen.label, *chosen.captions)):
        if _names_files(usable, column, root):
            builder.notes.append(f"column {column!r} has names of files, which are read as texts")
    spell = _Spelling.find([path_in(row, chosen.image) for row in usable], root, look_beside, builder)
    classes = Classes.read(given.classnames, path, builder.read_from) if chosen.label else None
    chosen = chosen._replace(classes=classes)
    splits = Counter[str]()
    others = [name for name in names if name not in (chosen.image, chosen.label, *chosen.captions, *chosen.wanted)]
    others.sort(key=lambda name: name.strip().lower() != "split")
    are_words = {name: all(is_split(str(row.get(name))) for row in usable) for name in others}
    split = next((name for name in others if name.strip().lower() == "split" or are_words[name]), None)
    left_out = 0
    for number, row in itertools.chain(first, rows):
        if isinstance(row, DataError):
            builder.add(Listed("", number, PROBLEM, [str(row)[:_MAX_PROBLEM]]))
            continue
        if not chosen.wants(row):
            left_out += 1
            continue
        if split is not None and len(splits) < _MAX_SPLITS:
            splits[str(row.get(split))] += 1
        try:
            captions, keys, label = chosen.read([row])
        except DataError as error:
            captions, keys, label = [str(error)[:_MAX_PROBLEM]], [], PROBLEM
        builder.add(
            Listed(spell(path_in(row, chosen.image)), number, label, captions, keys if given.caption_weights else ())
        )
    if not len(builder):
        there = {key: dict.fromkeys(str(look_up(row, key)) for row in usable) for key in chosen.wanted}
        found = "; ".join(f"{key} has {quote_names([*values][:_MAX_SPLITS])}" for key, values in there.items())
        raise DataError(f"{path}: where: no row has these values; in the first rows {found}")
    if left_out:
        builder.notes.append(f"left out: {count_noun(left_out, 'row')} without the values of where")
    if 1 < len(splits) < _MAX_SPLITS:
        found = ", ".join(f"{each} {count}" for each, count in sorted(splits.items()))
        some = min(splits, key=lambda each: (each != "train", each))
        reads = f"{path} as the path, where: {{{split}: {some}}} reads some"
        builder.notes.append(f"column {split!r} has {found}; all are read; {reads}")
    if classes is None:
        return builder.finish()
    places = classes.sort(len(builder))
    builder.notes += () if chosen.captions else classes.describe()
    return builder.finish(classes.names, () if chosen.captions else given.templates, places)


def _names(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the columns of a row, and keys in objects such as ``meta.caption``."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < 2:
            yield from _names(value, f"{prefix}{key}.", depth + 1)


def _names_files(rows: Sequence[Mapping[str, Any]], column: str, root: Path) -> bool:
    """Return whether most of the values in a column are files, or end like images."""
    paths = [path for row in rows[:20] if (path := path_in(row, column)) and ":" not in path[2:]]  # no URLs
    found = [path for path in paths if path.lower().endswith(IMAGE_ENDINGS) or os.path.isfile(root / path)]
    return 2 * len(found) > len(paths)


@dataclass(frozen=True)
class _Spelling:
    """Spelling of the paths of a table; found out from its first ones, since others may be missing files."""

    folder: str = ""
    """Beginning of relative paths."""
    ending: str = ""
    """Ending of those without one."""
    digits: int = 0
    """Width of numbers that have lost their zeros, such as COCO's ids: 139 is 000000000139.jpg."""
    slashes: bool = False
    """Replace backslashes, as Windows has them."""
    quoted: bool = False
    """Replace %20 and the like, as in URLs."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of an image file → its path, where those of a table are in several folders, or deeper ones."""
    start: str = ""
    """Folder of another machine with which paths begin; it is left out."""

    def __call__(self, path: str) -> str:
        if not path or protocol_of(path) is not None or os.pardir in path.split("/"):
            return path
        path = (path.replace("\\", "/") if self.slashes else path).removeprefix(self.start)
        path = unquote(path) if self.quoted else path
        if self.ending and not path.lower().endswith(IMAGE_ENDINGS):
            path = (path.zfill(self.digits) if path.isdigit() else path) + self.ending
        return self.files.get(path) or os.path.join(self.folder, path)

    @classmethod
    def find(cls, paths: Sequence[str], root: Path, look_beside: bool, builder: TableBuilder) -> _Spelling:
        """Return the way in which most of the paths name files; the plain one if none does."""
        paths = [path for path in dict.fromkeys(paths) if path and protocol_of(path) is None][:20]
        slashes = any("\\" in path for path in paths)
        quoted = any("%" in path for path in paths)
        endings = [("", 0)]
        if any(not path.lower().endswith(IMAGE_ENDINGS) for path in paths):
            digits = (0, 4, 5, 6, 12) if any(path.isdigit() for path in paths) else (0,)
            endings += [(ending, width) for width in digits for ending in (*IMAGE_ENDINGS, ".JPG", ".JPEG", ".PNG")]

        def best(
            folders: Iterable[str], files: Mapping[str, str] = MappingProxyType({}), start: str = ""
        ) -> tuple[int, list[_Spelling]]:
            marks = itertools.product(sorted({False, slashes}), sorted({False, quoted}))
            ways = [
                cls(at, *each, *mark, files, start) for at, mark, each in itertools.product(folders, marks, endings)
            ]
            counts = [sum(os.path.isfile(root / way(path)) for path in paths) for way in ways]
            most = max(counts, default=0)
            return most, [way for way, count in zip(ways, counts, strict=True) if count == most > 0]

        most, found = best([""])
        if found and most < len(paths) and len(endings) > 1 and look_beside:  # perhaps files of several endings
            count, by_name = best([""], _files_below(root, builder, stems=True)[0])
            if count > most:
                builder.notes.append(f"images of several endings found by their names in {root} and folders below")
                return by_name[0]
        if found:
            return found[0]
        first = paths[0].replace("\\", "/") if paths else ""
        if first.startswith("/") or first[1:3] == ":/":
            starts = [first[: place + 1] for place, each in enumerate(first) if each == "/"]
            places = ["", f"{root.parent}{os.sep}"] if look_beside else [""]
            found = max((best(places, start=start) for start in starts), key=lambda each: each[0])[1]
            if found:
                place = f"{root / found[0].folder} in place of {found[0].start}"
                builder.notes.append(f"images found in {place}, which is not here; images names another folder")
                return found[0]
        if not paths or not look_beside:
            return cls()
        for above, start in ((root, ""), (root.parent, f"{root.parent}{os.sep}")):
            builder.read_from(above)
            try:
                folders = sorted(each.name for each in os.scandir(above) if each.is_dir() and each.name[0] != ".")
            except OSError:
                folders = []
            most, found = best([start] if start else [])
            if not found:
                most, found = best(f"{start}{name}/" for name in folders[:200])
            if above == root:
                files, left_out = _files_below(root, builder)
                count, by_name = best([""], files)
                are_parts = not left_out and len({*map(os.path.dirname, files.values())}) > 1
                if count > most or (count == most > 0 and are_parts):  # a part alone may have all of the first rows
                    note = f"images found by their names in folders below {root}; images names one folder"
                    builder.notes.append(
                        note + (f"; names of several files are not read: {left_out}" if left_out else "")
                    )
                    return by_name[0]
                if not found and len(files) + left_out >= len(paths) and first.split("/")[0] != root.name:
                    break  # the images are here, under other names; those of another data set may have these names
            places = [str(root / each) for each in dict.fromkeys(way.folder for way in found)]
            if len(places) > 1:
                raise DataError(
                    f"{root}: images of the table are in {', '.join(places[:5])}; set images to one of them"
                )
            if places:
                builder.notes.append(f"images found in {places[0]}; images names another folder")
                return found[0]
            for name in folders[:200]:  # the images may come later
                builder.read_from(above / name)
        return cls()


def _files_below(root: Path, builder: TableBuilder, stems: bool = False) -> tuple[dict[str, str], int]:
    """Return the paths of image files in the folders below one by their names, and how many names are of several.

    Args:
        root: the folder.
        builder: gets the folders.
        stems: names are without endings.
    """
    found, again, places = dict[str, str](), set[str](), 0
    for place, folders, names in os.walk(root, followlinks=True):
        builder.read_from(Path(place))
        inside, places = os.path.relpath(place, root), places + 1
        deep = inside.count(os.sep) >= 2
        folders[:] = [] if deep or places > 200 else sorted(name for name in folders if name[0] != ".")
        for name in names:
            if name.lower().endswith(IMAGE_ENDINGS):
                key = os.path.splitext(name)[0] if stems else name
                again |= {key} & found.keys()
                found[key] = os.path.join(inside, name)
    return {name: path for name, path in found.items() if name not in again}, len(again)


def checksum(*parts: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
