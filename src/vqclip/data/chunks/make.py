"""Make the index of the chunks of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from vqclip.data.chunks.index_file import DIGEST, ChunkIndex, IndexContent, chunk_digest, write_index
from vqclip.data.chunks.location import local_tag, shard_names
from vqclip.data.chunks.scan import ShardPart, scan_shard
from vqclip.data.members import KINDS
from vqclip.data.shard import Shard
from vqclip.errors import DataError
from vqclip.io.files import open_regular

__all__ = ["CHUNK", "make_index"]

CHUNK = 128
"""Samples of a chunk by default."""
_BLOCK = 4 << 20


def make_index(shards: Sequence[Shard], path: Path, chunk: int = CHUNK) -> ChunkIndex:
    """Read all shards, write their index, and open it.

    Args:
        shards: plain tars.
        path: the file to write.
        chunk: samples of a chunk.

    Raises:
        DataError: a shard is damaged or cannot be indexed by chunks, or the index cannot be written.
    """
    content = join_parts(shard_names(shards), map(_read_part, shards), chunk)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_index(path, content)
    except OSError as error:
        raise DataError(f"{path}: the index cannot be written ({error.strerror})") from None


def join_parts(names: Sequence[str], parts: Iterable[ShardPart], chunk: int) -> IndexContent:
    """Return the content of an index.

    Args:
        names: of all shards.
        parts: of all shards, in order; only one at a time is in memory.
        chunk: samples of a chunk.
    """
    counts, starts, digests = [], [], []
    lengths, tags, members = [], [], np.zeros(len(KINDS), np.int64)
    total, open_samples = 0, b""
    for part in parts:
        size = len(part.begins)
        starts.append(part.begins[-total % chunk :: chunk])
        samples = open_samples + part.digests.tobytes()
        whole = (total % chunk + size) // chunk
        step = chunk * DIGEST
        digests += [chunk_digest(samples[at : at + step]) for at in range(0, whole * step, step)]
        open_samples = samples[whole * step :]
        total += size
        counts.append(size)
        lengths.append(part.length)
        tags.append(part.tag)
        members += part.members
    if open_samples:
        digests.append(chunk_digest(open_samples))
    return IndexContent(
        chunk=chunk,
        names=names,
        tags=tags,
        lengths=np.array(lengths, dtype=np.int64),
        firsts=np.cumsum([0, *counts], dtype=np.int64),
        starts=np.concatenate([np.zeros(0, np.int64), *starts]),
        digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST),
        members=members.tolist(),
    )


def _read_part(shard: Shard) -> ShardPart:
    if not isinstance(shard, Path):
        raise DataError(f"{shard}: only plain tars on this machine are indexed by chunks so far")
    try:
        with open_regular(shard) as file:
            status = os.fstat(file.fileno())
            part = scan_shard(shard, iter(lambda: file.read(_BLOCK), b""), status.st_size, local_tag(status))
            after = os.fstat(file.fileno())
    except OSError as error:
        raise DataError(f"{shard}: shard cannot be read: {error.strerror}") from None
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise DataError(f"{shard}: was written to while it was indexed; start again when it is complete")
    return part
