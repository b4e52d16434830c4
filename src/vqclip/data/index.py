"""Indexes of WebDataset shards: the offset of every sample's members, so that one `pread` reads any of them.

The index of a shard is made once and stored in the cache folder, since shards may be read-only. It is outdated when the
shard's size or modification time differs. The index of a shard at a URL stays valid until a downloaded copy has another
checksum; the server is not asked before. The shard's SHA-256 in the index is part of a run's data fingerprint. An index
is a `.npz` of plain arrays, read without pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data.arrays import load_arrays, save_arrays
from vqclip.data.members import KINDS, MemberTable
from vqclip.data.shard import Shard
from vqclip.data.tar import walk
from vqclip.errors import DataError, StorageError
from vqclip.io.files import cache_folder

__all__ = ["KINDS", "ShardIndex", "load_index", "remove_index"]

logger = logging.getLogger("vqclip.data")

_VERSION = 2
_FACTS = ("length", "modified_ns", "sha256")


@dataclass(frozen=True)
class ShardIndex:
    """The offsets of one shard's samples."""

    path: Shard
    length: int
    """Size of the shard in bytes."""
    modified_ns: int
    """Modification time of the shard when it was indexed."""
    sha256: str
    """SHA-256 of the whole shard."""
    offsets: np.ndarray
    """``(samples, 4)`` int64: offset of each of `KINDS`; -1 where the sample has none."""
    sizes: np.ndarray
    """``(samples, 4)`` int64: bytes of each of `KINDS`."""
    keys: bytes
    """The samples' names as in the tar, concatenated."""
    key_ends: np.ndarray
    """``(samples,)`` int64: end of each name in `keys`."""

    def __len__(self) -> int:
        return len(self.offsets)

    def key(self, index: int) -> str:
        """Return a sample's name as in WebDataset: the members' path up to the first dot of its last part."""
        start = int(self.key_ends[index - 1]) if index else 0
        return self.keys[start : int(self.key_ends[index])].decode("utf-8", "backslashreplace")


def load_index(path: Shard, cache: Path | None = None) -> ShardIndex:
    """Return the index of one shard: the stored one if it is up to date, otherwise a new one, which is stored.

    A shard at a URL is downloaded to be indexed.

    Raises:
        DataError: the shard is missing, truncated, compressed, ... or the cache cannot be written.
    """
    path = Path(path).absolute() if isinstance(path, str | Path) else path
    cached = _cache_file(path, cache)
    status = _stat_file(path) if isinstance(path, Path) else None
    index = _read(cached, path)
    if index is None or not (status is None or _is_current(index, status)):
        index = _make(path)
        _write(cached, index)
    return index


def _stat_file(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise _open_error(path, error) from None
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        raise DataError(f"{path}: is a {kinds.get(stat.S_IFMT(status.st_mode), 'device')}; expected a tar file")
    return status


def _is_current(index: ShardIndex, status: os.stat_result) -> bool:
    return (index.length, index.modified_ns) == (status.st_size, status.st_mtime_ns)


def remove_index(path: Shard, cache: Path | None = None) -> None:
    """Remove the stored index of a shard that has changed."""
    with contextlib.suppress(OSError):  # a read-only cache is left to its owner
        _cache_file(path, cache).unlink()


def _open_error(path: Shard, error: OSError) -> DataError:
    return DataError(f"{path}: shard cannot be opened: {error.strerror}")


def _make(path: Shard) -> ShardIndex:
    try:
        return _index(path)
    except StorageError:
        raise
    except DataError:
        if not isinstance(path, Path):
            path.discard()  # otherwise the next start would find the same damage, whatever the server has by then
        raise


def _index(path: Shard) -> ShardIndex:
    try:
        file = os.open(path, os.O_RDONLY) if isinstance(path, Path) else path.open()
    except OSError as error:
        raise _open_error(path, error) from None
    try:
        status = os.fstat(file)
        members = MemberTable(path)
        members.add(walk(path, file, status.st_size))
        sha256 = _hash(file)
        after = os.fstat(file)
    except OSError as error:
        raise DataError(f"{path}: shard cannot be read: {error.strerror}") from None
    finally:
        os.close(file)
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise DataError(f"{path}: was written to while it was indexed; start again when it is complete")
    table = members.finish()
    logger.info("indexed %s: %d samples", path, len(members))
    return ShardIndex(
        path=path,
        length=status.st_size,
        modified_ns=status.st_mtime_ns,
        sha256=sha256,
        **table._asdict(),
    )


def _hash(file: int) -> str:
    digest, at = hashlib.sha256(), 0
    while block := os.pread(file, 1 << 20, at):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def _cache_file(path: Shard, cache: Path | None) -> Path:
    key = hashlib.sha256(os.fsencode(path)).hexdigest() if isinstance(path, Path) else path.key
    return (cache or cache_folder()) / "index" / f"{key[:24]}.npz"


def _versions(path: Shard) -> dict[str, object]:
    return {"version": _VERSION, "path": str(path)}


def _write(cached: Path, index: ShardIndex) -> None:
    facts = {name: getattr(index, name) for name in _FACTS}
    keys = np.frombuffer(index.keys, np.uint8)
    arrays = {"offsets": index.offsets, "sizes": index.sizes, "keys": keys, "key_ends": index.key_ends}
    save_arrays(cached, _versions(index.path) | facts, arrays, str(index.path))


def _read(cached: Path, path: Shard) -> ShardIndex | None:
    """Return the stored index; None if it is missing, damaged or of another version."""

    def make(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> ShardIndex:
        fields: dict[str, Any] = {**arrays, **{name: facts[name] for name in _FACTS}, "keys": arrays["keys"].tobytes()}
        index = ShardIndex(path, **fields)
        _require_consistent(index)
        return index

    return load_arrays(cached, _versions(path), str(path), make)


def _require_consistent(index: ShardIndex) -> None:
    """Check an untrusted index: shapes, types and ranges."""
    samples = len(index.key_ends)
    table = (samples, len(KINDS))
    arrays: list[tuple[Any, tuple[int, ...]]] = [
        (index.offsets, table),
        (index.sizes, table),
        (index.key_ends, (samples,)),
    ]
    for array, shape in arrays:
        if array.shape != shape or array.dtype != np.int64:
            raise ValueError("it contains other arrays than expected")
    inside = (index.offsets >= -1).all() and (index.sizes >= 0).all()
    inside &= (index.offsets <= index.length).all() and (index.sizes <= index.length - index.offsets).all()
    ends = np.concatenate(([0], index.key_ends))
    if not inside or ends[-1] != len(index.keys) or (np.diff(ends) < 0).any():
        raise ValueError("it points outside of the shard")
