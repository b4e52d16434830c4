"""Sources of image files that a table lists: its columns and classes, and where the images are.

rows of a table (CSV, JSON, a folder's metadata) -> choose the columns -> find the folder -> path, captions, class
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import model_validator

from vqclip.config import did_you_mean
from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.remote import protocol_of
from vqclip.data.sources.base import Place
from vqclip.data.sources.captions import DEFAULT_TEMPLATE, Templates, find_texts, look_up
from vqclip.data.sources.class_folder import LocalFolder, read_lines
from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.files import FileSourceConfig, local_file
from vqclip.errors import DataError, quote_names

__all__ = [
    "CAPTION_COLUMNS",
    "IMAGE_COLUMNS",
    "LABEL_COLUMNS",
    "ClassNames",
    "Classes",
    "Columns",
    "ListConfig",
    "Row",
    "describe_ids",
    "find_column",
    "guess_captions",
    "guess_column",
    "is_split",
    "list_images",
    "plain_text",
]

IMAGE_COLUMNS = (
    *("filepath", "file_path", "image_path", "img_path", "imagepath", "filename", "file_name", "image_name"),
    *("image_file", "image_filename", "image", "images", "img", "path", "file", "photo", "url", "image_url"),
    *("jpg", "jpeg", "png", "webp", "picture", "image_id", "imageid", "img_id", "name", "id"),
)
CAPTION_COLUMNS = (
    *("caption", "captions", "text", "texts", "title", "sentence", "sentences", "comment", "description"),
    *("raw", "alt_text", "alt", "prompt", "caption_str", "txt", "conversations", "messages"),
)
LABEL_COLUMNS = (
    *("label", "labels", "cls", "class", "class_name", "classname", "category", "category_name", "target"),
    *("fine_label", "class_id", "label_id", "species"),
)
_NUMBERED = re.compile(r"(caption|text|sentence|comment|title)s?[ _]?\d+")
_SIMILAR = re.compile(r".*caption.*|texts?[ _.-].+")
_OTHER = re.compile(
    r"(.*[ _.-])?(ids?|url|lang|language|len|length|num|n|count|number|score|similarity|tokens|source|model|type|color)"
    r"([ _.-].*)?"
)
"""Names that are similar to those of captions, of columns with other facts."""
_SPLIT = re.compile(
    r"(train(val|ing)?|restval|val(id|idation)?|test(ing)?|dev|eval|minival)[ _-]?(\d+|set|data|images)?"
)
_SAMPLED = 50
"""First rows, from which columns and the place of the images are found out."""
_MAX_SPLITS = 20
_MAX_PROBLEM = 300
"""Characters of what is wrong with a row."""

ClassNames = tuple[str, ...] | Path
"""Names of classes, or a file of them; see `Classes`."""


class Row(NamedTuple):
    """A row of a table."""

    number: int
    """Its number in the file, for messages."""
    values: Mapping[str, Any]
    """Column → value."""
    problem: str = ""
    """Reason why the row cannot be used; empty if it can."""


@dataclass(frozen=True)
class Columns:
    """Columns that a user names, or None to find them out, and what their values mean."""

    image: str | None = None
    captions: tuple[str, ...] | None = None
    label: str | None = None
    classnames: ClassNames = ()
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    where: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, str] = ("image", "captions")
    """Names of the first two settings, for messages."""


class ListConfig(FileSourceConfig):
    """Configuration of a file that lists images; a kind implements `table`.

    Relative paths refer to the folder of the file, or to `images`; they cannot leave it. Absolute paths are read
    wherever they point to: use tables from people that you trust with the images on your machine.
    """

    path: Place
    """The file, on this machine."""
    images: Path | None = None
    """Folder that relative paths of images refer to. null: the folder of the file, or one beside it that has the first
    images."""
    image: str | None = None
    """Column or key of the paths of the images, such as `filepath` or `meta.file`. null: the usual names are tried."""
    captions: str | tuple[str, ...] | None = None
    """Columns or keys of the captions. null: the usual names are tried; with `label`, the captions are the prompts of
    the class."""
    label: str | None = None
    """Column or key of the class of each image: its name, or its number in `classnames`, from 0. null: none, or a usual
    name where there are no captions."""
    classnames: ClassNames = ()
    """Names of the classes in the order of their numbers, or a file with one a line, or `folder name` a line, or JSON;
    empty: the names in column `label`, sorted."""
    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name, which are the captions where there are only classes."""
    where: dict[str, str | int | tuple[str | int, ...]] = {}
    """Values of columns of the rows to read, such as `{split: [train, restval]}`; other rows are left out."""

    @model_validator(mode="after")
    def _columns_fit(self) -> ListConfig:
        if self.captions == ():
            raise ValueError("captions: got an empty list; expected names of columns, or null")
        if self.classnames and self.label is None and self.captions is not None:
            raise ValueError("classnames: got them without label; expected the column of the classes")
        return self

    @property
    def has_classes(self) -> bool | None:
        """Return whether images have classes, if the configuration decides it."""
        return False if self.label is None and self.captions is not None else None

    @property
    def listing(self) -> Path:
        """The file."""
        return local_file(self.path, self.kind)

    @property
    def root(self) -> Path:
        """The folder that relative paths refer to."""
        return self.listing.parent if self.images is None else local_file(self.images, self.kind)

    def list_rows(self, rows: Iterable[Row], builder: TableBuilder) -> FileTable:
        """Return the table of some rows of the file; see `list_images`."""
        captions = (self.captions,) if isinstance(self.captions, str) else self.captions
        columns = Columns(self.image, captions, self.label, self.classnames, self.templates, self.where)
        return list_images(rows, columns, builder, self.listing, self.root, self.images is None)


def list_images(
    rows: Iterable[Row], columns: Columns, builder: TableBuilder, path: Path, root: Path, look_beside: bool = False
) -> FileTable:
    """Make a table of image files of the rows of a table.

    Args:
        rows: the rows.
        columns: the user's choice.
        builder: gets the rows.
        path: the table, for messages.
        root: folder that relative paths refer to.
        look_beside: if the first images are not there, look for a folder beside the table that has them.

    Raises:
        DataError: a column is missing, or there are no rows; a row that cannot be used becomes a bad sample.
    """
    rows = iter(rows)
    first = list(itertools.islice(rows, _SAMPLED))
    usable = [row for row in first if not row.problem]
    if not first:
        raise DataError(f"{path}: no rows; expected one for each image")
    if not usable:
        raise DataError(
            f"{path}: none of the first {len(first)} rows can be used; row {first[0].number}: {first[0].problem}"
        )
    names = list(dict.fromkeys(name for row in usable for name in _names(row.values)))
    by_value = sorted(_usual_columns(names, IMAGE_COLUMNS), key=lambda name: not _names_files(usable, name, root))
    chosen = _choose(columns, names, by_value, builder, path)
    spell = _Spelling.find([_image(row.values, chosen.image) for row in usable], root, look_beside, builder)
    classes = Classes.read(columns.classnames, path, builder) if chosen.label else None
    wanted = {
        find_column(names, key, "where", path): set(map(str, _as_list(each))) for key, each in columns.where.items()
    }
    splits = Counter[str]()
    split = next((name for name in names if name.strip().lower() == "split" and name not in wanted), None)
    left_out = 0
    for row in itertools.chain(first, rows):
        if row.problem:
            builder.add_problem("", row.problem[:_MAX_PROBLEM], row.number)
            continue
        if any(str(look_up(row.values, key)).strip() not in each for key, each in wanted.items()):
            left_out += 1
            continue
        if split is not None and len(splits) < _MAX_SPLITS:
            splits[str(row.values.get(split))] += 1
        _add(row, chosen, classes, spell, builder)
    if not len(builder):
        raise DataError(f"{path}: where: no row has these values; expected others, or leave it out")
    if left_out:
        builder.notes.append(f"left out: {left_out} {'row' if left_out == 1 else 'rows'} without the values of where")
    if 1 < len(splits) < _MAX_SPLITS:
        found = ", ".join(f"{name} {count}" for name, count in sorted(splits.items()))
        some = min(splits, key=lambda name: (name != "train", name))
        builder.notes.append(f"column {split!r} has {found}; all are read; where: {{{split}: {some}}} reads some")
    if classes is None:
        return builder.finish()
    return classes.finish(builder, () if chosen.captions else columns.templates)


def _add(row: Row, chosen: Columns, classes: Classes | None, spell: _Spelling, builder: TableBuilder) -> None:
    assert chosen.image is not None
    image, captions, label = spell(_image(row.values, chosen.image)), [], -1
    try:
        for key in chosen.captions or ():
            captions += _texts(row.values, key)
        if classes is not None and chosen.label is not None:
            label = classes.number(plain_text(look_up(row.values, chosen.label)))
    except DataError:  # of the settings, not of the row
        raise
    except ValueError as error:
        builder.add_problem(image, str(error)[:_MAX_PROBLEM], row.number)
    else:
        builder.add(image, captions, label, row.number)


def _texts(values: Mapping[str, Any], key: str) -> list[str]:
    try:
        return find_texts(look_up(values, key))
    except ValueError as error:
        raise ValueError(f"{key!r} contains {error}; expected text or a list of texts") from None


def _choose(
    columns: Columns, names: Sequence[str], images: Sequence[str], builder: TableBuilder, path: Path
) -> Columns:
    """Return the columns that are there, and note which were guessed; the first of ``images`` is the most likely."""
    guessed: list[str] = []

    def find(setting: str, name: str | None, usual: Sequence[str]) -> tuple[str, ...]:
        if name is not None:
            return (find_column(names, name, setting, path),)
        guessed.extend(f"{setting} {found!r}" for found in usual if found not in ("filepath", "title"))
        return tuple(usual)

    settings, lower = columns.settings, {name.lower(): name for name in names}
    given = columns.image or (lower.get("filename") if "filepath" in lower else None)  # Karpathy's: folder and name
    image = next(iter(find(settings[0], given, images[:1])), None)
    captions: tuple[str, ...] | None = None
    if columns.captions is not None:
        captions = tuple(find_column(names, name, settings[1], path) for name in columns.captions)
    elif columns.label is None and not columns.classnames:
        captions = find(settings[1], None, guess_captions([name for name in names if name != image])) or None
    label = columns.label
    if label is not None or captions is None:
        label = next(iter(find("label", label, _usual_columns(names, LABEL_COLUMNS)[:1])), None)
    if image is None or (captions is None and label is None):
        setting = settings[0 if image is None else 1]
        what = "the images" if image is None else "captions or classes"
        hint = "" if image is None or setting != "captions" else " (label=COLUMN if it has classes)"
        if len(names) == 1:
            hint += "; separator names the character between columns, if it has several"
        raise DataError(
            f"{path}: {setting}: no column has a usual name of {what}; name it, {setting}=COLUMN{hint}; its columns: "
            f"{quote_names(names)}"
        )
    if guessed:
        others = [name for name in names if name not in (image, label, *(captions or ()))]
        more = f" (others: {quote_names(others[:5])})" if others else ""
        builder.notes.append(f"columns found by their names: {', '.join(guessed)}{more}")
    return Columns(image, captions, label)


def _names(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the columns of a row, and keys in objects such as ``meta.caption``."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < 2:
            yield from _names(value, f"{prefix}{key}.", depth + 1)


def guess_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the first usual name that a column has, in any case, or else a key in an object."""
    return next(iter(_usual_columns(names, usual)), None)


def guess_captions(names: Sequence[str]) -> tuple[str, ...]:
    """Return the column with a usual name of captions, all that are numbered, or the only one with a similar name."""
    if (usual := guess_column(names, CAPTION_COLUMNS)) is not None:
        return (usual,)
    lower = {name: name.strip().lower() for name in names}
    if numbered := tuple(name for name in names if _NUMBERED.fullmatch(lower[name])):
        return numbered
    similar = [name for name in names if _SIMILAR.fullmatch(lower[name]) and not _OTHER.fullmatch(lower[name])]
    return tuple(similar) if len(similar) == 1 else ()


def _usual_columns(names: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the columns that have usual names, in any case, in the order of these; or else such keys in objects."""
    for part in (lambda name: name, lambda name: name.rpartition(".")[2]):
        known = {part(name).strip().lower(): name for name in reversed(names)}
        if found := [known[name] for name in usual if name in known]:
            return found
    return []


def _names_files(rows: Sequence[Row], column: str, root: Path) -> bool:
    """Return whether most of the values in a column are files, or end like images."""
    paths = [path for row in rows[:20] if (path := _image(row.values, column)) and protocol_of(path) is None]
    found = [path for path in paths if path.lower().endswith(IMAGE_ENDINGS) or os.path.isfile(root / path)]
    return 2 * len(found) > len(paths)


def find_column(names: Sequence[str], name: str, setting: str, path: Path) -> str:
    """Return the column of a name, without regard to blanks and, if none is equal, to case."""
    for same in (lambda text: text, str.strip, lambda text: text.strip().lower()):
        found = [each for each in names if same(each) == same(name)]
        if len(found) > 1:
            raise DataError(f"{path}: {setting}: {len(found)} columns are called {name!r}; give each its own name")
        if found:
            return found[0]
    close = difflib.get_close_matches(name, [each[:80] for each in names[:1000]], n=1)
    raise DataError(f"{path}: {setting}: no column {name!r}; its columns: {quote_names(names)}{did_you_mean(close)}")


def _image(values: Mapping[str, Any], key: str | None) -> str:
    """Return the path of an image: a text, a number, the `path` of an object, or the only item of a list."""
    value = look_up(values, key or "")
    if isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("path", "file_name", "filename", "file", "url") if name in value), "")
    path = re.sub(r"#\d+$", "", plain_text(value))  # the number of the caption, in the tables of Flickr30k
    folder = values.get("filepath")
    if key == "filename" and isinstance(folder, str) and folder:
        return folder if folder.endswith(path) else f"{folder}/{path}"
    return path


def plain_text(value: object) -> str:
    """Return a name or number as text: whole numbers without a point, "" for nulls and other values."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else "" if math.isnan(value) else str(value)
    return str(value).strip() if isinstance(value, (str, int)) else ""


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


@dataclass(frozen=True)
class _Spelling:
    """Spelling of the paths of a table; found out from its first ones, since others may be missing files."""

    folder: str = ""
    """Beginning of relative paths."""
    ending: str = ""
    """Ending of those without one."""
    digits: int = 0
    """Width of numbers, such as COCO's ids: 139 is 000000000139.jpg."""
    slashes: bool = False
    """Replace backslashes, as Windows has them."""

    def __call__(self, path: str) -> str:
        if not path or protocol_of(path) is not None or os.pardir in path.split("/"):
            return path
        path = path.replace("\\", "/") if self.slashes else path
        if self.ending and not path.lower().endswith(IMAGE_ENDINGS):
            path = (path.zfill(self.digits) if path.isdigit() else path) + self.ending
        return os.path.join(self.folder, path)

    @classmethod
    def find(cls, paths: Sequence[str], root: Path, look_beside: bool, builder: TableBuilder) -> _Spelling:
        """Return the way in which most of the paths name files; the plain one if none does."""
        paths = [path for path in dict.fromkeys(paths) if path and protocol_of(path) is None][:20]
        slashes = any("\\" in path for path in paths)
        endings = [("", 0)]
        if any(not path.lower().endswith(IMAGE_ENDINGS) for path in paths):
            digits = (0, 12) if any(path.isdigit() for path in paths) else (0,)
            endings += [(ending, width) for width in digits for ending in (*IMAGE_ENDINGS, ".JPG", ".PNG")]

        def best(folders: Iterable[str]) -> list[_Spelling]:
            both = sorted({False, slashes})
            ways = [cls(folder, *each, way) for folder in folders for way in both for each in endings]
            counts = [sum(os.path.isfile(root / way(path)) for path in paths) for way in ways]
            most = max(counts, default=0)
            return [way for way, count in zip(ways, counts, strict=True) if count == most > 0]

        if found := best([""]):
            return found[0]
        if not paths or not look_beside:
            return cls()
        for above, start in ((root, ""), (root.parent, f"{root.parent}{os.sep}")):
            builder.read_from(above)
            try:
                folders = sorted(each.name for each in os.scandir(above) if each.is_dir() and each.name[0] != ".")
            except OSError:
                folders = []
            found = best(f"{start}{name}/" for name in folders[:200])
            places = [str(root / each) for each in dict.fromkeys(way.folder for way in found)]
            if len(places) > 1:
                raise DataError(
                    f"{root}: images of the table are in {', '.join(places[:5])}; set images to one of them"
                )
            if places:
                builder.notes.append(f"images found in {places[0]}; images names another folder")
                return found[0]
        return cls()


class Classes:
    """Numbers of classes, whose names are given or found.

    Args:
        names: names in the order of their numbers; empty: they are found.
        path: the table, for messages.
        aliases: other names, such as WordNet's ids, with their numbers.
    """

    def __init__(self, names: Sequence[str], path: Path, aliases: Mapping[str, int] | None = None):
        self.names = tuple(names)
        self._path = path
        self._numbers = {**{name: number for number, name in enumerate(names)}, **(aliases or {})}
        self._twice = {name for name, count in Counter(names).items() if count > 1}

    @classmethod
    def read(cls, given: ClassNames, path: Path, builder: TableBuilder) -> Classes:
        """Return the classes of a setting: a list, or a file of names.

        A text file has one name a line, or the name of the class in the data, a blank and the name to use, as Kaggle's
        ``LOC_synset_mapping.txt``. JSON has a list of names, or an object of names in the data and names to use, or of
        numbers and both, as ``imagenet_class_index.json``.

        Raises:
            DataError: the file cannot be read.
        """
        if isinstance(given, tuple):
            return cls(given, path)
        file = builder.read_from(given if given.is_absolute() else Path.cwd() / given)
        folder, expected = LocalFolder(file.parent), "one class name a line, or JSON (.json)"
        if file.suffix.lower() != ".json":
            lines = read_lines(folder, file.name, expected)
            pairs = [re.split(r"[\s,]+", line, maxsplit=1) for line in lines]
            if all(len(pair) == 2 and re.fullmatch(r"n\d{8}", pair[0]) for pair in pairs):
                names = [pair[1].partition(",")[0].strip() for pair in pairs]
                return cls(names, path, {pair[0]: number for number, pair in enumerate(pairs)})
            return cls(lines, path)
        try:
            content = json.loads(folder.read(file.name, expected))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: is not JSON: {error}") from None
        values = list(content.values()) if isinstance(content, dict) else content
        if isinstance(content, dict) and all(isinstance(each, list) and len(each) == 2 for each in values):
            content = {str(each[0]): str(each[1]).replace("_", " ") for each in values}
            values = list(content.values())
        if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
            raise DataError(f"{file}: expected a list of class names, or an object that maps the data's names to them")
        aliases = {key: number for number, key in enumerate(content)} if isinstance(content, dict) else None
        return cls(values, path, aliases)

    def number(self, value: str) -> int:
        """Return the number of a class; raises ValueError for one that is empty or not among the given names."""
        if not value and "" not in self._numbers:
            raise ValueError("the class is empty")
        if value in self._twice:
            raise DataError(
                f"{self._path}: class {value[:80]!r}: classnames has it more than once; use numbers in the table, or "
                "give each class its own name"
            )
        if not self.names:
            return self._numbers.setdefault(_whole(value), len(self._numbers))
        if value in self._numbers:
            return self._numbers[value]
        number = _whole(value)
        if number.isascii() and number.isdigit() and len(number) < 19 and int(number) < len(self.names):
            return int(number)
        raise ValueError(f"class {value[:80]!r}; expected one of classnames, or its number, 0 to {len(self.names) - 1}")

    def finish(self, builder: TableBuilder, templates: Sequence[str]) -> FileTable:
        """Return the table with its class names, sorted unless they are given."""
        if self.names:
            return builder.finish(self.names, templates)
        names = sorted(self._numbers)
        if ids := describe_ids(names):
            raise DataError(f"{self._path}: {ids}")
        places = {self._numbers[name]: place for place, name in enumerate(names)}
        builder.relabel(places)
        return builder.finish(names, templates)


def describe_ids(names: Sequence[str]) -> str:
    """Return a remark if classes are named by ids, which prompts should not contain; otherwise ""."""
    for kind, pattern in (("WordNet ids", r"n\d{8}"), ("numbers", r"[0-9]+")):
        if names and all(re.fullmatch(pattern, name) for name in names):
            return (
                f"the classes are {kind} without names ({', '.join(names[:3])}), which prompts would contain; set "
                "classnames: a list, or a file such as LOC_synset_mapping.txt"
            )
    return ""


def is_split(name: str) -> bool:
    """Return whether a folder or key is called as a part of a data set, such as train2017, rather than as a class."""
    return _SPLIT.fullmatch(name.lower()) is not None


def _whole(text: str) -> str:
    """Return a number such as 3.0 as 3."""
    return text.partition(".")[0] if re.fullmatch(r"\d+\.0+", text) else text
