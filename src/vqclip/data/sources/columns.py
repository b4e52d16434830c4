"""Columns of tables: which of them hold the image, the captions and the class, and what their values mean.

The same for CSV, JSON, Parquet and `datasets`: columns are those that the user names, or else have usual names.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pydantic import model_validator

from vqclip.config import did_you_mean
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data.sources.captions import Weighted, look_up
from vqclip.data.sources.class_names import DEFAULT_TEMPLATE, ClassNames, Templates
from vqclip.errors import ConfigError, DataError, quote_names

IMAGE_COLUMNS = (
    *("filepath", "file_path", "image_path", "img_path", "imagepath", "filename", "file_name", "image_name"),
    *("image_file", "image_filename", "image", "images", "img", "path", "file", "photo", "url", "image_url"),
    *("jpg", "jpeg", "png", "webp", "picture", "image_id", "imageid", "img_id", "name", "id"),
)
_CAPTION_COLUMNS = (
    *("caption", "captions", "text", "texts", "title", "sentence", "sentences", "comment", "description"),
    *("raw", "alt_text", "alt", "prompt", "caption_str", "txt", "conversations", "messages"),
)
_LABEL_COLUMNS = (
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
_READ = {
    "image": (("bytes", "image", "text"), "bytes, structs with bytes, or text"),
    "captions": (("text", "texts"), "text or lists of text"),
    "label": (("integer", "number", "text"), "class numbers or names"),
}
"""Kinds of values that are read, and their names for messages."""


Row: TypeAlias = tuple[int, Mapping[str, Any] | DataError]
"""Number of a row of a table, for messages, and its values by column, or why it cannot be used."""


class ColumnType(NamedTuple):
    """Type of the values of a column."""

    kind: str
    """text, texts, bytes, image (a structure), integer, number, or "" for others, which are not read."""
    name: str
    """Name of the type, for messages."""


class Columns(NamedTuple):
    """Columns that are read."""

    image: str
    captions: tuple[str, ...]
    """Empty: the prompts of the class are the captions."""
    label: str | None


class ColumnConfig(SourceConfigBase):
    """Settings that all tables have in common; names of columns are found in any case, if none is equal."""

    image: str | None = None
    """Column or key of the images: their paths, such as `filepath` or `meta.file`. In Parquet and hf also bytes,
    base64, a structure of `bytes` and `path` (as Hugging Face writes it), or URLs. null: the only column of bytes or of
    such structures, otherwise one with a usual name."""
    captions: str | tuple[str, ...] | Weighted | None = None
    """Columns or keys of the captions: texts, or lists of texts; with weights, such as {short: 0.7, long: 0.3}, one is
    drawn by them, and then a text of it. null: a usual name, such as caption or text; in CSV and JSON none beside
    `label`. Without captions, they are the prompts of the class."""
    label: str | None = None
    """Column or key of the class of each image: its name, or its number in `classnames`, from 0. null: none, or a usual
    name where there are no captions."""
    classnames: ClassNames = ()
    """Names of the classes in the order of their numbers, or a file with one a line, or `folder name` a line, or JSON;
    empty: those in the table (a ClassLabel of Hugging Face), or the values of the label, sorted."""
    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name, which are the captions where there are only classes."""

    @model_validator(mode="after")
    def _has_captions(self) -> ColumnConfig:
        if self.captions == ():
            raise ValueError("captions: got an empty list; expected names of columns, or null")
        return self

    @property
    def has_classes(self) -> bool | None:
        """Return whether images have classes, if the configuration decides it."""
        return False if self.label is None and self.captions is not None else None


def choose_columns(
    given: ColumnConfig,
    names: Sequence[str],
    images: Sequence[str],
    path: object,
    notes: list[str],
    types: Mapping[str, ColumnType] | None = None,
) -> Columns:
    """Return the columns that are read: those that the user names, or else those with usual names.

    The class is found if there are no captions. Without types, which do not tell captions from other texts, settings of
    classes mean that prompts are the captions.

    Args:
        given: the user's choice.
        names: all columns.
        images: columns that may be that of the images, the most likely first.
        path: the table, for messages.
        notes: gets a remark on columns that were found beside others.
        types: type of each column; None: any column may have any values.

    Raises:
        ConfigError: a column has another type than is read.
        DataError: a column is missing or not plain; the message lists all.
    """
    shown = quote_names(names)
    if types is not None:
        columns = [f"{name[:80]} ({types[name].name[:80]})" for name in names[:30]]
        shown = ", ".join(columns) + (", ..." if len(names) > 30 else "")

    def readable(setting: str, image: str | None = None) -> list[str]:
        kinds = _READ[setting][0]
        return [name for name in names if name != image and (types is None or types[name].kind in kinds)]

    def find(setting: str, name: str) -> str:
        found = find_column(names, name, setting, path)
        if found not in readable(setting):
            stored = "" if types is None else types[found].name
            raise ConfigError(f"{path}: {setting}: column {found!r} is {stored}; expected {_READ[setting][1]}")
        return found

    image = next(iter(images), None) if given.image is None else find("image", given.image)
    captions: tuple[str, ...] = ()
    if given.captions is not None:
        wanted = (given.captions,) if isinstance(given.captions, str) else given.captions
        captions = tuple(find("captions", name) for name in wanted)
    elif types is not None or (given.label is None and not given.classnames):
        captions = _guess_captions(readable("captions", image))
        unread = next(iter(guess_columns([name for name in names if name != image], _CAPTION_COLUMNS)), None)
        if not captions and given.label is None and unread is not None and types is not None:
            raise ConfigError(
                f"{path}: captions: column {unread!r} is {types[unread].name}; expected {_READ['captions'][1]}. Set "
                f"captions to another of {shown}, or set label, whose prompts are then the captions"
            )
    label = None if given.label is None else find("label", given.label)
    if label is None and not captions:
        label = next(iter(guess_columns(readable("label", image), _LABEL_COLUMNS)), None)
    if image is None or (not captions and label is None):
        setting, what = ("image", "the images") if image is None else ("captions", "captions or classes")
        hint = "" if image is None else " (label=COLUMN if it has classes)"
        if len(names) == 1 and types is None:
            hint += "; separator names the character between columns, if it has several"
        if image is None and types is not None and "url" in map(str.lower, names):
            hint += " (and urls: fetch, if they are URLs)"
        raise DataError(
            f"{path}: {setting}: no column has a usual name of {what}; name it, {setting}=COLUMN{hint}; its columns: "
            f"{shown}"
        )
    if label is None and given.classnames:
        raise ConfigError(f"{path}: classnames: set, and no column is read as label; set label to one of {shown}")
    guessed = [f"image {image!r}"] if given.image is None and image != "filepath" else []
    guessed += [f"captions {each!r}" for each in captions if given.captions is None and each != "title"]
    guessed += [f"label {label!r}"] if label is not None and given.label is None else []
    if guessed and (others := [name for name in names if name not in (image, label, *captions)]):
        notes.append(f"columns found by their names: {', '.join(guessed)} (others: {quote_names(others[:5])})")
    return Columns(image, captions, label)


def guess_columns(names: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the columns that have usual names, in any case, in the order of these; or else such keys in objects."""
    for part in (lambda name: name, lambda name: name.rpartition(".")[2]):
        known = {part(name).strip().lower(): name for name in reversed(names)}
        if found := [known[name] for name in usual if name in known]:
            return found
    return []


def _guess_captions(names: Sequence[str]) -> tuple[str, ...]:
    """Return the column with a usual name of captions, all that are numbered, or the only one with a similar name."""
    if usual := guess_columns(names, _CAPTION_COLUMNS):
        return (usual[0],)
    lower = {name: name.strip().lower() for name in names}
    if numbered := tuple(name for name in names if _NUMBERED.fullmatch(lower[name])):
        return numbered
    similar = [name for name in names if _SIMILAR.fullmatch(lower[name]) and not _OTHER.fullmatch(lower[name])]
    return tuple(similar) if len(similar) == 1 else ()


def find_column(names: Sequence[str], name: str, setting: str, path: object) -> str:
    """Return the column of a name, without regard to blanks and, if none is equal, to case."""
    for same in (lambda text: text, str.strip, lambda text: text.strip().lower()):
        found = [each for each in names if same(each) == same(name)]
        if len(found) > 1:
            raise DataError(f"{path}: {setting}: {len(found)} columns are called {name!r}; give each its own name")
        if found:
            return found[0]
    close = difflib.get_close_matches(name, [each[:80] for each in names[:1000]], n=1)
    raise DataError(f"{path}: {setting}: no column {name!r}; its columns: {quote_names(names)}{did_you_mean(close)}")


def path_in(values: Mapping[str, Any], key: str) -> str:
    """Return the path of an image: a text, a number, the `path` of an object, or the only item of a list."""
    value = look_up(values, key)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("path", "file_name", "filename", "file", "url") if name in value), "")
    path = re.sub(r"#\d+$", "", plain_text(value))  # the number of the caption, in the tables of Flickr30k
    folder = values.get("filepath")
    if key == "filename" and isinstance(folder, str) and folder:  # Karpathy's
        return folder if folder.endswith(path) else f"{folder}/{path}"
    return path


def plain_text(value: object) -> str:
    """Return a name or number as text: whole numbers without a point, "" for nulls and other values."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else "" if math.isnan(value) else str(value)
    return str(value).strip() if isinstance(value, (str, int)) else ""


def is_split(name: str) -> bool:
    """Return whether a folder or key is called as a part of a data set, such as train2017, rather than as a class."""
    return _SPLIT.fullmatch(name.lower()) is not None
