"""Arrays with JSON-able facts in files of the cache: the indexes of shards and of image files. Read without pickle."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vqclip.errors import DataError
from vqclip.io.atomic import write_file

__all__ = ["load_arrays", "save_arrays"]

logger = logging.getLogger("vqclip.data")
T = TypeVar("T")


def save_arrays(file: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Write arrays and facts to a file of the cache; raises DataError, with ``name``, if it cannot be written."""
    body = json.dumps({**facts, "arrays": sorted(arrays)}).encode()
    content: dict[str, Any] = {"facts": np.frombuffer(body, np.uint8), **arrays}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, lambda stream: np.savez(stream, **content))
    except OSError as error:
        raise DataError(
            f"{file.parent}: the index of {name} cannot be written ({error.strerror}); set VQCLIP_CACHE to a folder "
            "with room"
        ) from None


def load_arrays(
    file: Path,
    expected: Mapping[str, object],
    name: str,
    make: Callable[[dict[str, Any], dict[str, np.ndarray]], T],
) -> T | None:
    """Return what is made of a file of `save_arrays`; None if it is missing or damaged, or other facts are expected.

    Every array has a checksum in the file, and the facts name all arrays, so ``make`` gets what was written.

    Args:
        file: the file.
        expected: some of its facts, such as the version.
        name: of the data, for the warning that a file is damaged.
        make: function of facts and arrays; anything that it raises means damage.
    """
    try:
        with np.load(file, allow_pickle=False) as stored:
            facts = json.loads(stored["facts"].tobytes())
            if any(facts.get(key) != value for key, value in expected.items()):
                return None
            arrays = {key: stored[key] for key in stored.files if key != "facts"}
        named = facts.get("arrays", sorted(arrays))  # older indexes of shards do not name theirs
        if sorted(arrays) != named or not all(isinstance(each, np.ndarray) for each in arrays.values()):
            raise ValueError("it contains other arrays than were written")
        return make(facts, arrays)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged zip makes zipfile, zlib and numpy raise nearly anything
        logger.warning("%s: damaged index of %s is made again (%s)", file, name, error)
        return None
