"""Images at URLs: each fetched whole into a bounded folder of the cache.

`images/<two digits>/<hash of the URL>` is a complete file. It is read at once, so it may be removed at any time. One in
256 fetches, chosen by the hash, measures the folder and removes the least recently used files down to nine tenths of
the limit: measuring it on every fetch would take longer than the fetches.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.shard import fetch_bytes
from vqclip.data.remote.urls import digest
from vqclip.errors import StorageError
from vqclip.io.atomic import write_file
from vqclip.io.files import cache_folder, order_of_use, read_bounded

__all__ = ["fetch_image"]

_FILLED = 0.9
"""Part of the limit that is left in use when files are removed."""


def fetch_image(url: str, options: RemoteConfig, limit: int) -> bytes:
    """Return the file at a URL, from the cache if it was fetched before; the server is then not asked again.

    Args:
        url: of an allowed protocol that is not `file`.
        options: how it is downloaded, and the size of the cache.
        limit: largest size in bytes.

    Raises:
        StorageError: it cannot be fetched (`kind` is "gone" if trying again would not help), or the cache cannot be
            written.
        DataError: it is larger.
    """
    key = digest(url)
    folder = cache_folder() / "images" / key[:2]
    with contextlib.suppress(OSError):
        data = read_bounded(folder / key, limit)
        if 0 < len(data) <= limit:
            with contextlib.suppress(OSError):  # another user's file
                os.utime(folder / key)
            return data
    data = fetch_bytes(url, options, limit)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / key, data)
        if key[2:4] == "00":
            _trim(folder.parent, options.cache_bytes)
    except OSError as error:
        raise StorageError(
            f"{folder.parent}: cannot be written ({error.strerror}); set VQCLIP_CACHE to a folder with room, or lower "
            "remote.cache_gib"
        ) from None
    return data


def _trim(folder: Path, limit: int) -> None:
    """Remove the least recently used files if the folder is larger than the limit."""
    files: list[tuple[int, int, str]] = []
    for below in os.scandir(folder):
        for entry in os.scandir(below.path):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                status = entry.stat()
                files.append((order_of_use(status.st_mtime_ns), status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    if total <= limit:
        return
    for _, size, path in sorted(files):
        if total <= _FILLED * limit:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
