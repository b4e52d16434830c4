"""Random access to the samples of many shards."""

from __future__ import annotations

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vqclip.data.index import KINDS, ShardIndex, load_index, remove_index
from vqclip.data.open_files import OpenFiles
from vqclip.data.remote import GzipShard, RemoteShard
from vqclip.data.shard import Shard
from vqclip.data.sources.paths import strip_common_folders
from vqclip.errors import DataError, StorageError, encodable, printable
from vqclip.io.files import read_bounded

__all__ = ["MAX_BYTES", "MAX_IMAGE_BYTES", "ShardReader", "TarReader", "join_checksums", "read_image"]

logger = logging.getLogger("vqclip.data")

MAX_IMAGE_BYTES = 64 << 20
MAX_BYTES = {"image": MAX_IMAGE_BYTES, "txt": 1 << 20, "json": 4 << 20, "cls": 64}
"""Larger members are refused before they are read."""
_SHOWN_KEY = 200
"""Characters of a sample's name in messages; every bad sample is logged, and a tar allows 65,536 characters."""


def read_image(file: Path, name: str) -> bytes:
    """Read an image file; raise DataError, which begins with its name, if it cannot be read or is too large."""
    try:
        data = read_bounded(file, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{name}: cannot be read: {reason}", "unreadable file") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise DataError(f"{name}: more than {MAX_IMAGE_BYTES} bytes, which are not read", "too many bytes")
    return data


class TarReader(ABC):
    """Base of readers of the samples of tars: checks of sizes and texts, and names for messages."""

    @abstractmethod
    def _shard_and_key(self, index: int) -> tuple[str, str]:
        """Return a sample's shard and its name there."""

    @abstractmethod
    def read(self, index: int, kind: str) -> bytes:
        """Read one member of one sample, of a kind of `vqclip.data.index.KINDS`.

        Raises:
            DataError: the sample lacks it, or it is too large.
            StorageError: a shard cannot be read or downloaded, or has changed.
        """

    def name(self, index: int) -> str:
        """Return shard and sample, for messages."""
        shard, key = self._shard_and_key(index)
        if len(key) > _SHOWN_KEY:
            key = f"{key[:_SHOWN_KEY]}... ({len(key)} characters)"
        return printable(f"{shard}: sample {key}", one_line=True)

    def text(self, index: int, kind: str) -> str:
        """Read one member as UTF-8 text, without white space around it.

        Raises:
            DataError: as `read`, or it is not UTF-8.
        """
        data = self.read(index, kind)
        try:
            return data.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name(index)}: .{kind} is not UTF-8: {error.reason} at byte {error.start}", "not UTF-8"
            ) from None

    def _require_readable(self, index: int, kind: str, size: int | None) -> None:
        """Raise DataError for a member that is missing (size None) or too large."""
        if size is None:
            what = "image (.jpg, .png, .webp, ...)" if kind == "image" else f".{kind}"
            raise DataError(f"{self.name(index)}: has no {what}", "missing member")
        if size > MAX_BYTES[kind]:
            raise DataError(
                f"{self.name(index)}: {kind} of {size} bytes; at most {MAX_BYTES[kind]} are read", "too many bytes"
            )


class ShardReader(TarReader):
    """Reads members of samples by `pread` at the offsets of the shards' indexes.

    Works in any process and after a fork: reading does not move a file position, and descriptors are opened on demand.
    Indexes are arrays, whose memory forked workers share. Shards at URLs are open only while they are read, so that the
    cache can remove them.

    Args:
        shards: tar files, here or at URLs.
        cache: folder of the indexes; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: see `vqclip.data.index.load_index`.
    """

    def __init__(self, shards: Sequence[Shard], cache: Path | None = None):
        self._files = OpenFiles()
        self._indexes = [load_index(shard, cache) for shard in shards]
        self._ends = np.cumsum([len(index) for index in self._indexes], dtype=np.int64)
        self._places = strip_common_folders([str(index.path) for index in self._indexes])
        self._cache = cache
        _warn_if_cache_is_small(self._indexes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _shard_and_key(self, index: int) -> tuple[str, str]:
        shard, row = self._locate(index)
        return str(self._indexes[shard].path), self._indexes[shard].key(row)

    def key(self, index: int) -> str:
        """Return the sample's name in its shard."""
        shard, row = self._locate(index)
        return self._indexes[shard].key(row)

    def place(self, index: int) -> str:
        """Return shard and sample, ``00003.tar/000031415``, without the folders that all shards have in common."""
        shard, row = self._locate(index)
        return f"{self._places[shard]}/{self._indexes[shard].key(row)}"

    def count(self, kind: str) -> int:
        """Return the number of samples with a member of this kind (see `vqclip.data.index.KINDS`)."""
        return sum(int((index.offsets[:, KINDS.index(kind)] >= 0).sum()) for index in self._indexes)

    def read(self, index: int, kind: str) -> bytes:
        """Read one member of one sample; see `TarReader.read`."""
        shard, row = self._locate(index)
        column = KINDS.index(kind)
        shard_index = self._indexes[shard]
        offset, size = int(shard_index.offsets[row, column]), int(shard_index.sizes[row, column])
        self._require_readable(index, kind, size if offset >= 0 else None)
        path, stamp = shard_index.path, (shard_index.length, shard_index.modified_ns)
        if isinstance(path, Path):
            return self._files.read(path, stamp, offset, size, self.name(index))
        return self._read_cached(shard, path, size, offset, self.name(index))

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """File name, size, samples and SHA-256 of every shard."""
        return [
            {"name": encodable(index.path.name), "bytes": index.length, "samples": len(index), "sha256": index.sha256}
            for index in self._indexes
        ]

    @property
    def sha256(self) -> str:
        """Checksum of all shards in their order; names and folders of the files do not matter."""
        return join_checksums([index.sha256 for index in self._indexes])

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def _read_cached(self, shard: int, path: RemoteShard | GzipShard, size: int, offset: int, name: str) -> bytes:
        file = self._open_cached(shard, path)
        try:
            data = os.pread(file, size, offset)
        except OSError as error:
            raise StorageError(f"{name}: cannot be read: {error.strerror}", "unreadable shard") from None
        finally:
            os.close(file)
        if len(data) != size:
            raise StorageError(f"{name}: the shard became shorter while it was in use", "changed shard")
        return data

    def _open_cached(self, shard: int, path: RemoteShard | GzipShard) -> int:
        try:
            return path.open(self._indexes[shard].length, self._indexes[shard].sha256)
        except StorageError as error:
            if error.kind == "changed shard":
                remove_index(path, self._cache)
            raise

    def close(self) -> None:
        """Close the open files; they are opened again on demand."""
        self._files.close()


def join_checksums(shards: Sequence[str]) -> str:
    """Return the checksum of a data set from those of its shards."""
    return hashlib.sha256("".join(shards).encode()).hexdigest()


def _warn_if_cache_is_small(indexes: Sequence[ShardIndex]) -> None:
    remote = [(index.path, index.length) for index in indexes if not isinstance(index.path, Path)]
    total = sum(length for _, length in remote)
    if remote and total > remote[0][0].options.cache_bytes:
        logger.warning(
            "%s and %d more: %.2f GiB of shards do not fit in remote.cache_gib=%g; unless data.order is "
            "windowed, most reads will fetch a whole shard. Choose that order, raise the limit, or copy the shards",
            remote[0][0],
            len(remote) - 1,
            total / 2**30,
            remote[0][0].options.cache_gib,
        )
