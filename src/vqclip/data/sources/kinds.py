"""All kinds of sources: find out the kind of a path, and read the configuration of one, from YAML or a command line.

Other installed packages add kinds as entry points of the group ``vqclip.sources``; one is imported when it is named.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Discriminator, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from vqclip.config import did_you_mean, parse_config
from vqclip.config.messages import kinds_of
from vqclip.data.decode import IMAGE_ENDINGS, OTHER_ENDINGS
from vqclip.data.remote.files import TAR_ENDINGS, is_tar
from vqclip.data.remote.urls import display_url, protocol_of
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data.sources.class_names import CLASSNAMES
from vqclip.data.sources.folder import METADATA, FolderConfig
from vqclip.data.sources.hf import HfConfig, is_saved_by_datasets
from vqclip.data.sources.parquet import ParquetConfig
from vqclip.data.sources.shards import CaptionShardsConfig, ClassShardsConfig, ScenesSourceConfig
from vqclip.data.sources.tables import CsvConfig, JsonConfig
from vqclip.data.sources.torchvision import TorchvisionConfig
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home

GROUP = "vqclip.sources"
"""Group of the entry points of other packages."""

_Known = (
    CaptionShardsConfig
    | ClassShardsConfig
    | CsvConfig
    | FolderConfig
    | HfConfig
    | JsonConfig
    | ParquetConfig
    | ScenesSourceConfig
    | TorchvisionConfig
)

KINDS: dict[str, type[SourceConfigBase]] = {
    kind: config for kind, config in kinds_of(_Known).items() if issubclass(config, SourceConfigBase)
}
"""Config classes of the kinds of this package, by kind."""
_ENDINGS = {
    "shards": TAR_ENDINGS,
    "csv": (".csv", ".txt", ".token", ".csv.gz", ".txt.gz", ".token.gz"),
    "tsv": (".tsv", ".tab", ".tsv.gz", ".tab.gz"),
    "json": (".json", ".jsonl", ".ndjson", ".jsonlines", ".json.gz", ".jsonl.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
}
"""Endings of names of files that are plainly of a kind."""
_TABLES = (".csv", ".tsv", ".tab", ".json", ".jsonl", ".ndjson", ".jsonlines")
_ARCHIVES = (".zip", ".rar", ".7z", ".bz2", ".tbz2", ".xz", ".txz", ".zst")
_SHEETS = (".xlsx", ".xls", ".ods")
_ARRAYS = (".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5", ".mat", ".tfrecord", ".mdb", ".sqlite")
_UNREAD = {
    _ARCHIVES: "an archive of a kind that is not read; unpack it, and name the folder",
    _SHEETS: "a spreadsheet, which is not read; save it as CSV",
    _ARRAYS: "a file of a kind that is not read; write its images to files, and a CSV or JSON file of their captions",
    (".arrow",): "a file of datasets; expected the folder that save_to_disk has written",
    OTHER_ENDINGS: "an image that is not read; convert it to JPEG or PNG",
    IMAGE_ENDINGS: "an image, or a pattern of images; expected their folder, or a table of them",
}
"""Endings of names of files that are not read, and the reason."""


def parse_source(path: str | Path | Sequence[str], overrides: Sequence[str] = (), **defaults: Any) -> SourceConfigBase:
    """Return the configuration of the source at a path; its kind is found out where it is plain.

    Args:
        path: file, folder, pattern or URL; several for kinds that read several; for a kind without a path, such as
            torchvision, none or the first of ``overrides``.
        overrides: ``key=value`` of the kind, such as ``kind=csv`` or ``captions=text``; applied after ``defaults``.
        **defaults: values of keys; those that are None are left out.

    Raises:
        ConfigError: an unknown kind or key, or a wrong value.
        DataError: there is nothing at the path, or its kind is not plain.

    Example:
        >>> parse_source("train.csv", ["captions=text"]).build()
    """
    paths = [str(path)] if isinstance(path, (str, Path)) else list(map(str, path))
    if len(paths) == 1 and re.match(r"[a-z_]+=", paths[0]) and not Path(paths[0]).exists():
        paths, overrides = [], [*paths, *overrides]
    values = {key: value for key, value in defaults.items() if value is not None}
    if paths:
        values["path"] = paths[0] if len(paths) == 1 else paths
    kinds = [text.strip().removeprefix("kind=") for text in overrides if text.strip().startswith("kind=")]
    kind = kinds[-1] if kinds else values.get("kind")
    if kind is None and not paths:
        raise ConfigError(
            f"got {' '.join(overrides) or 'nothing'}; expected a path, or kind=KIND and the keys of the kind"
        )
    if kind is None:
        has_split = "split" in values or any(text.strip().startswith("split=") for text in overrides)
        kind = find_kind(paths, has_split)
    return parse_config(
        _class_of(kind), {**values, "kind": kind}, overrides, " ".join(map(display_url, paths)) or f"kind {kind}"
    )


def is_source_key(override: str) -> bool:
    """Return whether ``key=value`` is a setting of some kind of source of this package."""
    name = re.split(r"[.=\[]", override)[0]
    return any(name in kind.model_fields for kind in KINDS.values())


def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a source of any kind: pydantic's validator of `vqclip.data.SourceConfig`.

    Raises:
        ValueError: an unknown kind, or none where it is not plain from the path.
    """
    if isinstance(value, SourceConfigBase) and value.kind not in KINDS:
        return value
    if isinstance(value, (str, Path)):
        value = {"path": value}
    if not isinstance(value, Mapping):
        return handler(value)
    kind = value.get("kind")
    if kind is None and isinstance(value.get("path"), (str, Path, list, tuple)):
        path = value["path"]
        kind = find_kind([str(path)] if isinstance(path, (str, Path)) else path, value.get("split") is not None)
        value = {**value, "kind": kind}
    if kind is None or (isinstance(kind, str) and kind in KINDS):
        return handler(value)
    return parse_config(_class_of(kind), value, (), f"kind {kind}")


SourceConfig = Annotated[SerializeAsAny[Annotated[_Known, Discriminator("kind")]], WrapValidator(_validate)]
"""Configuration of a source of any kind, of this package or of another one, or its path; the kind may be left out."""


def _class_of(kind: object) -> type[SourceConfigBase]:
    """Return the config class of a kind, of this package or of another one, which is imported.

    Raises:
        ConfigError: no package has this kind, or several have; it cannot be imported, or is no config class of it.
    """
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    points = entry_points(group=GROUP)
    others = sorted({point.name for point in points})
    if kind not in others:
        close = did_you_mean(difflib.get_close_matches(str(kind)[:80], [*KINDS, *others], n=1))
        more = f"; from installed packages: {', '.join(others)}" if others else "; no installed package adds others"
        raise ConfigError(f"kind: got {kind!r}; expected one of {', '.join(KINDS)}{more}{close}")
    named = [point for point in points if point.name == kind]
    where = ", ".join(f"{point.value} of {getattr(point.dist, 'name', 'a package')}" for point in named)
    if len(named) != 1:
        raise ConfigError(f"kind {kind!r}: got {where}; expected one package")
    try:
        found = named[0].load()
    except (Exception, SystemExit) as error:  # the code of another package may raise anything
        raise ConfigError(f"kind {kind!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error
    if (
        not (isinstance(found, type) and issubclass(found, SourceConfigBase))
        or found.model_fields["kind"].default != kind
        or found.build is SourceConfigBase.build
    ):
        raise ConfigError(
            f'kind {kind!r}: {where} is not a subclass of vqclip.data.SourceConfigBase with kind: Literal["{kind}"] = '
            f'"{kind}" and a method build(), which opens the data'
        )
    return found


def find_kind(paths: Sequence[str | Path], has_split: bool) -> str:
    """Return the kind of this package of the source at some files, folders, patterns or URLs.

    Args:
        paths: of one source.
        has_split: whether a split is named: a folder at a URL is then of the kind classes, and of shards otherwise.

    Raises:
        DataError: there is nothing at the path, or it could be of no kind or of several, which are named.
    """
    found = {_find_kind(str(each), has_split) for each in paths}
    if len(found) != 1:
        raise DataError(f"kind: missing; the paths are of the kinds {', '.join(sorted(found)) or 'none'}: name one")
    return found.pop()


def _find_kind(path: str, has_split: bool) -> str:
    shown, local = display_url(path), expand_home(path)
    is_local = protocol_of(path) is None
    if is_local and os.path.isdir(local):
        found = _kinds_in(local)
    else:
        name = PurePosixPath(path.partition("?")[0] if "://" in path else path).name.lower()
        found = [kind for kind, endings in _ENDINGS.items() if name.endswith(endings)]
        if not found and is_local and not os.path.exists(local) and not any(mark in path for mark in "{*?["):
            raise DataError(f"{local.absolute()}: no such file or folder; expected a data set")
        _refuse_unread(name, shown)
        if not found and not is_local and not PurePosixPath(name).suffix:
            found = ["classes" if has_split else "shards"]
        if not found:
            plain = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
            raise DataError(
                f"{shown}: its kind is not plain from its name; name it, kind: one of {', '.join(KINDS)}; plain are "
                f"folders, and names that end in {plain}"
            )
    if len(found) > 1:
        raise DataError(f"{shown}: could be of several kinds: {', '.join(found)}; name one, such as kind: {found[0]}")
    return found[0]


def _kinds_in(folder: Path) -> list[str]:
    """Return the kinds that a folder on this machine could be of.

    A folder of images has images in it; or there is no other kind, and there are metadata or folders without tars.
    """
    try:
        below: list[str] = []
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        files = {name for name in names if not os.path.isdir(folder / name)}
        has_tars, has_images = any(map(is_tar, files)), any(name.lower().endswith(IMAGE_ENDINGS) for name in files)
        found = []
        if CLASSNAMES in files:
            found.append("classes")
        elif has_tars:
            found.append("shards")
        stems = {name.removesuffix(".parquet") for name in files if name.endswith(_ENDINGS["parquet"])}
        if not has_tars and not stems <= {*names}:
            found.append("parquet")  # beside tars, or folders of files, img2dataset writes tables of metadata
        if is_saved_by_datasets(files):
            found.append("hf")
        if not has_images and not found:
            packed = (*TAR_ENDINGS, *_ENDINGS["parquet"])
            below = sorted({file.parent.name for file in folder.glob("[!.]*/*") if file.name.endswith(packed)})
            has_images = bool(files & {*METADATA}) or (len(files) < len(names) and not below)
        if has_images:
            found.append("folder")
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    if not names:
        raise DataError(f"{folder.absolute()}: the folder is empty; expected a data set")
    if not found:
        shown = ", ".join(name if name in files else f"{name}/" for name in names[:5])
        tables = [name for name in names if name in files and name.lower().endswith(_TABLES)]
        for name in names:
            if not (tables and name.lower().endswith(_SHEETS)):
                _refuse_unread(name, folder.absolute() / name)
        if tables:
            tables.sort(key=lambda name: ("caption" not in name.lower(), "train" not in name.lower(), name))
            raise DataError(f"{folder.absolute()}: tables; one of them is the path: {folder.absolute() / tables[0]}")
        raise DataError(
            f"{folder.absolute()}: its kind is not plain from its contents ({shown}); name it, kind: one of "
            f"{', '.join(KINDS)}"
            + (f"; or name the path of one with tars or Parquet in it: {', '.join(below)}" if below else "")
        )
    return found


def _refuse_unread(name: str, path: object) -> None:
    for endings, what in _UNREAD.items():
        if name.lower().endswith(endings):
            raise DataError(f"{path}: {what}")
