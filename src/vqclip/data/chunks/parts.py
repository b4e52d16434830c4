"""Parts of an index: a small file for each shard, in a folder that several processes and machines may share.

The name of a part is a function of name, size and tag of its shard. So a shard that has changed has no part, and parts
of other shards are used again, also for another list of shards. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from vqclip.data.chunks.index_file import DIGEST
from vqclip.data.chunks.scan import ShardPart
from vqclip.data.members import KINDS
from vqclip.data.remote import RemoteConfig
from vqclip.data.remote.folder import RemoteFolder
from vqclip.data.remote.shard import fetch_bytes
from vqclip.errors import DataError, StorageError
from vqclip.io.atomic import write_file
from vqclip.io.files import read_bounded

__all__ = ["LocalParts", "PartFolder", "RemoteParts", "ShardFacts", "dump_part", "parse_part", "part_name"]

logger = logging.getLogger("vqclip.data")

_VERSION = 2
_BLOCK = 512
MAX_PART = 1 << 28
"""Bytes of a part at most; a sample takes 20."""


class ShardFacts(NamedTuple):
    """Name, size and tag of a shard; see `ChunkIndex`."""

    name: str
    length: int
    tag: str


class LocalParts:
    """Parts in a folder on this machine, or on a disk that machines share.

    Args:
        folder: created on first use.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def list(self) -> set[str]:
        """Return the names of all parts."""
        return {path.name for path in self._folder.glob("*.npz")}

    def has(self, name: str) -> bool:
        """Return whether there is a part with this name."""
        return (self._folder / name).exists()

    def read(self, name: str) -> bytes | None:
        """Return a part; None if there is none."""
        try:
            return read_bounded(self._folder / name, MAX_PART)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(
                f"{self._folder / name}: cannot be read ({error.strerror}); delete it, and it is made again"
            ) from None

    def write(self, name: str, content: bytes) -> None:
        """Write a part, whole or not at all; raises StorageError if the disk cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._folder / name, content)
        except OSError as error:
            raise StorageError(
                f"{self._folder}: parts of the index cannot be written ({error.strerror}); expected a folder with "
                "room: name another with --out, or set VQCLIP_CACHE"
            ) from None


def part_name(facts: ShardFacts) -> str:
    """Return the name of the part of a shard."""
    text = "\n".join([str(_VERSION), facts.name, str(facts.length), facts.tag])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".npz"


def dump_part(part: ShardPart) -> bytes:
    """Return the content of the file of a part: begins of samples in blocks of 512 bytes, and their digests."""
    file = io.BytesIO()
    np.savez(file, begins=(part.begins // _BLOCK).astype("<u4"), digests=part.digests, members=part.members)
    return file.getvalue()


def parse_part(content: bytes, facts: ShardFacts) -> ShardPart | None:
    """Return a part; None if its file is damaged.

    Args:
        content: of the file.
        facts: of the shard.
    """
    try:
        _require_stored(content)
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            begins, digests, members = stored["begins"], stored["digests"], stored["members"]
        samples = len(begins)
        if (begins.dtype, digests.dtype, members.dtype) != (np.dtype("<u4"), np.uint8, np.int64):
            raise ValueError("it contains other arrays than were written")
        begins = begins.astype(np.int64) * _BLOCK
        edges = np.append(begins, facts.length)
        if begins.shape != (samples,) or digests.shape != (samples, DIGEST) or members.shape != (len(KINDS),):
            raise ValueError("it contains arrays of other shapes than were written")
        if samples and (begins[0] != 0 or (np.diff(edges) <= 0).any()):
            raise ValueError("it points outside of the shard")
        if (members < 0).any() or (members > samples).any():
            raise ValueError("it counts more members than samples")
    except Exception as error:  # a damaged zip makes zipfile, zlib and numpy raise nearly anything
        logger.warning("damaged part of the index for %s is made again (%s)", facts.name, error)
        return None
    return ShardPart(begins, digests, members)


def _require_stored(content: bytes) -> None:
    """Raise ValueError if an archive contains compressed files, which may be of any size."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
            raise ValueError("it contains compressed arrays")


class RemoteParts:
    """Parts in a folder of an object store.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: RemoteFolder):
        self._folder = folder

    def list(self) -> set[str]:
        """See `LocalParts`."""
        return set(self._folder.list())

    def has(self, name: str) -> bool:
        """See `LocalParts`."""
        return bool(self._folder.list(name))

    def read(self, name: str) -> bytes | None:
        """See `LocalParts`."""
        try:
            return fetch_bytes(f"{self._folder.url}/{name}", RemoteConfig(**dict(self._folder.options)), MAX_PART)
        except StorageError as error:
            if error.kind == "gone":
                return None
            raise

    def write(self, name: str, content: bytes) -> None:
        """See `LocalParts`."""
        self._folder.write(name, content)


PartFolder: TypeAlias = LocalParts | RemoteParts
"""A folder of parts."""
