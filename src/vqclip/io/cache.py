"""The cache folder, and folders in it that are made once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from vqclip.io.atomic import replace_folder
from vqclip.io.file_locks import hold_lock


def order_of_use(time_ns: int) -> int:
    """Return a number by which files are sorted, the least recently used first, from the time of the last use.

    Times more than a minute ahead come from a clock that was wrong, so those files are first, in their own order.
    """
    return time_ns if time_ns < time.time_ns() + 60 * 10**9 else time_ns - 2**64


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
