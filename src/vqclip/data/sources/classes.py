"""Labelled shards in clip_benchmark's layout, whose captions are prompts with the class name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from vqclip.config import Config
from vqclip.data.sources.base import RawSample
from vqclip.data.sources.paths import find_shards
from vqclip.data.sources.reader import ShardReader
from vqclip.data.sources.shards import Weight, require_members
from vqclip.errors import DataError
from vqclip.files import read_bounded

__all__ = ["ClassShards", "ClassShardsConfig", "ClassShardsData"]

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
_MAX_BYTES = 4 << 20
_MAX_LINE = 1000
"""Limits of these two files; ImageNet's classes have 15 kB, and 120 characters at most."""


class ClassShardsData(Config):
    """A folder with `classnames.txt`, `zeroshot_classification_templates.txt` and `<split>/*.tar` of images and .cls.

    This is what clip_benchmark's webdataset export writes. `{c}` in a template stands for the class name, and .cls
    holds a line number of classnames.txt, from 0.
    """

    kind: Literal["classes"] = "classes"
    """Labelled shards."""
    path: Path
    """The folder."""
    split: str = "train"
    """Folder of the split in it; "" if the tars lie beside `classnames.txt`."""

    def shards(self) -> list[Path]:
        """The tars, for `vqclip.data.prepare_sources`.

        Raises:
            DataError: there are none.
        """
        folder = self.path.expanduser()
        if not folder.is_dir():
            raise DataError(
                f"{folder.absolute()}: no such folder; expected one with {CLASSNAMES} and {self.split}/*.tar"
            )
        if not (folder / self.split).is_dir():
            raise DataError(f"{folder.absolute()}: has no split {self.split!r}; {_where_tars_are(folder)}")
        return find_shards([folder / self.split])

    def build(self, cache: Path | None = None) -> ClassShards:
        """Opens the shards, indexing those that are not indexed yet."""
        return ClassShards(self, cache)


class ClassShardsConfig(ClassShardsData):
    """Labelled shards to train on."""

    weight: Weight = 1.0
    """How often a sample of this source appears in an epoch; fractions allowed."""


class ClassShards:
    """A `Source` of labelled images; every prompt with the class name is a caption.

    Args:
        config: where the folder lies.
        cache: folder of the indexes; default `vqclip.data.cache.cache_folder()`.

    Raises:
        DataError: no shards, a damaged one, or class names or templates missing.
    """

    def __init__(self, config: ClassShardsData, cache: Path | None = None):
        self.config = config
        self._reader = ShardReader(config.shards(), cache)
        require_members(self._reader, "image", "cls", config.path / config.split)
        folder = config.path.expanduser()
        self.classnames = read_lines(folder / CLASSNAMES, "one class name a line")
        self.templates = read_templates(folder / TEMPLATES)
        self._prompts = tuple(tuple(t.replace("{c}", name) for t in self.templates) for name in self.classnames)

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, index: int) -> RawSample:
        """Image, prompts and label of one sample; see `Source.read`."""
        text = self._reader.text(index, "cls")
        label = int(text) if text.isascii() and text.isdigit() else -1
        if not 0 <= label < len(self.classnames):
            last = len(self.classnames) - 1
            raise DataError(
                f"{self.name(index)}: .cls holds {text[:20]!r}; expected a class number, 0 to {last}", "class number"
            )
        return RawSample(self._reader.read(index, "image"), self._prompts[label], label)

    def name(self, index: int) -> str:
        """Shard and sample, for messages."""
        return self._reader.name(index)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        prompts = "\n".join(prompt for prompts in self._prompts for prompt in prompts)
        return {
            "kind": "classes",
            "samples": len(self),
            "sha256": self._reader.sha256,
            "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
        }


def read_templates(file: Path) -> tuple[str, ...]:
    """The prompts in a text file, one a line.

    Raises:
        DataError: as `read_lines`, and for a prompt without a place for the class name.
    """
    templates = read_lines(file, "one prompt a line, with {c} for the class name")
    for number, template in enumerate(templates, 1):
        if "{c}" not in template:
            raise DataError(f"{file.absolute()}:{number}: no {{c}} for the class name in {template!r}")
    return templates


def _where_tars_are(folder: Path) -> str:
    splits = sorted({tar.parent.name for tar in folder.glob("*/*.tar")})
    if splits:
        return f"splits with tars: {', '.join(splits)}"
    if not any(folder.glob("*.tar")):
        return "there is no *.tar in it or right below it"
    above = folder.absolute().parent
    if not (folder / CLASSNAMES).exists() and (above / CLASSNAMES).exists():
        return f"it is a split itself: expected the folder above, {above}, and the split {folder.absolute().name!r}"
    return 'its tars lie right in it: expected the split ""'


def read_lines(file: Path, expected: str) -> tuple[str, ...]:
    """The lines of a text file that are not blank at its end, each stripped.

    Raises:
        DataError: the file is missing, empty, not UTF-8, or has a blank line in between.
    """
    try:
        data = read_bounded(file, _MAX_BYTES)
    except OSError as error:
        raise DataError(f"{file.absolute()}: cannot be read ({error.strerror}); expected {expected}") from None
    if len(data) > _MAX_BYTES:
        raise DataError(f"{file.absolute()}: more than {_MAX_BYTES} bytes; expected {expected}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file.absolute()}: not UTF-8: {error.reason} at byte {error.start}") from None
    lines = tuple(line.strip() for line in text.rstrip().replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    for number, line in enumerate(lines, 1):
        if len(line) > _MAX_LINE:
            raise DataError(f"{file.absolute()}:{number}: {len(line)} characters; expected {expected}")
    if not all(lines):
        raise DataError(f"{file.absolute()}:{lines.index('') + 1}: blank line; expected {expected}")
    return lines
