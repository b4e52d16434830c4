"""Images to index or to export with: a folder of files, caption shards or labelled shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, cast

from vqclip.data.prepare import open_source
from vqclip.data.remote import is_tar, protocol_of
from vqclip.data.sources.base import Source, SourceConfigBase
from vqclip.data.sources.class_folder import CLASSNAMES
from vqclip.data.sources.kinds import parse_source
from vqclip.errors import ConfigError, DataError

__all__ = ["ImageSource", "open_images"]


class ImageSource(Source, Protocol):
    """A source whose samples have unique, readable names."""

    config: SourceConfigBase

    def place(self, index: int) -> str:
        """Return the unique path of a sample below the opened folder: ``pets/cat.png``, ``00003.tar/000031415``."""
        ...


def open_images(path: str, split: str | None = None) -> ImageSource:
    """Open the images at a path; the files there decide the kind of source.

    Args:
        path: labelled shards (a folder with ``classnames.txt``), caption shards (a folder of tars, a tar, a pattern or
            a URL), a folder of image files, in subfolders too, whose captions are their names, or a file of another
            kind (see `parse_source`).
        split: of labelled shards; may be omitted where there is only one.

    Raises:
        ConfigError: labelled shards with several splits, and none is named; or a split of anything else.
        DataError: the path contains none of these, or cannot be read.
    """
    folder = Path(path).expanduser()
    labelled = (folder / CLASSNAMES).is_file()
    if split is not None and not labelled:
        raise ConfigError(f"split: got {split!r}, but {path} has no {CLASSNAMES}, so it has no splits; leave it out")
    if not folder.exists() and protocol_of(path) is None and not any(mark in path for mark in "*?[{"):
        raise DataError(
            f"{path}: no such file or folder; expected a folder of images or shards, a tar, a table or a pattern"
        )
    if labelled:
        config = parse_source(folder, kind="classes", split=split)
    elif folder.is_dir() and not any(map(is_tar, os.listdir(folder))):
        config = parse_source(folder, kind="folder", captions="names")
    else:
        config = parse_source(path, kind=None if folder.is_file() else "shards")  # also a pattern or URL
    source = open_source(config)
    if not hasattr(source, "place"):
        raise ConfigError(f"{path}: its images have no names; write them as shards first (vqclip data pack)")
    return cast(ImageSource, source)
