"""Classes: their names and prompts, and where these are given."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from vqclip.data.remote.files import fetch_bytes
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import display_url, local_path
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home, read_bounded

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
_MAX_BYTES = 4 << 20
MAX_LINE = 1000
"""Limits of the two files; ImageNet's class names take 15 kB, at most 120 characters each."""
_SOME, _MANY = 10, 1000
"""With a class for every second row and more classes than this, texts may be no classes, or are none."""
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
    """Return the prompts of each class, with blanks for the "_" of names such as apple_pie."""
    words = (" ".join(name.replace("_", " ").split()) or name for name in classnames)
    return [tuple(each.replace("{c}", name) for each in templates) for name in words]


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
        self.names, note = name_ids(names)
        self._note = "" if self.names == tuple(names) else note  # numbers may be meant
        self._path = path
        self._numbers = {**{name: number for number, name in enumerate(names)}, **(aliases or {})}
        self._used: set[int] = set()
        """Numbers in the data that count the names."""
        self._are_numbered = aliases is not None and all(map(str.isdigit, aliases))
        self._twice = {name for name, count in Counter(names).items() if count > 1}

    @classmethod
    def read(cls, given: ClassNames, path: Path, visit: Callable[[Path], object] = lambda file: None) -> Classes:
        """Return the classes of a setting: a list, or a file of names.

        A text file has one name a line, with its number or without; or an id of WordNet and the name to use, as
        Kaggle's ``LOC_synset_mapping.txt``. JSON has a list of names, or an object of names in the data and names to
        use, of numbers and both, as ``imagenet_class_index.json``, or of names and numbers.

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
        named: Any = read_text(file, expected := "one class name a line, or JSON (.json)")
        if file.suffix.lower() in (".yaml", ".yml"):
            raise DataError(f"{file}: YAML is not read; expected {expected}: copy its names to such a file")
        if file.suffix.lower() != ".json" and named[:1] not in ("{", "["):
            named = read_names(file)
            pairs = [re.split(r"[\s,]+", line, maxsplit=1) for line in named]
            if all(len(pair) == 2 and re.fullmatch(r"n\d{8}", pair[0]) for pair in pairs):
                words = _without_numbers([names.partition(",")[0].strip() for _, names in pairs])
                named = dict(zip((key for key, _ in pairs), words, strict=True))
                if len(named) < len(pairs):
                    raise DataError(f"{file}: has an id twice; expected a line for each class, in the order of numbers")
        else:
            try:
                named = json.loads(named)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}: is not JSON: {error}") from None
            if isinstance(named, dict) and all(isinstance(each, list) and len(each) == 2 for each in named.values()):
                named = {str(key): str(name).replace("_", " ") for key, name in named.values()}
            if isinstance(named, dict) and {*map(str, named.values())} == {*map(str, range(len(named)))} != {*named}:
                named = [name for name, _ in sorted(named.items(), key=lambda each: int(each[1]))]
        names = [*named.values()] if isinstance(named, dict) else named
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(each, str) for each in names):
            raise DataError(f"{file}: expected a list of class names, or an object that maps the data's names to them")
        return cls(names, path, {key: number for number, key in enumerate(named)} if isinstance(named, dict) else None)

    def number(self, value: str) -> int:
        """Return the number of a class.

        Raises:
            DataError: it is empty, or not among the given names.
            ConfigError: it is given more than once.
        """
        if value in ("", "nan", "NaN") and value not in self._numbers:  # as pandas writes what is missing
            raise DataError("the class is empty, or a list of several; expected one", "class number")
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
            if int(number) < len(self.names) and not self._are_numbered:
                return int(number)
        raise DataError(
            f"class {value[:80]!r}; expected one of classnames, or its number, 0 to {len(self.names) - 1}",
            "class number",
        )

    def sort(self, rows: int) -> dict[int, int]:
        """Sort the names, unless they are given; return the new number of each class that has another one.

        Raises:
            DataError: the names that were found are ids.
            ConfigError: nearly every row has its own class.
        """
        if self.names:
            count = len(self.names)
            if 0 in self._used if self._are_numbered else count in self._used and 0 not in self._used:
                what = f'a class has the number {count}; expected 0 to {count - 1}, or "" as the first name'
                if self._are_numbered:
                    what = "a class has the number 0, which is none of those in classnames; are these from 1?"
                raise ConfigError(f"{self._path}: {what}")
            return {}
        former, found = self._numbers, sorted(self._numbers)
        self.names, self._note = name_ids(found)
        if self._note and self.names == tuple(found):
            raise DataError(f"{self._path}: classnames: missing: {self._note}")
        if len(found) > max(_SOME, rows // 2):
            what = f"label: {len(found)} classes in {rows} rows; if they are captions, set captions to this column"
            if len(found) > _MANY:
                raise ConfigError(f"{self._path}: {what}, otherwise classnames")
            self._note = self._note or what
        self._numbers = {name: number for number, name in enumerate(found)}
        return {former[name]: number for name, number in self._numbers.items()}

    def describe(self) -> tuple[str, ...]:
        """Return notes on the names, for data whose prompts contain them."""
        return (*filter(None, [self._note]), *describe_names(self.names))


def _without_numbers(lines: Sequence[str]) -> Sequence[str]:
    """Return lines such as ``1 cat`` or ``cat,1`` in the order of the numbers and without them, or a header above them.

    Other lines are returned as they are: the numbers must count them from 0 or 1, and most names must differ.
    """
    for below in (lines, () if re.search(r"\d", lines[0]) else lines[1:]):
        for pattern in (r"(?P<number>\d+)[\s,:.)=-]+(?P<name>.+)", r"(?P<name>.+?)[\s,:=]+(?P<number>\d+)"):
            found = [match for line in below if (match := re.fullmatch(pattern, line))]
            named = sorted((int(match["number"]), match["name"]) for match in found if len(match["number"]) < 9)
            numbers, names = [number for number, _ in named], [name for _, name in named]
            counts = [[*range(first, first + len(below))] for first in (0, 1)]
            if numbers in counts and 2 * len({*names}) > len(below) > 1:
                return _without_numbers(names)  # CUB: 1 001.Black_footed_Albatross
    return lines


def name_ids(names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Name classes that are called by ids, which prompts should not contain.

    WordNet's ids get the names of open_clip (ImageNet-1k) or else of timm; numbers are left. Names such as
    001.Albatross lose the number or id, if all have one of their own and differ.

    Returns:
        The names, and a note if they were ids or had them, otherwise "".
    """
    found = [re.fullmatch(r"(\d+|n\d{8})[ ._-]+(\D.*)", name, re.DOTALL) for name in names]
    pairs = [(each[1], each[2]) for each in found if each is not None]
    if len(pairs) > 1 and all(len({*each}) == len(names) for each in zip(*pairs, strict=True)):
        note = f"numbers and ids before the names of classes are left out: {names[0]}, ..."
        return tuple(name for _, name in pairs), note
    for kind, pattern in (
        ("WordNet ids", r"n\d{8}"),
        ("numbers", r"-?[0-9]+([_. ][0-9]+)*"),
        ("truth values", "(?i:true|false)"),
    ):
        if names and all(re.fullmatch(pattern, name) for name in names):
            ids = ", ".join(names[:3])
            if kind == "WordNet ids" and (known := _name_synsets(names)):
                note = f"the classes are {kind} ({ids}), named {', '.join(known[:3])} as in open_clip and timm"
                return known, f"{note}; classnames sets other names"
            return tuple(names), (
                f"the classes are {kind} without names ({ids}), which prompts would contain; set classnames: a list, "
                "or a file such as LOC_synset_mapping.txt"
            )
    return tuple(names), ""


def _name_synsets(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the names of WordNet ids; () if one is unknown."""
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    usual = dict(zip(info.label_names(), IMAGENET_CLASSNAMES, strict=True))
    try:
        return tuple(usual.get(each) or info.label_name_to_description(each).partition(",")[0] for each in ids)
    except KeyError:
        return ()


def describe_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note if all prompts are equal, as there is a single class, and one on classes with the same name."""
    if len(names) == 1:
        return (f"all samples are of one class, {names[0][:80]!r}: prompts tell no image from another",)
    first: dict[str, int] = {}
    twins = [(first.setdefault(name.lower(), number), number) for number, name in enumerate(names) if name]
    same = [f"{names[twin][:80]!r} and {names[each][:80]!r}" for twin, each in twins if twin != each]
    return (f"classes are equal but for upper and lower case: {', '.join(same[:5])}",) if same else ()


def read_text(place: str | Path, expected: str, remote: RemoteConfig | None = None, limit: int = _MAX_BYTES) -> str:
    """Read a small text file at a path or URL; raises DataError if it is missing, larger than a limit or not UTF-8."""
    local, name = local_path(str(place)), display_url(str(place))
    try:
        if local is None:
            data = fetch_bytes(str(place), remote or RemoteConfig(), limit)
        else:
            data = read_bounded(expand_home(local), limit)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}); expected {expected}") from None
    if len(data) > limit:
        raise DataError(f"{name}: more than {limit} bytes; expected {expected}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_lines(place: str | Path, expected: str, remote: RemoteConfig | None = None) -> tuple[str, ...]:
    """Return the stripped lines of a text file, without blank lines at its end; those between others are empty.

    Raises:
        DataError: the file is missing, empty or not UTF-8.
    """
    text = read_text(place, expected, remote).rstrip().replace("\r\n", "\n").replace("\r", "\n")
    lines, name = tuple(line.strip() for line in text.split("\n")), display_url(str(place))
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise DataError(f"{name}:{number}: {len(line)} characters; expected {expected}")
    if not any(lines):
        raise DataError(f"{name}:1: blank line; expected {expected}")
    return lines


def read_names(place: str | Path, remote: RemoteConfig | None = None) -> tuple[str, ...]:
    """Return the names of classes in a file, one a line, without numbers that count them.

    Raises:
        DataError: as `read_lines`, and for a line of JSON or of a program.
    """
    lines = read_lines(place, "one class name a line", remote)
    for number, line in enumerate(lines, 1):
        if re.search(r'["{}\[\]]|,$', line):
            where = f"{display_url(str(place))}:{number}"
            raise DataError(f"{where}: got {line!r}; expected a class name, without quotes, brackets and a last comma")
    return tuple(_without_numbers(lines))


def read_templates(place: str | Path, remote: RemoteConfig | None = None) -> tuple[str, ...]:
    """Return the prompts in a file, one a line.

    Raises:
        DataError: as `read_lines`, and for a prompt without a placeholder for the class name.
    """
    templates = read_lines(place, "one prompt a line, with {c} for the class name", remote)
    for number, template in enumerate(templates, 1):
        if template and "{c}" not in template:
            raise DataError(f"{display_url(str(place))}:{number}: no {{c}} for the class name in {template!r}")
    return tuple(filter(None, templates))
