"""Find out the kind of a source from its path."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.remote import display_url, protocol_of
from vqclip.data.sources.base import FolderContent, SourceConfigBase
from vqclip.errors import DataError
from vqclip.io.files import expand_home

__all__ = ["find_kind"]


def find_kind(paths: Sequence[str], kinds: Mapping[str, type[SourceConfigBase]]) -> str:
    """Return the kind of the source at these paths.

    Args:
        paths: files, folders, patterns or URLs.
        kinds: the kinds to choose from.

    Raises:
        DataError: there is nothing at the path, or it could be of no kind or of several, which are named.
    """
    found = {kind for each in paths for kind in [_find(each, kinds)]}
    if len(found) != 1:
        raise DataError(f"kind: missing; the paths are of the kinds {', '.join(sorted(found)) or 'none'}: name one")
    return found.pop()


def _find(path: str, kinds: Mapping[str, type[SourceConfigBase]]) -> str:
    shown, local = display_url(path), expand_home(path)
    is_local = protocol_of(path) is None
    if is_local and os.path.isdir(local):
        try:
            content = _list(local)
            found = [kind for kind, config in kinds.items() if config.matches_folder(content)]
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
                f"it, kind: one of {', '.join(kinds)}"
            )
    else:
        found = [kind for kind, config in kinds.items() if _has_ending(path, config.endings.get(kind, ()))]
        if not found and is_local and not os.path.exists(local) and not any(mark in path for mark in "{*?["):
            raise DataError(f"{local.absolute()}: no such file or folder; expected a data set")
        if not found:
            endings = [ending for kind, config in kinds.items() for ending in config.endings.get(kind, ())]
            raise DataError(
                f"{shown}: its kind is not plain from its name; name it, kind: one of {', '.join(kinds)}; plain are "
                f"folders on this machine, and names that end in {', '.join(endings)}"
            )
    if len(found) > 1:
        raise DataError(f"{shown}: could be of several kinds: {', '.join(found)}; name one, such as kind: {found[0]}")
    return found[0]


def _has_ending(path: str, endings: Sequence[str]) -> bool:
    name = PurePosixPath(path.partition("?")[0] if "://" in path else path).name.lower()
    return name.endswith(tuple(endings)) if endings else False


def _list(folder: Path) -> FolderContent:
    files: list[str] = []
    folders: list[str] = []
    for name in os.listdir(folder):
        if not name.startswith("."):
            (folders if os.path.isdir(folder / name) else files).append(name)
    return FolderContent(folder, frozenset(files), frozenset(folders))
