"""Classes: their names and prompts, where these are given, and folders in clip_benchmark's layout."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from vqclip.data.remote.files import Shard, fetch_bytes, is_tar
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import beneath, display_url, local_path, protocol_of
from vqclip.data.sources.paths import find_shards
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home, read_bounded

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
_COUNT = "nshards.txt"
_MAX_BYTES = 4 << 20
MAX_LINE = 1000
"""Limits of the two files; ImageNet's class names take 15 kB, at most 120 characters each."""
_MAX_COUNT_BYTES = 64
_MAX_COUNT = 100_000
"""Limits of the third file, which decides how many shards are listed in memory."""
DEFAULT_TEMPLATE = "a photo of a {c}"
"""Prompt of data with classes and without prompts."""

ClassNames = tuple[str, ...] | Path
"""Names of classes, or a file of them; see `Classes`."""


def _have_places(templates: tuple[str, ...]) -> tuple[str, ...]:
    if not templates or not all("{c}" in each for each in templates):
        raise ValueError(f"got {list(templates)}; expected prompts with {{c}} for the class name")
    return templates


Templates = Annotated[tuple[str, ...], AfterValidator(_have_places)]
"""At least one prompt, each with ``{c}`` for the class name."""


def fill_templates(templates: Sequence[str], classnames: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the prompts of each class."""
    return [tuple(each.replace("{c}", name) for each in templates) for name in classnames]


def checksum_prompts(prompts: Sequence[Sequence[str]]) -> str:
    """Return the SHA-256 of the prompts of all classes."""
    return hashlib.sha256(
        "\n".join(each for prompts_of_class in prompts for each in prompts_of_class).encode()
    ).hexdigest()


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
        self._used: set[int] = set()
        self._twice = {name for name, count in Counter(names).items() if count > 1}

    @classmethod
    def read(cls, given: ClassNames, path: Path, visit: Callable[[Path], object] = lambda file: None) -> Classes:
        """Return the classes of a setting: a list, or a file of names.

        A text file has one name a line, or the name of the class in the data, a blank and the name to use, as Kaggle's
        ``LOC_synset_mapping.txt``. JSON has a list of names, or an object of names in the data and names to use, or of
        numbers and both, as ``imagenet_class_index.json``.

        Args:
            given: the setting.
            path: the table, for messages.
            visit: called with a file before it is read.

        Raises:
            DataError: the file cannot be read.
        """
        if isinstance(given, tuple):
            return cls(given, path)
        file = given.absolute()
        visit(file)
        folder, expected = ClassFolder(file.parent), "one class name a line, or JSON (.json)"
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
        """Return the number of a class.

        Raises:
            DataError: it is empty, or not among the given names.
            ConfigError: it is given more than once.
        """
        if not value and "" not in self._numbers:
            raise DataError("the class is empty", "class number")
        if value in self._twice:
            raise ConfigError(
                f"{self._path}: class {value[:80]!r}: classnames has it more than once; use numbers, or other names"
            )
        number = value.partition(".")[0] if re.fullmatch(r"\d+\.0+", value) else value
        if not self.names:
            return self._numbers.setdefault(number, len(self._numbers))
        for each in (value, number):
            if each in self._numbers:
                return self._numbers[each]
        if number.isascii() and number.isdigit() and len(number) < 19 and int(number) <= len(self.names):
            self._used.add(int(number))
            if int(number) < len(self.names):
                return int(number)
        raise DataError(
            f"class {value[:80]!r}; expected one of classnames, or its number, 0 to {len(self.names) - 1}",
            "class number",
        )

    def not_from_zero(self, path: object) -> ConfigError:
        """Return the error for numbers that go from 1 to the number of names."""
        n = len(self.names)
        return ConfigError(
            f'{path}: classes have the numbers 1 to {n}; expected 0 to {n - 1}, or "" as first class name'
        )

    def sort(self) -> dict[int, int]:
        """Sort the names, unless they are given; return the new number of each class that has another one.

        Raises:
            DataError: the names that were found are ids.
        """
        if self.names:
            if self._used == {*range(1, len(self.names) + 1)}:
                raise self.not_from_zero(self._path)
            return {}
        former, self.names = self._numbers, tuple(sorted(self._numbers))
        if ids := describe_ids(self.names):
            raise DataError(f"{self._path}: classnames: missing: {ids}")
        self._numbers = {name: number for number, name in enumerate(self.names)}
        return {former[name]: number for name, number in self._numbers.items()}


def describe_ids(names: Sequence[str]) -> str:
    """Return a remark if classes are named by ids, which prompts should not contain; otherwise ""."""
    for kind, pattern in (("WordNet ids", r"n\d{8}"), ("numbers", r"[0-9]+")):
        if names and all(re.fullmatch(pattern, name) for name in names):
            return (
                f"the classes are {kind} without names ({', '.join(names[:3])}), which prompts would contain; set "
                "classnames: a list, or a file such as LOC_synset_mapping.txt"
            )
    return ""


def describe_single(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note if there is a single class, so that all prompts are equal."""
    if len(names) != 1:
        return ()
    return (f"all rows are of one class, {names[0][:80]!r}: prompts tell no image from another",)


class ClassFolder:
    """A folder of classes, in clip_benchmark's layout if it has tars.

    Args:
        path: its path or URL.
        remote: how files at URLs are downloaded.

    Raises:
        DataError: a protocol that is not allowed.
    """

    def __init__(self, path: str | Path, remote: RemoteConfig | None = None):
        self._remote = remote or RemoteConfig()
        local = local_path(str(path))
        self._place: Path | str = str(path) if local is None else expand_home(local).absolute()

    def name(self, file: str) -> str:
        """Return the path of a file or folder in this folder, for messages."""
        if isinstance(self._place, Path):
            return str(self._place / file)
        return display_url(beneath(self._place, file))

    def read(self, file: str, expected: str, limit: int = _MAX_BYTES) -> str:
        """Read a text file; raises DataError if it is missing, larger than a limit or not UTF-8."""
        try:
            if isinstance(self._place, str):
                data = fetch_bytes(beneath(self._place, file), self._remote, limit)
            else:
                data = read_bounded(self._place / file, limit)
        except OSError as error:
            raise DataError(f"{self.name(file)}: cannot be read ({error.strerror}); expected {expected}") from None
        if len(data) > limit:
            raise DataError(f"{self.name(file)}: more than {limit} bytes; expected {expected}")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name(file)}: not UTF-8: {error.reason} at byte {error.start}") from None

    def shards(self, split: str) -> Sequence[Shard]:
        """Return the tars of a split: ``0.tar``, ``1.tar``, ... if the protocol cannot list folders.

        Raises:
            DataError: there are none.
        """
        if isinstance(self._place, Path):
            folder = _require_folder(self._place, split)
            if not (folder / split).is_dir():
                raise DataError(f"{folder}: has no split {split!r}; {_where_tars_are(folder)}")
            return find_shards([folder / split], self._remote)
        place = beneath(self._place, split)
        if protocol_of(place) not in ("http", "https"):
            return find_shards([place], self._remote)
        file, expected = f"{split}/{_COUNT}".lstrip("/"), f"the number of shards, at most {_MAX_COUNT}"
        text = self.read(file, expected, _MAX_COUNT_BYTES).strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_COUNT):
            raise DataError(f"{self.name(file)}: got {text[:20]!r}; expected {expected}")
        return find_shards([beneath(place, f"{number}.tar") for number in range(int(text))], self._remote)

    def choose_split(self, split: str | None) -> str:
        """Return the split to use: the given one, otherwise the only one in the folder.

        With several splits the user must choose: training on the test split, or testing on the train split, must be
        intended.

        Raises:
            ConfigError: none is named, and there are several, or it is a URL.
            DataError: there is no such folder, no tar in it, or it is a split itself.
        """
        if split is not None:
            return split
        if isinstance(self._place, str):
            raise ConfigError(f"split: missing; expected the name of a split of {display_url(self._place)}")
        folder = _require_folder(self._place, "SPLIT")
        files = (file for file in (*folder.glob("*"), *folder.glob("*/*")) if is_tar(file.name))
        found = sorted({tar.parent.relative_to(folder).name for tar in files})
        if not found or (found == [""] and _is_split(folder)):
            raise DataError(f"{folder}: {_where_tars_are(folder)}")
        if len(found) > 1:
            raise ConfigError(f"split: missing; expected one of those in {folder}: {', '.join(map(repr, found))}")
        return found[0]


def _require_folder(folder: Path, split: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one with {CLASSNAMES} and {split}/*.tar")
    return folder


def read_lines(folder: ClassFolder, file: str, expected: str) -> tuple[str, ...]:
    """Return the stripped lines of a text file, without blank lines at its end; those between others are empty.

    Raises:
        DataError: the file is missing, empty or not UTF-8.
    """
    text = folder.read(file, expected).rstrip().replace("\r\n", "\n").replace("\r", "\n")
    lines = tuple(line.strip() for line in text.split("\n"))
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise DataError(f"{folder.name(file)}:{number}: {len(line)} characters; expected {expected}")
    if not any(lines):
        raise DataError(f"{folder.name(file)}:1: blank line; expected {expected}")
    return lines


def read_templates(folder: ClassFolder, file: str = TEMPLATES) -> tuple[str, ...]:
    """Return the prompts in a file of a folder, one a line.

    Raises:
        DataError: as `read_lines`, and for a prompt without a placeholder for the class name.
    """
    templates = read_lines(folder, file, "one prompt a line, with {c} for the class name")
    for number, template in enumerate(templates, 1):
        if template and "{c}" not in template:
            raise DataError(f"{folder.name(file)}:{number}: no {{c}} for the class name in {template!r}")
    return tuple(filter(None, templates))


def _is_split(folder: Path) -> bool:
    return not (folder / CLASSNAMES).exists() and (folder.parent / CLASSNAMES).exists()


def _where_tars_are(folder: Path) -> str:
    splits = sorted({tar.parent.name for tar in folder.glob("*/*") if is_tar(tar.name)})
    if splits:
        return f"splits with tars: {', '.join(splits)}"
    if not any(is_tar(file.name) for file in folder.glob("*")):
        return "found no *.tar or *.tar.gz in it or one level below"
    if _is_split(folder):
        return f"it is a split itself: expected the folder above, {folder.parent}, and the split {folder.name!r}"
    return 'its tars are directly in it: expected the split ""'
