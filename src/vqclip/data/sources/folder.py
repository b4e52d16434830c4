"""Source of the images of a folder: class folders, or images with captions beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from vqclip.data.remote import is_tar
from vqclip.data.sources.base import FolderContent, Place
from vqclip.data.sources.captions import CaptionFiles
from vqclip.data.sources.class_folder import TEMPLATES, LocalFolder, read_templates
from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.files import IMAGE_ENDINGS, FileSourceConfig, local_file
from vqclip.data.sources.prompts import DEFAULT_TEMPLATE
from vqclip.data.sources.table_files import find_column, read_json, read_json_lines, read_rows
from vqclip.errors import DataError, encodable, quote_names
from vqclip.io.files import walk_files

__all__ = ["FolderConfig"]

Captions = Literal["classes", "txt", "txt_lines", "json", "metadata", "names"]
METADATA = ("metadata.csv", "metadata.jsonl", "captions.json")
"""Files with the captions of a folder."""


class FolderConfig(FileSourceConfig):
    """A folder of images (jpg, jpeg, png, webp): one subfolder for each class, or captions beside the images.

    Hidden files and folders are skipped.
    """

    kind: Literal["folder"] = "folder"
    """Folder of images."""
    path: Place
    """The folder, on this machine. A `zeroshot_classification_templates.txt` in a folder of classes is read."""
    captions: Captions | None = None
    """classes: every subfolder is a class. txt, txt_lines, json: a file of the same name beside each image, in
    subfolders too (img2dataset's `files`), as for `shards`. metadata: a metadata.csv, metadata.jsonl or captions.json
    in the folder, as Hugging Face's imagefolder has it. names: the name of each image's file without its ending, with
    "_" and "-" read as blanks. null: found out where it is plain."""
    json_keys: tuple[str, ...] = ("caption",)
    """Keys of the .json with a caption or a list of captions."""
    file_key: str = "file_name"
    """Column or key of the metadata with the path of an image."""
    text_key: str = "text"
    """Column or key of the metadata with a caption; in JSON also a list of captions."""

    @model_validator(mode="after")
    def _has_keys(self) -> FolderConfig:
        if not self.json_keys:
            raise ValueError("json_keys: got an empty list; expected keys of the .json that hold captions")
        return self

    @property
    def has_classes(self) -> bool | None:
        """Return whether images have classes, if the configuration decides it."""
        return None if self.captions is None else self.captions == "classes"

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether there are images; or, without tars, metadata or folders."""
        if any(map(_is_image, content.files)):
            return True
        if any(map(is_tar, content.files)):
            return False
        if content.files & set(METADATA):
            return True
        return bool(content.folders) and not any(is_tar(file.name) for file in content.path.glob("[!.]*/*"))

    @property
    def listing(self) -> Path:
        """The folder."""
        return local_file(self.path, self.kind)

    @property
    def root(self) -> Path:
        """The folder."""
        return self.listing

    def caption_files(self, table: FileTable) -> CaptionFiles | None:
        """Return the captions in files beside the images."""
        mode = table.facts["captions"]
        return CaptionFiles(mode, self.json_keys) if mode in ("txt", "txt_lines", "json") else None

    def table(self) -> FileTable:
        """List the images; raises DataError for a missing folder or another layout."""
        folder, builder = self.listing, TableBuilder()
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected one with images")
        mode: Captions | None = self.captions
        for name in METADATA:
            if builder.read_from(folder / name).is_file():
                mode = mode or "metadata"
        if mode == "metadata":
            return _metadata_table(folder, builder, self.file_key, self.text_key)
        paths = list(walk_files(folder, visit=builder.read_from))
        images = [path for path in paths if _is_image(path)]
        mode = mode or _find_captions(folder, images, set(paths))
        if mode == "classes":
            return _class_table(folder, builder, paths)
        if not images:
            raise DataError(f"{folder}: no image ({', '.join(IMAGE_ENDINGS)}) in it or below it")
        for path in images:
            builder.add(path, [_caption_of(path)] if mode == "names" else ())
        return builder.finish(facts={"captions": mode})


def _find_captions(folder: Path, images: list[str], paths: set[str]) -> Captions:
    """Return where the captions of a folder without metadata are; raises DataError if it is not plain."""
    stems = [os.path.splitext(path)[0] for path in images]
    texts, objects = (sum(f"{stem}{ending}" in paths for stem in stems) for ending in (".txt", ".json"))
    if images and 2 * max(texts, objects) >= len(images):
        return "txt" if 2 * texts >= len(images) else "json"
    if texts or objects:
        raise DataError(
            f"{folder}: {len(images)} images, of which {texts} have a .txt and {objects} a .json of the same name; is "
            "it a folder of classes, or are captions missing? Set captions: classes, txt or json"
        )
    if images and all("/" not in path for path in images):
        tables = [path for path in paths if path.endswith((".csv", ".tsv", ".json", ".parquet"))]
        hint = f"; a table with their captions is named as the path: {min(tables)}" if tables else ""
        raise DataError(
            f"{folder}: {len(images)} images without captions; expected a .txt of the same name beside each, one of "
            f"{', '.join(METADATA)}, or a subfolder for each class{hint}"
        )
    return "classes"


def _caption_of(path: str) -> str:
    stem = _read_name(os.path.splitext(os.path.basename(path))[0])
    return stem.replace("_", " ").replace("-", " ").strip() or stem


def _read_name(name: str) -> str:
    """Return a file's name for a text tower: bytes that are not UTF-8 are read as Latin-1, unless they are controls."""
    if encodable(name) == name:
        return name
    text = os.fsencode(name).decode("latin-1")
    return text if text.isprintable() else encodable(name)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS)


def _class_table(folder: Path, builder: TableBuilder, paths: Sequence[str]) -> FileTable:
    """List labelled images: classes in the order of their names, with "_" read as a blank."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"{folder}: no subfolder; expected one for each class with its images, got: {found}")
    names = tuple(_read_name(name).replace("_", " ") for name in classes)
    _require_distinct(folder, classes, names)
    templates: Sequence[str] = (DEFAULT_TEMPLATE,)
    if builder.read_from(folder / TEMPLATES).exists():
        templates = read_templates(LocalFolder(folder))
    inside = [path for path in paths if path.count("/") == 1]
    images: dict[str, list[str]] = {name: [] for name in classes}
    for path in filter(_is_image, inside):
        images[path.partition("/")[0]].append(path)
    for label, (name, own) in enumerate(images.items()):
        _require_images(folder / name, own)
        for path in own:
            builder.add(path, label=label)
    others = [os.path.splitext(path)[1].lower() or os.path.basename(path) for path in inside if not _is_image(path)]
    loose = sum(map(_is_image, (path for path in paths if "/" not in path)))
    nested = sum(map(_is_image, (path for path in paths if path.count("/") > 1)))
    return builder.finish(names, templates, {"captions": "classes", "notes": _describe_left_out(others, nested, loose)})


def _require_images(folder: Path, images: list[str]) -> None:
    if not images:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{folder}: no image ({', '.join(IMAGE_ENDINGS)}) in the folder of this class, got: {found}; "
            "add images, or remove the folder if it is not a class; if it contains the classes, name it as the path"
        )


def _require_distinct(folder: Path, classes: Sequence[str], names: Sequence[str]) -> None:
    for name in dict.fromkeys(names):
        same = [each for each, read in zip(classes, names, strict=True) if read == name]
        if len(same) > 1:
            raise DataError(
                f'{folder}: the folders {", ".join(same)} are all the class {name!r}, because "_" is '
                "read as a blank; move their images into one folder, or rename the others"
            )


def _describe_left_out(others: Sequence[str], nested: int, loose: int) -> list[str]:
    """Return a note for each kind of file that is not read."""
    endings = ", ".join(sorted(set(others))[:5])
    notes = (
        (len(others), f"without an image's ending ({', '.join(IMAGE_ENDINGS)}) in the folders of classes: {endings}"),
        (nested, "with an image's ending in folders below those of classes"),
        (loose, "with an image's ending beside the folders of classes"),
    )
    return [f"left out: {count} file{'s' if count > 1 else ''} {what}" for count, what in notes if count]


def _metadata_table(folder: Path, builder: TableBuilder, file_key: str, text_key: str) -> FileTable:
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DataError(f"{folder}: expected one of {', '.join(METADATA)}, got {names}")
    path = found[0]
    for row, image, captions in _rows(path, file_key, text_key):
        builder.add(image, captions, row=row)
    if not len(builder):
        raise DataError(f"{path}: no rows; expected one for each image")
    return builder.finish(facts={"captions": "metadata"})


def _rows(path: Path, file_key: str, text_key: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield number, image and captions of each row of the metadata."""
    if path.suffix == ".csv":
        rows = read_rows(path, ",")
        _, columns = next(rows)
        image, text = (find_column(path, columns, *key) for key in ((file_key, "file_key"), (text_key, "text_key")))
        yield from ((number, row[image].strip(), [row[text]]) for number, row in rows)
        return
    objects = read_json_lines(path) if path.suffix == ".jsonl" else _objects(path, file_key, text_key)
    for place, each in objects:
        file, captions = each.get(file_key, ""), each.get(text_key) or []
        captions = captions if isinstance(captions, list) else [captions]
        for key, values in ((file_key, [file]), (text_key, captions)):
            for value in values:
                if not isinstance(value, str):
                    raise DataError(
                        f"{path}: row {place}: {key}: got {str(value)[:80]!r}; expected text; its keys: "
                        f"{quote_names(each)}"
                    )
        yield place, file, captions


def _objects(path: Path, file_key: str, text_key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of captions.json: a list of objects, or one object of file names with captions."""
    content = read_json(path)
    if isinstance(content, dict):
        content = [{file_key: name, text_key: value} for name, value in content.items()]
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise DataError(f"{path}: expected a list of objects with {file_key} and {text_key}")
    yield from enumerate(content, 1)
