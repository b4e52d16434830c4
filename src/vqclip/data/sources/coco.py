"""Source of the images of a COCO caption file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from vqclip.data.sources.file_table import FileTable, TableBuilder
from vqclip.data.sources.files import ListConfig
from vqclip.data.sources.table_files import read_json
from vqclip.errors import DataError

__all__ = ["CocoConfig"]


class CocoConfig(ListConfig):
    """A JSON file in the format of COCO's captions: lists of `images` and `annotations`, several captions an image."""

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"coco": (".json",)}
    row_word: ClassVar[str] = "image"

    kind: Literal["coco"] = "coco"
    """COCO captions."""

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return False

    def table(self) -> FileTable:
        """Read the file: images in its order, each with its captions in the order of the annotations."""
        builder, path = TableBuilder(), self.listing
        content = read_json(builder.read_from(path))
        captions: dict[int, list[str]] = {}
        for number, each in enumerate(_list(content, "annotations", path)):
            where = f"annotations[{number}]"
            if "caption" not in each:
                raise DataError(
                    f"{path}: {where}: no caption; expected a file of captions, such as captions_train2017.json"
                )
            captions.setdefault(_integer(each, "image_id", where, path), []).append(_text(each, "caption", where, path))
        seen: set[int] = set()
        for number, each in enumerate(_list(content, "images", path)):
            where = f"images[{number}]"
            identity = _integer(each, "id", where, path)
            if identity in seen:
                raise DataError(f"{path}: {where}: id {identity} is that of another image; expected different ids")
            seen.add(identity)
            builder.add(_text(each, "file_name", where, path), captions.get(identity, ()), row=identity)
        if not len(builder) or not captions.keys() & seen:
            raise DataError(f"{path}: {len(builder)} images, none with a caption; expected captions of images")
        if unknown := captions.keys() - seen:
            raise DataError(f"{path}: {len(unknown)} annotations of images that are not listed, such as {min(unknown)}")
        return builder.finish()


def _list(content: Any, key: str, path: Path) -> list[dict[str, Any]]:
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{path}: expected COCO's format: an object with lists of objects under images and annotations")
    return found


def _integer(item: dict[str, Any], key: str, where: str, path: Path) -> int:
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise DataError(f"{path}: {where}.{key}: got {str(value)[:80]!r}; expected a number >= 0")
    return value


def _text(item: dict[str, Any], key: str, where: str, path: Path) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise DataError(f"{path}: {where}.{key}: got {str(value)[:80]!r}; expected text")
    return value
