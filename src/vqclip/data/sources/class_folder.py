"""Folders in clip_benchmark's layout, on this machine or at a URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from vqclip.data.remote import RemoteConfig, beneath, display_url, fetch_text, is_tar, local_path, protocol_of
from vqclip.data.shard import Shard
from vqclip.data.sources.paths import find_shards
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home, read_bounded

__all__ = [
    "CLASSNAMES",
    "MAX_LINE",
    "SPLIT_HELP",
    "TEMPLATES",
    "ClassFolder",
    "LocalFolder",
    "choose_split",
    "open_folder",
    "read_lines",
    "read_templates",
]

CLASSNAMES = "classnames.txt"
SPLIT_HELP = "its folder of tars; needed where there are several, since none is the default"
"""Help text of the command line option for `choose_split`."""
TEMPLATES = "zeroshot_classification_templates.txt"
_COUNT = "nshards.txt"
_MAX_BYTES = 4 << 20
MAX_LINE = 1000
"""Limits of the two files; ImageNet's class names take 15 kB, at most 120 characters each."""
_MAX_COUNT_BYTES = 64
_MAX_COUNT = 100_000
"""Limits of the third file, which decides how many shards are listed in memory."""


def open_folder(path: str, remote: RemoteConfig) -> ClassFolder:
    """Open the folder at a path or URL.

    Raises:
        DataError: a protocol that is not allowed.
    """
    protocol = protocol_of(path)
    if protocol in (None, "file"):
        return LocalFolder(Path(path if protocol is None else local_path(path)), remote)
    return RemoteFolder(path, remote)


class LocalFolder:
    """A folder in clip_benchmark's layout on this machine."""

    def __init__(self, folder: Path, remote: RemoteConfig | None = None):
        self._folder, self._remote = expand_home(folder).absolute(), remote

    def name(self, file: str) -> str:
        """Return the path of a file or folder in this data set's folder, for messages."""
        return str(self._folder / file)

    def read(self, file: str, expected: str) -> str:
        """Read a text file; raises DataError if it is missing or not UTF-8."""
        try:
            data = read_bounded(self._folder / file, _MAX_BYTES)
        except OSError as error:
            raise DataError(f"{self.name(file)}: cannot be read ({error.strerror}); expected {expected}") from None
        if len(data) > _MAX_BYTES:
            raise DataError(f"{self.name(file)}: more than {_MAX_BYTES} bytes; expected {expected}")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name(file)}: not UTF-8: {error.reason} at byte {error.start}") from None

    def shards(self, split: str) -> Sequence[Shard]:
        """Return the tars of a split; raises DataError if it has none."""
        folder = self._folder
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected one with {CLASSNAMES} and {split}/*.tar")
        if not (folder / split).is_dir():
            raise DataError(f"{folder}: has no split {split!r}; {_where_tars_are(folder)}")
        return find_shards([folder / split], self._remote)


class RemoteFolder:
    """A folder in clip_benchmark's layout at a URL."""

    def __init__(self, url: str, remote: RemoteConfig):
        self._url, self._remote = url, remote

    def name(self, file: str) -> str:
        """Return the path of a file or folder in this data set's folder, for messages."""
        return display_url(self._at(file))

    def read(self, file: str, expected: str) -> str:
        """Read a text file; raises DataError if it is missing or not UTF-8."""
        return fetch_text(self._at(file), self._remote, _MAX_BYTES).removeprefix("\ufeff")

    def shards(self, split: str) -> Sequence[Shard]:
        """Return the tars of a split: ``0.tar``, ``1.tar``, ... if the protocol cannot list folders.

        Raises:
            DataError: there are none.
        """
        if protocol_of(self._url) not in ("http", "https"):
            return find_shards([self._at(split)], self._remote)
        file = f"{split}/{_COUNT}".lstrip("/")
        text = fetch_text(self._at(file), self._remote, _MAX_COUNT_BYTES).strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_COUNT):
            raise DataError(
                f"{self.name(file)}: got {text[:20]!r}; expected the number of shards, at most {_MAX_COUNT}"
            )
        return find_shards(
            [beneath(self._at(split), f"{number}.tar") for number in range(int(text))],
            self._remote,
        )

    def _at(self, file: str) -> str:
        return beneath(self._url, file)


ClassFolder: TypeAlias = LocalFolder | RemoteFolder
"""A folder in clip_benchmark's layout."""


def choose_split(path: str, split: str | None) -> str:
    """Return the split to use: the given one, otherwise the only one in the folder.

    With several splits the user must choose: training on the test split, or testing on the train split, must be
    intended.

    Args:
        path: the folder, or its URL.
        split: the user's choice; None without one.

    Raises:
        ConfigError: none is named, and there are several, or it is a URL.
        DataError: there is no such folder, no tar in it, or it is a split itself.
    """
    if split is not None:
        return split
    protocol = protocol_of(path)
    if protocol not in (None, "file"):
        raise ConfigError(f"split: missing; expected the name of a split of {display_url(path)}")
    folder = expand_home(path if protocol is None else local_path(path)).absolute()
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one with {CLASSNAMES} and SPLIT/*.tar")
    files = (file for file in (*folder.glob("*"), *folder.glob("*/*")) if is_tar(file.name))
    found = sorted({tar.parent.relative_to(folder).name for tar in files})
    if not found or (found == [""] and not (folder / CLASSNAMES).exists() and (folder.parent / CLASSNAMES).exists()):
        raise DataError(f"{folder}: {_where_tars_are(folder)}")
    if len(found) > 1:
        raise ConfigError(f"split: missing; expected one of those in {folder}: {', '.join(map(repr, found))}")
    return found[0]


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


def _where_tars_are(folder: Path) -> str:
    splits = sorted({tar.parent.name for tar in folder.glob("*/*") if is_tar(tar.name)})
    if splits:
        return f"splits with tars: {', '.join(splits)}"
    if not any(is_tar(file.name) for file in folder.glob("*")):
        return "found no *.tar or *.tar.gz in it or one level below"
    above = folder.parent
    if not (folder / CLASSNAMES).exists() and (above / CLASSNAMES).exists():
        return f"it is a split itself: expected the folder above, {above}, and the split {folder.name!r}"
    return 'its tars are directly in it: expected the split ""'
