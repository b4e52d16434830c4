"""Files and folders that are on the disk whole, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """`sync` for a folder, which some network file systems cannot do at all; they are let off."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_text(path: Path, text: str) -> None:
    """Put `text` into the file `path` in one stroke."""
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    os.replace(aside, path)
    sync_folder(path.parent)


def replace_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Make `target` from what `fill` writes into an empty folder beside it.

    If `fill` fails, what was there stays. A process killed between the two renames leaves the former folder under
    `.replaced-<name>`, and the new one under `.tmp-<name>`; the next call removes both.
    """
    aside, former = (target.with_name(f"{prefix}{target.name}") for prefix in (".tmp-", ".replaced-"))
    for leftover in (aside, former):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    fill(aside)
    for path in aside.rglob("*"):
        sync_folder(path) if path.is_dir() else sync(path)
    if target.exists():
        target.rename(former)
    aside.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(former, ignore_errors=True)
