"""Columns of tables, and captions: which column holds the image, the captions and the class, and what values mean.

The same for CSV, JSON, Parquet and `datasets`: columns are those that the user names, or else have usual names.
Captions are values of a table, or in the .txt or .json of a sample.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import json
import math
import re
import tokenize
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field

from vqclip.config import did_you_mean
from vqclip.data.sources.base import SourceConfigBase, name_sample
from vqclip.data.sources.class_names import DEFAULT_TEMPLATE, Classes, ClassNames, Templates
from vqclip.errors import ConfigError, DataError, quote_names

MAX_CAPTION = 65_536
"""Characters of a caption at most. The whole caption is tokenized before it is cut to the context length, so a few
gigantic captions would delay every process."""
TEXT_KEYS = ("raw", "caption", "captions", "text", "value", "content", "sentence", "sentences", "title")
"""Keys of an object that is given instead of a caption."""
Weighted = Annotated[
    dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    Field(min_length=1),
    AfterValidator(lambda given: dict(sorted(given.items()))),  # caches number the keys, however they were written
]
"""Key or column of captions → its weight among those of a sample, when one is drawn."""
_ANSWERERS = ("gpt", "assistant", "model", "bot", "chatbot")
_MAX_DEPTH = 8


@dataclass(frozen=True)
class CaptionFiles:
    """Captions in the .txt or .json of a sample, in a shard or beside an image."""

    mode: Literal["txt", "txt_lines", "json"]
    """See `vqclip.data.CaptionShardsConfig.captions`."""
    json_keys: tuple[str, ...] = ()
    """Keys of the .json with captions; see `find_captions`."""

    @property
    def kind(self) -> Literal["txt", "json"]:
        """Ending of the file's name."""
        return "json" if self.mode == "json" else "txt"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Settings that change captions."""
        return {"captions": self.mode, "json_keys": list(self.json_keys) if self.mode == "json" else []}

    def parse(self, data: bytes) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the captions in the content of a file, and the number of the key of each in a .json.

        Missing, null and empty values of a .json are skipped if another key has a caption.

        Raises:
            DataError: the file cannot be read, or has no caption.
        """
        text = decode_text(data, self.kind)
        if self.mode != "json":
            return require_usable(text.splitlines() if self.mode == "txt_lines" else [text], "the caption (.txt)"), ()
        try:
            facts = json.loads(text)
            if not isinstance(facts, dict):
                raise ValueError(f"it contains a {type(facts).__name__}; expected an object")
            captions, numbers = find_captions([facts], self.json_keys)
        except (ValueError, RecursionError) as error:
            raise DataError(f".json cannot be read: {error}", "damaged JSON") from None
        if not captions:
            shown = f"{', '.join(map(repr, self.json_keys))}; its keys: {quote_names(facts)}; json_keys names others"
            raise DataError(f".json: no caption under {shown}", "no caption")
        return require_usable(captions), tuple(numbers)


def describe_lines(texts: Iterable[bytes]) -> tuple[str, ...]:
    """Return a note if each of some .txt has several lines, which are often captions of their own."""
    counts = [sum(map(bool, map(bytes.strip, text.replace(b"\0", b"").splitlines()))) for text in texts]  # of UTF-16
    if len(counts) < 2 or min(counts) < 2:
        return ()
    return (f"the first {len(counts)} .txt have several lines, read as one caption; captions: txt_lines divides them",)


def decode_text(data: bytes, ending: str) -> str:
    """Return the content of a file in UTF-8, or UTF-16 with its mark, without white space; raises DataError if not."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding).strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f".{ending} is not UTF-8: {error.reason} at byte {error.start}; save it in UTF-8", "not UTF-8"
        ) from None


def find_captions(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the texts under some keys of mappings, and the number of the key of each; see `look_up`, `find_texts`.

    Raises:
        DataError: a value is no text.
    """
    captions: list[str] = []
    numbers: list[int] = []
    for number, key in enumerate(keys):
        try:
            captions += [text for row in rows for text in find_texts(look_up(row, key))]
        except ValueError as error:
            raise DataError(f"{key!r} contains {error}; expected text or a list of texts", "damaged row") from None
        numbers += [number] * (len(captions) - len(numbers))
    return captions, numbers


def look_up(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under a key, or under one such as ``meta.caption`` in an object; None if there is none."""
    if key in values or "." not in key:
        return values.get(key)
    first, _, rest = key.partition(".")
    inside = values.get(first)
    return look_up(inside, rest) if isinstance(inside, Mapping) else None


def find_texts(value: object, depth: int = 0) -> list[str]:
    """Return the texts in a value, without blanks around them; nulls, NaN and empty ones are skipped.

    The value is a text, an object with a text, such as Karpathy's ``{"raw": ...}``, or a list of these, also spelled as
    text (see `parse_cell`). Of a conversation, as LLaVA has it, the first answer is taken.

    Raises:
        ValueError: it is something else, which the message describes.
    """
    if depth == 0 and isinstance(value, str) and not isinstance(found := parse_cell(value), str):
        with contextlib.suppress(ValueError):
            return find_texts(found, 1)
    if isinstance(value, str):
        return [text] if (text := value.removeprefix("\ufeff").strip()) else []
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return []
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return [text for each in _without_questions(value) for text in find_texts(each, depth + 1)]
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        if (key := next((key for key in TEXT_KEYS if key in value), None)) is not None:
            return find_texts(value[key], depth + 1)
        raise ValueError(f"an object with the keys {quote_names(value)}")
    raise ValueError(f"a {type(value).__name__}")


def parse_cell(cell: str) -> object:
    """Return the list of texts or the object that a text spells, as JSON, Python or NumPy do; others as they are."""
    text = cell.strip()
    if text[:1] + text[-1:] != "[]" and (text[:2] not in ('{"', "{'") or text[-1] != "}"):
        return cell
    for parse in (json.loads, _parse_list if text[0] == "[" else ast.literal_eval):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of backslashes
                found = parse(text)
        except (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict) or (isinstance(found, list) and all(isinstance(each, str | None) for each in found)):
            return found
    return cell


def _parse_list(text: str) -> list[str | None]:
    """Return the texts of a list as Python or NumPy write it: NumPy has no commas, and Python would join its texts."""
    found: list[str | None] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            found.append(ast.literal_eval(token.string))
        elif token.string in ("None", "nan"):
            found.append(None)
        elif token.string.strip() not in ("", "[", "]", ","):
            raise ValueError(f"contains {token.string[:20]}")
    return found


def _without_questions(values: Sequence[object]) -> Sequence[object]:
    """Return the first answer of a conversation; other lists as they are."""
    speakers = [each.get("from", each.get("role")) if isinstance(each, Mapping) else None for each in values]
    if not speakers or None in speakers:
        return values
    return [turn for turn, speaker in zip(values, speakers, strict=True) if speaker in _ANSWERERS][:1]


def require_usable(texts: Iterable[str], what: str = "the caption") -> tuple[str, ...]:
    """Return the captions of a sample, without blanks around them and without empty ones.

    Raises:
        DataError: none is left, or one is too long or not UTF-8.
    """
    captions = tuple(stripped for text in texts if (stripped := text.strip()))
    if not captions:
        raise DataError(f"{what} is empty", "no caption")
    for caption in captions:
        if len(caption) > MAX_CAPTION:
            what = f"caption of {len(caption)} characters; at most {MAX_CAPTION} are read"
            raise DataError(what, "caption too long")
        try:
            caption.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a character
            what = f"caption with a lone surrogate at character {error.start}: {caption[:80]!r}"
            raise DataError(what, "not UTF-8") from None
    return captions


IMAGE_COLUMNS = (
    *("filepath", "file_path", "image_path", "img_path", "imagepath", "filename", "file_name", "image_name"),
    *("image_file", "image_filename", "image", "images", "img", "path", "file", "photo", "url", "image_url"),
    *("jpg", "jpeg", "png", "webp", "picture", "filepaths", "image_paths", "filenames", "fname", "img_name"),
    *("image_file_name", "input_file_name", "imagefile", "img_file", "local_path", "relative_path"),
    *("image_id", "imageid", "img_id", "name", "id"),
)
_CAPTION_COLUMNS = (
    *("caption", "captions", "text", "texts", "title", "sentence", "sentences", "comment", "description"),
    *("raw", "alt_text", "alt", "prompt", "caption_str", "txt", "conversations", "messages"),
)
_LABEL_COLUMNS = (
    *("label", "labels", "cls", "class", "class_name", "classname", "category", "category_name", "target"),
    *("fine_label", "species", "label_name", "class_id", "label_id"),
)
_NUMBERED = re.compile(r"(caption|text|sentence|comment|title)s?[ _]?\d+")
_SIMILAR = re.compile(r".*caption.*|texts?[ _.-].+")
_OTHER = re.compile(
    r"(.*[ _.-])?(ids?|url|lang|language|len|length|num|n|count|number|score|similarity|tokens|source|model|type|color"
    r"|path|file|filename|hash|embeddings?)"
    r"([ _.-].*)?"
)
"""Names that are similar to those of captions, of columns with other facts."""
_SPLIT = re.compile(
    r"(train(val|ing)?|restval|val(id|idation)?|test(ing)?|dev|eval|minival)([ _-]?(\d+|set|data|images)|[ab])?"
)
_READ = {
    "image": (("bytes", "image", "text", "texts"), "bytes, structs with bytes, or text"),
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


_Value: TypeAlias = str | bool | int | float


def _as_text(value: object) -> str:
    """Return a value as `ColumnConfig.where` compares it: in text, with 1.0 as 1 and True as true."""
    text = str(value).strip()
    if text in ("True", "False", "TRUE", "FALSE"):
        return text.lower()
    return text.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


class Columns(NamedTuple):
    """Columns that are read."""

    image: str
    captions: tuple[str, ...]
    """Empty: the prompts of the class are the captions."""
    label: str | None
    wanted: Mapping[str, set[str]] = MappingProxyType({})
    """Column → its values in the rows that are read."""
    classes: Classes | None = None
    """Classes that the label names."""

    def wants(self, row: Mapping[str, Any] | DataError) -> bool:
        """Return whether a row is read; one that cannot be used is a bad sample."""
        if isinstance(row, DataError):
            return True
        return all(_as_text(look_up(row, key)) in values for key, values in self.wanted.items())

    def read(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[int], int]:
        """Return the captions in the rows of one image, the number of the column of each, and the class or -1.

        Raises:
            DataError: a row cannot be used.
            ConfigError: the class is ambiguous.
        """
        label = -1
        if self.classes is not None and self.label is not None:
            with name_sample(self.label):
                label = self.classes.number(plain_text(look_up(rows[0], self.label)))
        return *find_captions(rows, self.captions), label


class ColumnConfig(SourceConfigBase):
    """Settings that all tables have in common; names of columns are found in any case, if none is equal."""

    image: str | None = None
    """Column or key of the images: their paths, such as `filepath` or `meta.file`. In Parquet and hf also bytes,
    base64, a structure of `bytes` and `path` (as Hugging Face writes it), or URLs. null: the only column of bytes or of
    such structures, otherwise one with a usual name."""
    captions: str | Annotated[tuple[str, ...], Field(min_length=1)] | Weighted | None = None
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
    """Prompts with `{c}` for the class name, its "_" as blanks; the captions where there are only classes."""
    where: dict[str, _Value | tuple[_Value, ...]] = {}
    """Values of columns of the rows to read, such as `{split: [train, restval]}`; other rows are left out."""

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
        hint = "" if image is None else " (label=COLUMN if it has classes; not one of 0 and 1 for each class)"
        if len(names) == 1 and hasattr(given, "separator"):
            hint += "; separator names the character between columns, if it has several"
        elif image is None and types is None and hasattr(given, "columns"):
            hint += ", or, if the first row is no header, columns: [image, caption]"
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
    read = tuple(f"{each}." for each in (image, label, *captions))
    if guessed and (others := [name for name in names if not f"{name}.".startswith(read)]):
        notes.append(f"columns found by their names: {', '.join(guessed)} (others: {quote_names(others[:5])})")
    values = {
        find_column(names, key, "where", path): {*map(_as_text, each if isinstance(each, (tuple, list)) else [each])}
        for key, each in given.where.items()
    }
    return Columns(image, captions, label, values)


def guess_columns(names: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the columns that have usual names, in the order of these; or else such keys in objects.

    Names are in any case, and with blanks or "-" for "_".
    """
    for part in (lambda name: name, lambda name: name.rpartition(".")[2]):
        exact = {part(name).strip().lower(): name for name in reversed(names)}
        known = {re.sub("[ -]", "_", each): name for each, name in exact.items()} | exact
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
    """Return a name or number, or the only one of a list, as text: 3.0 is 3, and true is 1; "" for other values."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    value = int(value) if isinstance(value, bool) else value
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else "" if math.isnan(value) else str(value)
    return str(value).strip() if isinstance(value, (str, int)) else ""


def are_splits(names: Sequence[str]) -> bool:
    """Return whether all or several are called as parts, or differ in this word alone: cars_train and cars_test.

    Others may be beside those: box_train, box_test and query.
    """
    alone = {re.sub(rf"(?<![^ _.-])({_SPLIT.pattern})(?![^ _.-])", "*", name.lower()) for name in names}
    count = sum(map(is_split, names))
    same = len(alone) < len({name.lower() for name in names})
    return count > 1 or count == len(names) or (same and (len(alone) == 1 or any("train" in each for each in names)))


def is_split(name: str) -> bool:
    """Return whether a folder or key is called as a part of a data set, such as train2017, rather than as a class."""
    return _SPLIT.fullmatch(name.lower()) is not None
