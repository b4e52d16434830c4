"""Tables: facts and named arrays in one file, which all processes of a machine map into memory.

A table is a safetensors file: anything that reads this format reads its arrays. Its metadata have one key, ``facts``:
a JSON object that contains checksums of the arrays and of itself. Every index is stored in this format.
"""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from vqclip.errors import CheckpointError, DataError, StorageError
from vqclip.io.atomic import write_file
from vqclip.io.json_files import add_checksum, verify_checksum
from vqclip.io.tensors import open_tensors

logger = logging.getLogger("vqclip.data")

_CHECKSUMS = "checksums"


class Table(NamedTuple):
    """An open table."""

    facts: dict[str, Any]
    """JSON values."""
    arrays: dict[str, np.ndarray]
    """Read-only arrays, mapped from the file: what is not used takes no memory."""


class Texts(NamedTuple):
    """Strings one after the other, as two arrays of a table."""

    content: np.ndarray
    """uint8: all strings in UTF-8; lone surrogates, as in names of files that are not UTF-8, are kept."""
    ends: np.ndarray
    """int64: end of each string in `content`."""

    @classmethod
    def join(cls, texts: Iterable[str]) -> Texts:
        """Return the arrays of some strings."""
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        ends = np.array(list(itertools.accumulate(map(len, parts))), np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), ends)

    def read(self, index: int) -> str:
        """Return one string."""
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        start = int(self.ends[index - 1]) if index else 0
        return self.content[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogatepass")

    @property
    def are_consistent(self) -> bool:
        """Return whether the arrays, which may come from anywhere, have the types and the order that `read` needs."""
        content, ends = self.content, self.ends
        if (content.dtype, content.ndim, ends.dtype, ends.ndim) != (np.uint8, 1, np.int64, 1):
            return False
        edges = np.concatenate([[0], ends])
        return bool((np.diff(edges) >= 0).all() and edges[-1] == len(content))


def save_table(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Write a table atomically; equal facts and arrays make equal bytes.

    Args:
        path: the file; its folder is made.
        facts: JSON values, of some megabytes at most; long lists belong in an array.
        arrays: of integers, floats or booleans.
        name: name of the data, for the message.

    Raises:
        StorageError: it cannot be written.
    """
    content = table_bytes(facts, arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise StorageError(
            f"{path.parent}: the index of {name} cannot be written ({error.strerror}); set VQCLIP_CACHE to another "
            "folder"
        ) from None


def table_bytes(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a table; see `save_table`."""
    plain = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    return safetensors.numpy.save(plain, {"facts": add_checksum({**facts, _CHECKSUMS: _sums(plain)}).decode()})


def open_table(path: Path, expected: Mapping[str, object], verify: bool | Collection[str] = True) -> Table:
    """Open a table.

    Args:
        path: the file.
        expected: some of its facts, such as format and version.
        verify: compare the checksums of the arrays, which reads the file once; one process of a machine should. Or the
            names of those that are compared. The checksum of the header always is.

    Raises:
        DataError: it is missing or damaged, or has other facts.
    """
    try:
        with open_tensors(path) as file:
            text = (file.metadata() or {}).get("facts", "")
            try:
                facts = json.loads(text)
            except (ValueError, RecursionError):
                facts = None
            if not isinstance(facts, dict):
                raise DataError(f"{path}: is not a table of vqclip, or its header is damaged")
            for key, value in expected.items():
                if facts.get(key) != value:
                    raise DataError(f"{path}: {key} is {facts.get(key)!r}; expected {value!r}")
            sums = verify_checksum(path, facts, text.encode()).pop(_CHECKSUMS, None)
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except CheckpointError as error:
        raise DataError(str(error)) from None
    names = arrays.keys() & (verify if isinstance(verify, Collection) else arrays.keys() if verify else ())
    found = _sums({name: arrays[name] for name in names})
    if not isinstance(sums, dict) or sums.keys() != arrays.keys() or found != {name: sums[name] for name in names}:
        raise DataError(f"{path}: does not match its own checksums: the file is damaged")
    for array in arrays.values():
        array.flags.writeable = False
    return Table({key: value for key, value in facts.items() if key not in (_CHECKSUMS, "sha256")}, arrays)


def find_table(path: Path, expected: Mapping[str, object], name: str) -> Table | None:
    """Open a table, see `open_table`; return None if it is missing, damaged or of other facts.

    Args:
        path: the file.
        expected: some of its facts, such as version and name of the data.
        name: name of the data, for the warning that the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        table = open_table(path, {})
    except DataError as error:
        logger.warning("%s: damaged index of %s is made again (%s)", path, name, error)
        return None
    return table if all(table.facts.get(key) == value for key, value in expected.items()) else None


def _sums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the CRC-32 of each array."""
    return {name: zlib.crc32(array.reshape(-1).view(np.uint8).data) for name, array in arrays.items()}
