"""All kinds of sources: find out the kind of a path, and read the configuration of one, from YAML or a command line."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Discriminator, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from vqclip.config import did_you_mean, parse_config
from vqclip.config.types import kinds_of
from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.remote import display_url, protocol_of
from vqclip.data.sources.base import FolderContent, SourceConfigBase
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.csv_table import CsvConfig
from vqclip.data.sources.folder import FolderConfig
from vqclip.data.sources.hf import HfConfig
from vqclip.data.sources.json_table import JsonConfig
from vqclip.data.sources.parquet import ParquetConfig
from vqclip.data.sources.plugins import installed_kinds, load_kind
from vqclip.data.sources.scenes import ScenesSourceConfig
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.data.sources.torchvision import TorchvisionConfig
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home

__all__ = ["KINDS", "SourceConfig", "find_kind", "parse_source"]


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
        kind = find_kind(paths)
    return parse_config(
        _class_of(kind), {**values, "kind": kind}, overrides, " ".join(map(display_url, paths)) or f"kind {kind}"
    )


def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a source of any kind: pydantic's validator of `vqclip.data.SourceConfig`.

    Raises:
        ValueError: an unknown kind, or none where it is not plain from the path.
    """
    if isinstance(value, SourceConfigBase) and value.kind not in KINDS:
        return value
    if not isinstance(value, Mapping):
        return handler(value)
    kind = value.get("kind")
    if kind is None and isinstance(value.get("path"), (str, Path, list, tuple)):
        path = value["path"]
        kind = find_kind([*map(str, path if isinstance(path, (list, tuple)) else [path])])
        value = {**value, "kind": kind}
    if kind is None or (isinstance(kind, str) and kind in KINDS):
        return handler(value)
    return parse_config(_class_of(kind), value, (), f"kind {kind}")


SourceConfig = Annotated[SerializeAsAny[Annotated[_Known, Discriminator("kind")]], WrapValidator(_validate)]
"""Configuration of a source of any kind, of this package or of another one; the kind may be left out."""


def _class_of(kind: object) -> type[SourceConfigBase]:
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    others = installed_kinds()
    if isinstance(kind, str) and kind in others:
        return load_kind(kind)
    close = did_you_mean(difflib.get_close_matches(str(kind)[:80], [*KINDS, *others], n=1))
    more = f"; from installed packages: {', '.join(sorted(others))}" if others else "; no installed package adds others"
    raise ConfigError(f"kind: got {kind!r}; expected one of {', '.join(KINDS)}{more}{close}")


def find_kind(paths: Sequence[str]) -> str:
    """Return the kind of this package of the source at some files, folders, patterns or URLs.

    Raises:
        DataError: there is nothing at the path, or it could be of no kind or of several, which are named.
    """
    found = {kind for each in paths for kind in [_find_kind(each)]}
    if len(found) != 1:
        raise DataError(f"kind: missing; the paths are of the kinds {', '.join(sorted(found)) or 'none'}: name one")
    return found.pop()


def _find_kind(path: str) -> str:
    shown, local = display_url(path), expand_home(path)
    is_local = protocol_of(path) is None
    if is_local and os.path.isdir(local):
        try:
            content = _list_folder(local)
            found = [kind for kind, config in KINDS.items() if config.matches_folder(content)]
        except OSError as error:
            raise DataError(f"{error.filename or local}: cannot be read: {error.strerror}") from None
        if not any(_has_ending(name, IMAGE_ENDINGS) for name in content.files):
            found = [kind for kind in found if kind != "folder"] or found  # other kinds have subfolders too
        if not content.files and not content.folders:
            raise DataError(f"{local.absolute()}: the folder is empty; expected a data set")
        if not found:
            names = sorted([*content.files, *(f"{name}/" for name in content.folders)])
            raise DataError(
                f"{local.absolute()}: its kind is not plain from its contents ({', '.join(names[:5])}); name "
                f"it, kind: one of {', '.join(KINDS)}"
            )
    else:
        found = [kind for kind, config in KINDS.items() if _has_ending(path, config.endings.get(kind, ()))]
        if not found and is_local and not os.path.exists(local) and not any(mark in path for mark in "{*?["):
            raise DataError(f"{local.absolute()}: no such file or folder; expected a data set")
        if not found:
            endings = [ending for kind, config in KINDS.items() for ending in config.endings.get(kind, ())]
            raise DataError(
                f"{shown}: its kind is not plain from its name; name it, kind: one of {', '.join(KINDS)}; plain are "
                f"folders on this machine, and names that end in {', '.join(endings)}"
            )
    if len(found) > 1:
        raise DataError(f"{shown}: could be of several kinds: {', '.join(found)}; name one, such as kind: {found[0]}")
    return found[0]


def _has_ending(path: str, endings: Sequence[str]) -> bool:
    name = PurePosixPath(path.partition("?")[0] if "://" in path else path).name.lower()
    return name.endswith(tuple(endings)) if endings else False


def _list_folder(folder: Path) -> FolderContent:
    files: list[str] = []
    folders: list[str] = []
    for name in os.listdir(folder):
        if not name.startswith("."):
            (folders if os.path.isdir(folder / name) else files).append(name)
    return FolderContent(folder, frozenset(files), frozenset(folders))
