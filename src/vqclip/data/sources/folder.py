"""Source of labelled images: a folder with one subfolder of images for each class."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from vqclip.data.remote import is_tar
from vqclip.data.sources.base import DEFAULT_TEMPLATE, FolderContent, RawSample, SourceConfigBase
from vqclip.data.sources.class_folder import TEMPLATES, LocalFolder, read_templates
from vqclip.data.sources.reader import MAX_IMAGE_BYTES
from vqclip.errors import DataError, printable
from vqclip.io.files import read_bounded

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


class FolderConfig(SourceConfigBase):
    """A folder with one subfolder of images (jpg, jpeg, png, webp) for each class."""

    kind: Literal["folder"] = "folder"
    """Folder of images."""
    path: Path
    """The folder. A `zeroshot_classification_templates.txt` in it is read."""

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether there are folders, and no tars in them."""
        if not content.folders or any(map(is_tar, content.files)):
            return False
        return not any(content.path.glob("*/*.tar")) and not any(content.path.glob("*/*.t*gz"))

    def build(self, cache: Path | None = None) -> ImageFolder:
        """List the images; raise DataError for a missing folder or another layout."""
        return ImageFolder(self.path.expanduser())


class ImageFolder:
    """A `vqclip.data.Source` of labelled images: classes in the order of their names, with "_" read as a blank.

    The prompts come from ``zeroshot_classification_templates.txt`` in the folder. Without this file the only prompt is
    "a photo of a {c}".

    Args:
        folder: contains one subfolder for each class; hidden ones are skipped.

    Attributes:
        notes: remarks on files that are left out.

    Raises:
        DataError: the folder is missing or has no subfolder, a subfolder has no image, a prompt no {c}, or two classes
            have the same name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        classes = _class_folders(folder)
        self.classnames = tuple(path.name.replace("_", " ") for path in classes)
        _require_distinct(folder, classes, self.classnames)
        has_templates = (folder / TEMPLATES).exists()
        self.templates = read_templates(LocalFolder(folder)) if has_templates else (DEFAULT_TEMPLATE,)
        self._files = [(path, label) for label, path in enumerate(classes) for path in _images(path)]
        self.notes = _describe_left_out(folder, classes)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> RawSample:
        """Read one image with its label; its captions are the prompts of its class.

        Raises:
            DataError: the file cannot be read.
        """
        path, label = self._files[index]
        try:
            image = read_bounded(path, MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}", "unreadable file") from None
        if len(image) > MAX_IMAGE_BYTES:
            raise DataError(f"{path}: more than {MAX_IMAGE_BYTES} bytes, which are not read", "too many bytes")
        name = self.classnames[label]
        return RawSample(image, tuple(template.replace("{c}", name) for template in self.templates), label)

    def name(self, index: int) -> str:
        """Return the path of the file, for messages."""
        return printable(str(self._files[index][0]), one_line=True)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Checksum of the names and sizes of all files; their contents are not read."""
        lines = (f"{path.relative_to(self.folder)} {path.stat().st_size}\n" for path, _ in self._files)
        digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
        return {"kind": "folder", "samples": len(self), "names_sha256": digest}


def _class_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder.absolute()}: no such folder; expected one with a subfolder of images for each class")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"{folder.absolute()}: no subfolder; expected one for each class with its images, got: {found}")
    return classes


def _images(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    images = [path for path in files if _is_image(path)]
    if not images:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{folder.absolute()}: no image ({', '.join(IMAGE_ENDINGS)}) in the folder of this class, got: {found}; "
            "add images, or remove the folder if it is not a class"
        )
    return images


def _require_distinct(folder: Path, classes: list[Path], names: tuple[str, ...]) -> None:
    for name in dict.fromkeys(names):
        same = [path.name for path, each in zip(classes, names, strict=True) if each == name]
        if len(same) > 1:
            raise DataError(
                f'{folder.absolute()}: the folders {", ".join(same)} are all the class {name!r}, because "_" is '
                "read as a blank; move their images into one folder, or rename the others"
            )


def _describe_left_out(folder: Path, classes: list[Path]) -> list[str]:
    """Return a note for each kind of file that is not read; hidden files are skipped without a note."""
    others, nested = [], 0
    for path in (path for each in classes for path in each.iterdir() if not path.name.startswith(".")):
        if path.is_dir():
            nested += sum(_is_image(below) for below in path.rglob("*"))
        elif not _is_image(path):
            others.append(path.suffix.lower() or path.name)
    loose = sum(_is_image(path) for path in folder.iterdir())
    endings = ", ".join(sorted(set(others))[:5])
    notes = (
        (len(others), f"without an image's ending ({', '.join(IMAGE_ENDINGS)}) in the folders of classes: {endings}"),
        (nested, "with an image's ending in folders below those of classes"),
        (loose, "with an image's ending beside the folders of classes"),
    )
    return [f"left out: {count} file{'s' if count > 1 else ''} {what}" for count, what in notes if count]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".") and path.is_file()
