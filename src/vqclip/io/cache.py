"""The cache folder, and folders in it that are made once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vqclip.io.atomic import replace_folder
from vqclip.io.file_locks import hold_lock


def cache_folder() -> Path:
    """Return the folder of indexes and drawn data: environment variable VQCLIP_CACHE, else ~/.cache/vqclip."""
    return Path(os.environ.get("VQCLIP_CACHE") or Path.home() / ".cache" / "vqclip")


def make_once(
    folder: Path, fill: Callable[[Path], object], is_intact: Callable[[Path], bool] = lambda path: path.exists()
) -> None:
    """Make a folder of the cache atomically unless it is intact; other processes wait for the one that makes it.

    Args:
        folder: the folder.
        fill: writes its files into an empty folder.
        is_intact: whether the folder can be used as it is.

    Raises:
        OSError: it cannot be written.
    """
    if is_intact(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.with_name(f"{folder.name}.lock")):
        if not is_intact(folder):
            replace_folder(folder, fill)
