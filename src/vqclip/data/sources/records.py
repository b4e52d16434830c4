"""Facts about data that take long to find out, stored as JSON in the cache folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vqclip.errors import CheckpointError, DataError
from vqclip.io.atomic import write_file
from vqclip.io.files import cache_folder
from vqclip.io.json_files import add_checksum, read_versioned

__all__ = ["load_record"]

logger = logging.getLogger("vqclip.data")

_VERSIONS = {"format": "vqclip-facts", "version": 1}


def load_record(
    key: str,
    make: Callable[[], dict[str, Any]],
    is_current: Callable[[dict[str, Any]], bool] = lambda facts: True,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Return the facts that are stored under a key if they are current, otherwise new ones, which are stored.

    Args:
        key: what they are about; a file's path alone if `is_current` compares its size and time.
        make: finds them out.
        is_current: whether stored ones still hold.
        cache: the folder; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: from `make`, or the cache cannot be written.
    """
    path = _path(key, cache)
    try:
        found: dict[str, Any] = read_versioned(path, {**_VERSIONS, "key": key}, "it is made again")["facts"]
        if is_current(found):
            return found
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (CheckpointError, OSError) as error:
        logger.warning("%s; it is made again", error)
    facts = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, add_checksum({**_VERSIONS, "key": key, "facts": facts}))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); set VQCLIP_CACHE to a folder with room"
        ) from None
    return facts


def _path(key: str, cache: Path | None) -> Path:
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return (cache or cache_folder()) / "index" / f"{name}.json"
