"""Source of the images of a folder: class folders, or images with captions beside them."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.sources.base import MAX_BYTES, Place
from vqclip.data.sources.class_names import (
    DEFAULT_TEMPLATE,
    TEMPLATES,
    Classes,
    ClassNames,
    describe_names,
    name_ids,
    read_templates,
)
from vqclip.data.sources.columns import CaptionFiles, Weighted, are_splits, describe_lines
from vqclip.data.sources.files import FileSourceConfig
from vqclip.data.sources.listing import FileTable, Listed, TableBuilder, list_images
from vqclip.data.sources.tables import CsvConfig, JsonConfig
from vqclip.errors import ConfigError, DataError, encodable
from vqclip.io.files import read_bounded, walk_files

Captions = Literal["classes", "txt", "txt_lines", "json", "metadata", "names"]
METADATA = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.json", "captions.json")
"""Files with the captions of a folder."""
_TEXTS = (".txt", ".TXT", ".caption", ".cap", ".text", ".caption.txt", "_caption.txt", "*.txt")
_OBJECTS = (".json", "*.json")
"""Endings of files with a caption; see `_caption_path`."""
_TEXT_FOLDERS = ("captions", "caption", "texts", "text", "txt", "prompts")
"""Folders beside that of the images, or below it, with a file of the same name for each."""
_NO_TABLES = (TEMPLATES, "classes.txt", "README.txt", "LICENSE.txt")
_PART = re.compile(r"(.*[ _.-])?(images?|imgs?|photos?|parts?|chunks?|batch(es)?)[ _.-]?\d+")
"""Name of a part of a data set, in lower case."""
_ALL_IMAGES = re.compile(r"(jpeg)?images?|imgs?", re.IGNORECASE)
_MASKS = re.compile(r"mask|annot|label|segment|thumb|depth|^gt$|ground", re.IGNORECASE)
"""Names of a folder of images, and of their masks or thumbnails beside it, rather than of classes."""
_SAMPLED = 20
"""First .json that are read to find out whether they have captions, or .txt, whether they have several lines."""
_TABLE_INSIDE = re.compile(r"[^/]*\.(csv|tsv|jsonl?)|[^/]*caption[^/]*\.(txt|token)")
"""Name of a table, in lower case, which is read as metadata where there is no other."""
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".token")


class FolderConfig(FileSourceConfig):
    """A folder of images: one subfolder for each class, or captions beside the images.

    Hidden files and folders are skipped.
    """

    kind: Literal["folder"] = "folder"
    """Folder of images."""
    path: Place
    """The folder, on this machine. A `zeroshot_classification_templates.txt` in a folder of classes is read."""
    captions: Captions | None = None
    """classes: every subfolder is a class. txt, txt_lines, json: a file of the same name beside each image (.txt,
    .caption, .cap or .text; .json), in subfolders too (img2dataset's `files`), as for `shards`; a .txt may also be in a
    folder `captions` beside the folder of the images: images/0.jpg, captions/0.txt. metadata: a
    metadata.csv, metadata.jsonl or captions.json in the folder, as Hugging Face's imagefolder has it, or else its only
    table. names: the name of each image's file without its ending, with "_" and "-" read as blanks. null: found out
    where it is plain."""
    json_keys: Annotated[tuple[str, ...], Field(min_length=1)] | Weighted = ("caption",)
    """Keys of the .json with a caption or a list of captions, such as `caption` or `meta.caption`."""
    classnames: ClassNames = ()
    """Names of the classes, for folders called by numbers or ids: a list in the order of the folders, or of their
    numbers; or a file, see `csv`."""
    image_endings: tuple[str, ...] = IMAGE_ENDINGS
    """Endings of the images' names. Of images that differ in the ending alone, such as an image and its mask, the first
    ending is read where captions are in files."""

    @property
    def has_classes(self) -> bool | None:
        """Return whether images have classes, if the configuration decides it."""
        return self.captions == "classes" if self.captions not in (None, "metadata") else None

    def caption_files(self, table: FileTable) -> CaptionFiles | None:
        """Return the captions in files beside the images."""
        mode = table.facts["captions"]
        if mode not in ("txt", "txt_lines", "json"):
            return None
        return CaptionFiles(mode, tuple(self.json_keys))

    def with_all_images(self) -> FolderConfig:
        """Return this configuration if it has a caption for each image, else that with the names of the files."""
        if self.captions is None:
            with contextlib.suppress(DataError):
                table = self.load_table()
                files = self.caption_files(table)
                if files is None:
                    is_complete = table.facts["captions"] == "metadata"  # another table may be of other things
                else:
                    is_complete = all((self.root / table.read(row).text).is_file() for row in range(len(table)))
                if is_complete:
                    return self
            return self.model_copy(update={"captions": "names"})
        return self

    def table(self) -> FileTable:
        """List the images; raises DataError for a missing folder or another layout."""
        folder, builder = self.listing, TableBuilder()
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected one with images")
        described = [name for name in METADATA if builder.read_from(folder / name).is_file()]
        visited: list[Path] = []
        paths = list(walk_files(folder, visit=lambda path: visited.append(builder.read_from(path))))
        images = [path for path in paths if self._is_image(path)]
        mode = self.captions or ("metadata" if described else self._find_captions(folder, images, set(paths)))
        if isinstance(self.json_keys, dict) and mode != "json":
            raise ConfigError(
                f"json_keys: got weights, but the captions of {folder} are {mode}; expected those of .json"
            )
        if mode == "metadata":
            return self._metadata_table(folder, described or _tables_in(images, paths), builder, images)
        if mode == "classes":
            classes = sorted(path.name for path in visited if path.parent == folder)
            return self._class_table(folder, classes, builder, paths)
        if not images:
            raise DataError(f"{folder}: no image ({', '.join(self.image_endings)}) in it or below it")
        others = [path for path in paths if not self._is_image(path)]
        ending = _text_ending(images, set(paths), _OBJECTS if mode == "json" else _TEXTS)[1]
        if mode == "names":
            for path in images:
                stem = _read_name(os.path.splitext(os.path.basename(path))[0])
                builder.add(Listed(path, captions=[stem.replace("_", " ").replace("-", " ").strip() or stem]))
        else:
            images = self._choose_images(images, ending, builder)
            texts: list[bytes] = []
            for path in images[:_SAMPLED] if mode == "txt" else ():
                with contextlib.suppress(OSError):
                    texts.append(read_bounded(folder / _caption_path(path, ending), MAX_BYTES["txt"]))
            builder.notes += describe_lines(texts)
            place, _, plain = ending.replace("*", "").rpartition("/")
            if place:
                builder.notes.append(f"captions are in the folder {place}, under the names of the images")
            beside = {path for path in others if path.endswith((plain, ".txt", ".json"))}
            lost = {path for path in beside if path.endswith(plain)} - {_caption_path(path, ending) for path in images}
            if lost:
                builder.notes.append(f"left out: {_files(len(lost))} {plain} without an image, such as {min(lost)}")
            others = [path for path in others if path not in beside]
        builder.notes += _describe_left_out(others, "of other endings")
        return builder.finish(captions=mode)

    def _choose_images(self, images: Sequence[str], ending: str, builder: TableBuilder) -> list[str]:
        """Add the images, of those that have the same captions the one of the preferred ending, and return them."""
        stems: dict[str, list[str]] = {}
        for path in images:
            stems.setdefault(_caption_path(path, ending), []).append(path)
        same = [
            sorted(paths, key=lambda path: [not path.lower().endswith(each) for each in self.image_endings])
            for paths in stems.values()
        ]
        for path, *_ in same:
            builder.add(Listed(path, text=_caption_path(path, ending)))
        if twins := next((paths for paths in same if len(paths) > 1), None):
            builder.notes.append(
                f"left out: {_files(len(images) - len(same))} named as another image but for the ending, such as "
                f"{twins[1]} beside {twins[0]}; image_endings chooses"
            )
        return [path for path, *_ in same]

    def _is_image(self, name: str) -> bool:
        return name.lower().endswith(self.image_endings)

    def _find_captions(self, folder: Path, images: list[str], paths: set[str]) -> Captions:
        """Return where the captions of a folder without metadata are; raises DataError if it is not plain."""
        texts, ending = _text_ending(images, paths)
        objects, place = _text_ending(images, paths, _OBJECTS)
        if "*" in place and not self._has_captions(folder, [_caption_path(path, place) for path in images], paths):
            objects = 0
        if images and 2 * max(texts, objects) >= len(images):
            for path in sorted({_caption_path(path, ending) for path in images} & paths)[:_SAMPLED]:
                _refuse_boxes(folder, path)
            return "txt" if 2 * texts >= len(images) else "json"
        if texts or objects:
            raise DataError(
                f"{folder}: {len(images)} images, of which {texts} have a {ending} and {objects} a .json of the same "
                "name; is it a folder of classes, or are captions missing? Set captions: classes, txt or json"
            )
        for name in sorted({path.partition("/")[0] for path in paths if path.endswith(".txt") and "/" in path}):
            if images and 2 * _count_beside(images, f"{name}/.txt", paths) >= len(images):
                raise DataError(
                    f"{folder}: {name} has a .txt with the name of each image; if these are captions, call the folder "
                    "captions, or put them beside the images (boxes, such as YOLO's labels, are not read)"
                )
        own = sorted({path.partition("/")[0] for path in images if "/" in path})
        tables = _tables_in(images, paths)
        is_flat = len(own) < 2 and all(path.count("/") == len(own) for path in images)
        if images and is_flat and len(tables) == 1 and _TABLE_INSIDE.fullmatch(tables[0].lower()):
            return "metadata"
        with contextlib.suppress(OSError):  # a table may be beside the folder, or in COCO's folder of tables
            others = [] if tables else [*folder.parent.iterdir(), *folder.parent.glob("annotations/*")]
            names = (os.path.relpath(path, folder) for path in others)
            tables += [path for path in names if path.endswith(_TABLES) and os.path.basename(path) not in _NO_TABLES]

        def likely(path: str) -> tuple[bool, bool, bool, str]:
            name = path.lower()
            return "caption" not in name, folder.name.lower() not in name, "train" not in name, path

        tables.sort(key=likely)
        table, named = tables[0] if tables else "", ", ".join(os.path.normpath(folder / each) for each in tables[:3])
        hint = f"; a table with their captions is named as the path: {named}" if tables else ""
        if any((folder.parent / name).is_dir() for name in _TEXT_FOLDERS):
            hint += f"; captions in a folder beside this one? Name the folder of both: {folder.parent}"
        if _count_beside(images, place, paths):
            hint += "; captions in the .json beside them? Set captions: json and json_keys"
        if images and all("/" not in path for path in images):
            raise DataError(
                f"{folder}: {len(images)} images without captions; expected a .txt of the same name beside each, one "
                f"of {', '.join(METADATA)}, a subfolder for each class, or captions: names, which are those of the "
                f"files{hint}"
            )
        inside = sorted({path.partition("/")[0] for path in paths if "/" in path})
        described = [name for name in inside if any(f"{name}/{file}" in paths for file in METADATA)]
        parts = own or inside
        if described or (parts and are_splits(parts)):
            shown = ", ".join(str(folder / name) for name in sorted(described or parts, key=likely))
            if described or "caption" not in table.lower():  # otherwise the captions of the parts are in a table
                hint = f"; name one of them as the path: {shown}"
            raise DataError(f"{folder}: its subfolders are parts of a data set, not classes{hint}")
        if len(own) == 1:
            raise DataError(
                f"{folder}: a single subfolder with images, {own[0]}, which would be the class of all; if it contains "
                f"the classes, name it as the path: {folder / own[0]}{hint}; or set captions: classes"
            )
        generic = next(filter(_ALL_IMAGES.fullmatch, own), None)
        if generic and any(map(_MASKS.search, own)) and not self.classnames:
            raise DataError(
                f"{folder}: its subfolders are {', '.join(own[:5])}, of which {generic} has the name of all images; "
                f"name it as the path: {folder / generic}{hint}; or set captions: classes"
            )
        has_table = bool(table) and not table.startswith(os.pardir)
        if has_table and len({re.sub(r"\d+$", "", name) for name in own}) == 1 and _PART.fullmatch(own[0].lower()):
            raise DataError(
                f"{folder}: its subfolders {own[0]}, ... differ by a number, as parts of a data set do{hint}; or set "
                "captions: classes"
            )
        return "classes"

    def _has_captions(self, folder: Path, files: Sequence[str], paths: set[str]) -> bool:
        """Return whether one of the first .json has a caption; many tools write other facts into such files."""
        parse = CaptionFiles("json", tuple(self.json_keys)).parse
        for file in [file for file in files if file in paths][:_SAMPLED]:
            with contextlib.suppress(OSError, DataError):
                return bool(parse(read_bounded(folder / file, MAX_BYTES["json"])))
        return False

    def _class_table(self, folder: Path, classes: list[str], builder: TableBuilder, paths: Sequence[str]) -> FileTable:
        """List labelled images: classes in the order of their names, or numbers, with "_" read as a blank."""
        if not classes:
            raise DataError(
                f"{folder}: no subfolder; expected one for each class with its images, got: {_some_of(paths)}"
            )
        if all(re.fullmatch(r"[0-9]+", name) for name in classes):
            classes.sort(key=int)
        names, labels = self._classes(folder, classes, builder)
        templates: Sequence[str] = (DEFAULT_TEMPLATE,)
        if builder.read_from(folder / TEMPLATES).exists():
            templates = read_templates(folder / TEMPLATES)
        depths = {path.count("/") for path in filter(self._is_image, paths)}
        inner = {path.split("/")[1] for path in filter(self._is_image, paths) if path.count("/") == 2}
        depth = 2 if len(inner) == 1 and 1 not in depths else 1
        builder.notes += [f"the images of each class are in its folder {min(inner)}"] if depth == 2 else []
        inside = [path for path in paths if path.count("/") == depth]
        images: dict[str, list[str]] = {name: [] for name in classes}
        for path in filter(self._is_image, inside):
            images[path.partition("/")[0]].append(path)
        for name, own in images.items():
            if not own:
                below = [path[len(name) + 1 :] for path in paths if path.startswith(f"{name}/")]
                raise DataError(
                    f"{folder / name}: no image ({', '.join(self.image_endings)}) in the folder of this class, got: "
                    f"{_some_of(below)}; add images, or remove the folder if it is not a class; if it contains the "
                    "classes, name it as the path"
                )
            for path in own:
                builder.add(Listed(path, label=labels[name]))
        if twins := len(builder) - len({os.path.splitext(path)[0] for own in images.values() for path in own}):
            builder.notes.append(
                f"{_files(twins)} named as another image but for the ending; are these masks? image_endings chooses"
            )
        others = [path for path in inside if not self._is_image(path)]
        builder.notes += _describe_left_out(others, "without an image's ending in the folders of classes")
        for where, at in (("in folders below those of classes", depth + 1), ("beside the folders of classes", 0)):
            count = sum(self._is_image(path) for path in paths if min(path.count("/"), depth + 1) == at)
            if count:
                builder.notes.append(f"left out: {_files(count)} with an image's ending {where}")
        return builder.finish(names, templates, captions="classes")

    def _classes(
        self, folder: Path, folders: Sequence[str], builder: TableBuilder
    ) -> tuple[Sequence[str], dict[str, int]]:
        """Return the names of the classes, and the number of each folder's."""
        if not self.classnames:
            names = tuple(" ".join(_read_name(name).replace("_", " ").split()) or name for name in folders)
            name, count = Counter(names).most_common(1)[0]
            if count > 1:
                same = ", ".join(each for each, read in zip(folders, names, strict=True) if read == name)
                raise DataError(
                    f'{folder}: the folders {same} are all the class {name!r}, because "_" is read as a blank; move '
                    "their images into one folder, or rename the others"
                )
            names, note = name_ids(names)
            builder.notes += filter(None, [note, *describe_names(names)])
            return names, {name: number for number, name in enumerate(folders)}
        classes = Classes.read(self.classnames, folder, builder.read_from)
        try:
            return classes.names, {name: classes.number(name) for name in folders}
        except DataError as error:
            if len(classes.names) != len(folders):
                raise DataError(
                    f"{folder}: classnames: got {len(classes.names)} for {len(folders)} folders; {error}"
                ) from None
        return classes.names, {name: number for number, name in enumerate(folders)}

    def _metadata_table(
        self, folder: Path, described: Sequence[str], builder: TableBuilder, images: Sequence[str]
    ) -> FileTable:
        if len(described) != 1 or not _TABLE_INSIDE.fullmatch(described[0].lower()):
            expected = f"one of {', '.join(METADATA)}, or one table alone"
            raise DataError(f"{folder}: expected {expected}, got {', '.join(described) or 'none'}")
        path = builder.read_from(folder / described[0])
        kind = JsonConfig if path.suffix in (".json", ".jsonl") else CsvConfig
        config = kind(path=str(path), classnames=self.classnames)
        try:
            table = list_images(config.rows(path, builder.notes), config, builder, path, folder, look_beside=True)
        except DataError as error:
            hint = f"settings: name {path} as the path, kind {config.kind}, or set captions: classes, txt or names"
            raise DataError(f"{error} ({hint})") from None
        named = {os.path.normpath(table.read(index).path.removeprefix(f"{folder}/")) for index in range(len(table))}
        if path.name not in METADATA and named.isdisjoint(images):
            raise DataError(
                f"{path}: names no image of {folder}; expected a table of these, a .txt of the same name beside each, "
                "or captions: names, which are those of the files"
            )
        if lost := [image for image in images if image not in named]:
            builder.notes.append(f"left out: {_files(len(lost))} that {path.name} does not name, such as {min(lost)}")
        table.facts["captions"] = "metadata" if path.name in METADATA else "table"
        return table


def _tables_in(images: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Return the files that may be tables of the images, but for what is beside an image and has its name."""
    stems = {os.path.splitext(os.path.basename(path))[0] for path in images}
    tables = [path for path in paths if path.endswith(_TABLES) and os.path.basename(path) not in _NO_TABLES]
    return [path for path in tables if path[-4:] == ".csv" or Path(path).name.partition(".")[0] not in stems]


def _caption_path(image: str, ending: str) -> str:
    """Return the file of an image's captions.

    ``a/0.txt`` for ``a/0.jpg``; of the ending ``captions/.txt``, ``captions/0.txt``; of ``*.txt``, ``a/0.jpg.txt``.
    """
    folder, _, ending = ending.rpartition("/")
    stem = image if ending.startswith("*") else os.path.splitext(image)[0]
    ending = ending.removeprefix("*")
    return f"{folder}/{stem.partition('/')[2] or stem}{ending}" if folder else f"{stem}{ending}"


def _text_ending(images: Sequence[str], paths: set[str], usual: Sequence[str] = _TEXTS) -> tuple[int, str]:
    """Return how many images have a file with a caption, and its ending; see `_caption_path`."""
    one_folder = len({path.rpartition("/")[0] and path.partition("/")[0] for path in images}) == 1
    there = {path.partition("/")[0] for path in paths if "/" in path} if one_folder else ()
    endings = [*usual, *(f"{name}/{ending}" for name in _TEXT_FOLDERS if name in there for ending in usual)]
    return max(((_count_beside(images, ending, paths), ending) for ending in endings), key=lambda found: found[0])


def _count_beside(images: Sequence[str], ending: str, paths: set[str]) -> int:
    return sum(_caption_path(path, ending) in paths for path in images)


def _refuse_boxes(folder: Path, file: str) -> None:
    """Raise DataError if a file beside an image has a class and four or more numbers in its first line."""
    with contextlib.suppress(OSError):
        if re.match(rb"\S+( -?[\d.]+){4,}\s*(\n|$)", read_bounded(folder / file, 1000)):
            raise DataError(
                f"{folder / file}: has numbers, such as the boxes of YOLO, instead of captions; set captions: txt if "
                "they are, or captions: classes or names"
            )


def _read_name(name: str) -> str:
    """Return a file's name for a text tower: bytes that are not UTF-8 are read as Latin-1, unless they are controls."""
    if encodable(name) == name:
        return name
    text = os.fsencode(name).decode("latin-1")
    return text if text.isprintable() else encodable(name)


def _describe_left_out(paths: Iterable[str], what: str) -> list[str]:
    """Return a note on files that are not read, with the number of each ending."""
    endings = Counter(os.path.splitext(path)[1].lower() or os.path.basename(path) for path in paths)
    if not endings:
        return []
    shown = ", ".join(f"{encodable(ending)} {count}" for ending, count in endings.most_common(5))
    return [f"left out: {_files(endings.total())} {what} ({shown})"]


def _some_of(paths: Sequence[str]) -> str:
    """Return the first names in a folder, for a message."""
    return ", ".join(sorted({path.partition("/")[0] for path in paths})[:5]) or "nothing"


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"
