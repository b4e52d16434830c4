"""Images to index or to export with: a folder of files, caption shards or labelled shards."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Protocol, cast

from vqclip.data.remote import is_tar, protocol_of
from vqclip.data.sources.base import RawSample, Source
from vqclip.data.sources.class_folder import CLASSNAMES
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.kinds import parse_source
from vqclip.data.sources.reader import read_image
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.errors import ConfigError, DataError, printable

__all__ = ["ImageFiles", "ImageSource", "open_images"]

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


class ImageSource(Source, Protocol):
    """A source whose samples have unique, readable names."""

    def place(self, index: int) -> str:
        """Return the unique path of a sample below the opened folder: ``pets/cat.png``, ``00003.tar/000031415``."""
        ...


def open_images(path: str, split: str | None = None) -> ImageSource:
    """Open the images at a path; the files there decide the kind of source.

    Args:
        path: labelled shards (a folder with ``classnames.txt``), caption shards (a folder of tars, a tar, a pattern or
            a URL), a folder of image files, in subfolders too, or a file of another kind (see `parse_source`).
        split: of labelled shards; may be omitted where there is only one.

    Raises:
        ConfigError: labelled shards with several splits, and none is named; or a split of anything else.
        DataError: the path contains none of these, or cannot be read.
    """
    folder = Path(path).expanduser()
    if (folder / CLASSNAMES).is_file():
        return ClassShardsConfig(path=str(folder), split=split).build()
    if split is not None:
        raise ConfigError(f"split: got {split!r}, but {path} has no {CLASSNAMES}, so it has no splits; leave it out")
    if folder.is_dir() and not any(map(is_tar, os.listdir(folder))):
        return ImageFiles(folder)
    if not folder.exists() and protocol_of(path) is None and not any(mark in path for mark in "*?[{"):
        raise DataError(
            f"{path}: no such file or folder; expected a folder of images or shards, a tar, a table or a pattern"
        )
    if not folder.is_file():  # a pattern or URL
        return CaptionShardsConfig(path=path).build()
    source = parse_source(path).build()
    if not hasattr(source, "place"):
        raise ConfigError(f"{path}: its images have no names; write them as shards first (vqclip data pack)")
    return cast(ImageSource, source)


class ImageFiles:
    """`ImageSource` of the image files below a folder, sorted by path; hidden files are skipped.

    A file's caption is its name without the ending, with "_" and "-" read as spaces.

    Raises:
        DataError: the folder contains no image file.
    """

    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def __init__(self, folder: Path):
        self.folder = folder
        below = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
        self.files = [p for p in below if not _is_hidden(p) and (folder / p).is_file()]
        if not self.files:
            raise DataError(f"{folder.absolute()}: no image ({', '.join(_ENDINGS)}) in it or below it")

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> RawSample:
        """Read one file; see `Source.read`."""
        image = read_image(self.folder / self.files[index], self.name(index))
        stem = self.files[index].stem
        return RawSample(image, (stem.replace("_", " ").replace("-", " ").strip() or stem,))

    def name(self, index: int) -> str:
        """Return the file's path, for messages."""
        return printable(str(self.folder / self.files[index]), one_line=True)

    def place(self, index: int) -> str:
        """Return the file's path in the folder; see `ImageSource.place`."""
        return self.files[index].as_posix()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Hash of the names and sizes of all files; their contents are not read."""
        lines = (f"{path} {(self.folder / path).stat().st_size}\n" for path in self.files)
        digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
        return {"kind": "pictures", "samples": len(self), "names_sha256": digest}


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
