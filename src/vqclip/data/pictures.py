"""Pictures wherever they lie: a folder of files, caption shards, labelled shards."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from vqclip.data.sources import CaptionShardsData, ClassShardsData, RawSample, Source
from vqclip.data.sources.class_folder import CLASSNAMES, chosen_split
from vqclip.data.sources.reader import MAX_IMAGE_BYTES
from vqclip.errors import ConfigError, DataError, printable
from vqclip.io.files import read_bounded

__all__ = ["PictureFolder", "Pictures", "open_pictures"]

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


class Pictures(Source, Protocol):
    """A source whose samples have names that people can tell apart."""

    def place(self, index: int) -> str:
        """Where a sample lies below what was opened: ``pets/cat.png``, ``00003.tar/000031415``. No two are alike."""
        ...


def open_pictures(path: str, split: str | None = None) -> Pictures:
    """A source for what lies at a path, told by what is there.

    Args:
        path: labelled shards (a folder with ``classnames.txt``), caption shards (a folder of tars, a tar, a pattern or
            a URL), or a folder of picture files, in subfolders too.
        split: of labelled shards; may be left out where there is one alone.

    Raises:
        ConfigError: labelled shards with several splits, and none is named; or a split of anything else.
        DataError: there is nothing of these kinds, or it cannot be read.
    """
    folder = Path(path).expanduser()
    if (folder / CLASSNAMES).is_file():
        return ClassShardsData(path=str(folder), split=chosen_split(str(folder), split)).build()
    if split is not None:
        raise ConfigError(f"split: got {split!r}, but {path} has no {CLASSNAMES}, so it has no splits; leave it out")
    if folder.is_dir() and not any(folder.glob("*.tar")):
        return PictureFolder(folder)
    return CaptionShardsData(path=path).build()


class PictureFolder:
    """`Pictures` of the picture files below a folder, in the order of their paths; hidden ones are passed over.

    A file's caption is its name without the ending, "_" and "-" read as blanks.

    Raises:
        DataError: the folder holds none.
    """

    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def __init__(self, folder: Path):
        self.folder = folder
        below = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
        self.files = [p for p in below if not _is_hidden(p) and (folder / p).is_file()]
        if not self.files:
            raise DataError(f"{folder.absolute()}: no picture ({', '.join(_ENDINGS)}) in it or below it")

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> RawSample:
        """One file; see `Source.read`."""
        try:
            image = read_bounded(self.folder / self.files[index], MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"{self.name(index)}: cannot be read: {error.strerror}", "unreadable file") from None
        if len(image) > MAX_IMAGE_BYTES:
            raise DataError(
                f"{self.name(index)}: more than {MAX_IMAGE_BYTES} bytes, which are not read", "too many bytes"
            )
        stem = self.files[index].stem
        return RawSample(image, (stem.replace("_", " ").replace("-", " ").strip() or stem,))

    def name(self, index: int) -> str:
        """The file, for messages."""
        return printable(str(self.folder / self.files[index]), one_line=True)

    def place(self, index: int) -> str:
        """The file's path in the folder; see `Pictures.place`."""
        return self.files[index].as_posix()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of all files; their contents are not read."""
        lines = (f"{path} {(self.folder / path).stat().st_size}\n" for path in self.files)
        digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
        return {"kind": "pictures", "samples": len(self), "names_sha256": digest}


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
