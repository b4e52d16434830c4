"""Sidecar index of WebDataset shards: where every sample's members lie, so that any sample is one `pread` away.

An index is made once for every shard, in the cache folder (shards may be in a read-only one). It is stale when the
shard's size or modification time differ, and says what the shard contained: its SHA-256 is part of a run's data
fingerprint. That of a shard at a URL holds until a fetched copy has another hash: nobody asks the server before. It is
a `.npz` of plain arrays, read without pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data.remote import RemoteShard
from vqclip.data.shard import Shard
from vqclip.data.tar import walk
from vqclip.errors import DataError, StorageError
from vqclip.io.cache import cache_folder

__all__ = ["KINDS", "ShardIndex", "forget_index", "load_index"]

logger = logging.getLogger("vqclip.data")

KINDS = ("image", "txt", "json", "cls")
"""What a sample is made of; the columns of `ShardIndex.offsets` and `.sizes`."""

_COLUMNS = {"jpg": 0, "jpeg": 0, "png": 0, "webp": 0, "txt": 1, "json": 2, "cls": 3}
"""The extensions that are read at all. Anything else in a shard is left alone."""
_VERSION = 1
_KEY = re.compile(r"^((?:.*/)?[^./]+)\.([^/]*)$", re.DOTALL)


@dataclass(frozen=True)
class ShardIndex:
    """Where the samples of one shard lie."""

    path: Shard
    length: int
    """Size of the shard in bytes."""
    modified_ns: int
    """Modification time of the shard when it was indexed."""
    sha256: str
    """Hash of the whole shard."""
    offsets: np.ndarray
    """``(samples, 4)`` int64: first byte of each of `KINDS`; -1 where the sample has none."""
    sizes: np.ndarray
    """``(samples, 4)`` int64: bytes of each of `KINDS`."""
    keys: bytes
    """The samples' names, UTF-8, one after the other."""
    key_ends: np.ndarray
    """``(samples,)`` int64: where each name ends in `keys`."""
    ignored: int
    """Members with other extensions."""

    def __len__(self) -> int:
        return len(self.offsets)

    def key(self, index: int) -> str:
        """Name of a sample, as WebDataset has it: the member's path up to the first dot of its last part."""
        start = int(self.key_ends[index - 1]) if index else 0
        return self.keys[start : int(self.key_ends[index])].decode("utf-8", "replace")


def load_index(path: Shard, cache: Path | None = None) -> ShardIndex:
    """The index of one shard, from the cache if it is there and fits, else made and stored.

    A shard at a URL is fetched where its index is made.

    Raises:
        DataError: the shard is missing, truncated, compressed, ... or the cache cannot be written.
    """
    path = path if isinstance(path, RemoteShard) else Path(path).absolute()
    cached = _cache_file(path, cache)
    if not isinstance(path, RemoteShard):
        _require_file(path)
    index = _read(cached, path)
    if index is not None and _is_current(index):
        return index
    index = _make(path)
    _write(cached, index)
    return index


def _require_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _cannot_open(path, error) from None
    if not stat.S_ISREG(mode):  # to open a pipe is to wait for who writes into it
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        raise DataError(f"{path}: is a {kinds.get(stat.S_IFMT(mode), 'device')}; expected a tar file")


def forget_index(path: Shard, cache: Path | None = None) -> None:
    """Removes the stored index of a shard that is known to have changed."""
    with contextlib.suppress(OSError):  # in a folder that is only read, somebody else has to
        _cache_file(path, cache).unlink()


def _is_current(index: ShardIndex) -> bool:
    if isinstance(index.path, RemoteShard):
        return True
    try:
        status = index.path.stat()
    except OSError as error:
        raise _cannot_open(index.path, error) from None
    return (index.length, index.modified_ns) == (status.st_size, status.st_mtime_ns)


def _cannot_open(path: Shard, error: OSError) -> DataError:
    return DataError(f"{path}: shard cannot be opened: {error.strerror}")


def _make(path: Shard) -> ShardIndex:
    try:
        return _index(path)
    except StorageError:
        raise
    except DataError:
        if isinstance(path, RemoteShard):
            path.discard()  # or the next start would find the same damage, whatever the server has by then
        raise


def _index(path: Shard) -> ShardIndex:
    try:
        file = path.open() if isinstance(path, RemoteShard) else os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _cannot_open(path, error) from None
    try:
        status = os.fstat(file)
        rows, ignored = _group(path, file, status.st_size)
        sha256 = _hash(file)
        after = os.fstat(file)
    except OSError as error:
        raise DataError(f"{path}: shard cannot be read: {error.strerror}") from None
    finally:
        os.close(file)
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise DataError(f"{path}: was written to while it was indexed; start again when it is complete")
    if not rows and ignored:  # an empty tar is in order: none of what a download asked for may have come
        raise DataError(
            f"{path}: no samples; expected members such as 000000000.jpg and 000000000.txt "
            f"(extensions: {', '.join(_COLUMNS)}; {ignored} members have others)"
        )
    keys = [key.encode("utf-8", "replace") for key in rows]
    table = np.array(list(rows.values()), dtype=np.int64).reshape(len(rows), len(KINDS), 2)
    logger.info("indexed %s: %d samples", path, len(rows))
    return ShardIndex(
        path=path,
        length=status.st_size,
        modified_ns=status.st_mtime_ns,
        sha256=sha256,
        offsets=np.ascontiguousarray(table[:, :, 0]),
        sizes=np.ascontiguousarray(table[:, :, 1]),
        keys=b"".join(keys),
        key_ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
        ignored=ignored,
    )


def _group(path: Shard, file: int, length: int) -> tuple[dict[str, list[list[int]]], int]:
    """Members by sample name, in order of first appearance; and the number of members left alone."""
    rows: dict[str, list[list[int]]] = {}
    ignored = 0
    for name, offset, size in walk(path, file, length):
        match = _KEY.match(name)
        column = _COLUMNS.get(match[2].lower()) if match else None
        if match is None or column is None:
            ignored += 1
            continue
        row = rows.setdefault(match[1], [[-1, 0] for _ in KINDS])
        if row[column][0] >= 0:
            raise DataError(
                f"{path}: sample {match[1]!r} has two members for its {KINDS[column]} (the second, {name!r}, at offset "
                f"{offset}); names of samples must differ within a shard"
            )
        row[column] = [offset, size]
    return rows, ignored


def _hash(file: int) -> str:
    digest, at = hashlib.sha256(), 0
    while block := os.pread(file, 1 << 20, at):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def _cache_file(path: Shard, cache: Path | None) -> Path:
    key = path.key if isinstance(path, RemoteShard) else hashlib.sha256(os.fsencode(path)).hexdigest()
    return (cache or cache_folder()) / "index" / f"{key[:24]}.npz"


def _write(cached: Path, index: ShardIndex) -> None:
    aside = cached.with_name(f".{cached.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    facts = {
        "version": _VERSION,
        "path": str(index.path),
        "length": index.length,
        "modified_ns": index.modified_ns,
        "sha256": index.sha256,
        "ignored": index.ignored,
    }
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            np.savez(
                file,
                facts=np.frombuffer(json.dumps(facts).encode(), np.uint8),
                offsets=index.offsets,
                sizes=index.sizes,
                keys=np.frombuffer(index.keys, np.uint8),
                key_ends=index.key_ends,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, cached)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise DataError(
            f"{cached.parent}: the index of {index.path} cannot be written ({error.strerror}); "
            "set VQCLIP_CACHE to a folder with room"
        ) from None


def _read(cached: Path, path: Shard) -> ShardIndex | None:
    """The stored index; None if there is none, or it is damaged or of another version."""
    try:
        with np.load(cached, allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            if facts["version"] != _VERSION or facts["path"] != str(path):
                return None
            index = ShardIndex(
                path=path,
                length=facts["length"],
                modified_ns=facts["modified_ns"],
                sha256=facts["sha256"],
                offsets=arrays["offsets"],
                sizes=arrays["sizes"],
                keys=arrays["keys"].tobytes(),
                key_ends=arrays["key_ends"],
                ignored=facts["ignored"],
            )
        _require_consistent(index)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged zip makes zipfile, zlib and numpy raise nearly anything
        logger.warning("%s: damaged index of %s is made anew (%s)", cached, path, error)
        return None
    return index


def _require_consistent(index: ShardIndex) -> None:
    """Raises ValueError for arrays that no index of ours has; numpy hands out as bytes what is not an array at all."""
    samples = len(index.key_ends)
    table, column = (samples, len(KINDS)), (samples,)
    arrays: list[tuple[Any, tuple[int, ...]]] = [
        (index.offsets, table),
        (index.sizes, table),
        (index.key_ends, column),
    ]
    for array, shape in arrays:
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.int64:
            raise ValueError("it does not hold what it should")
    inside = (index.offsets >= -1).all() and (index.sizes >= 0).all()
    inside &= (index.offsets <= index.length).all() and (index.sizes <= index.length - index.offsets).all()
    ends = np.concatenate(([0], index.key_ends))
    if not inside or ends[-1] != len(index.keys) or (np.diff(ends) < 0).any():
        raise ValueError("it points outside of the shard")
