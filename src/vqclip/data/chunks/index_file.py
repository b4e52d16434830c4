"""The index of the chunks of a data set: one file, mapped into memory and shared by all processes of a machine.

A chunk is a number of consecutive samples of the concatenated shards, so it may cross the ends of shards. The bytes of
a sample begin where its first member does (its extended header, if it has one) and end where the next sample begins;
the first sample of a shard begins at byte 0, the last one ends at the end of the shard. So the bytes of the chunks
partition all shards that have samples.

    4,096 bytes  JSON: counts, checksums of the arrays and of itself; padded with zeros
    lengths      int64 (shards,)        bytes of each shard
    firsts       int64 (shards + 1,)    first sample of each shard
    starts       int64 (chunks,)        byte where each chunk begins, in the shard of its first sample
    name_ends    int64 (shards,)        ends of the names in `names`
    tag_ends     int64 (shards,)        ends of the tags in `tags`
    digests      uint8 (chunks, 16)     see `chunk_digest`
    names, tags  UTF-8

Numbers are little-endian. 1.3e9 samples in chunks of 128 take 245 MB.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field

from vqclip.data.members import KINDS
from vqclip.errors import CheckpointError, DataError, printable
from vqclip.io.atomic import write_file
from vqclip.io.files import open_regular
from vqclip.io.json_files import Strict, add_checksum, validate, verify_checksum

__all__ = ["DIGEST", "ByteRange", "ChunkIndex", "IndexContent", "chunk_digest", "open_index", "write_index"]

DIGEST = 16
"""Bytes of the digest of a sample or chunk."""
_HEADER = 4096
_FORMAT: dict[str, object] = {"format": "vqclip chunk index", "format_version": 1}
_REMEDY = "make it again: vqclip data index SOURCE"
_BLOCK = 1 << 20
_SHARDS_AT_ONCE = 4096
_TAR_BLOCK = 512
Count = Annotated[int, Field(ge=0, le=2**50)]


class ByteRange(NamedTuple):
    """Bytes of one shard."""

    shard: int
    """Number of the shard."""
    first: int
    """First byte."""
    end: int
    """Byte after the last one."""


class IndexContent(NamedTuple):
    """Arrays of an index; see the module's docstring."""

    chunk: int
    """Samples of a chunk."""
    names: Sequence[str]
    tags: Sequence[str]
    lengths: np.ndarray
    firsts: np.ndarray
    starts: np.ndarray
    digests: np.ndarray
    members: Sequence[int]


class _Facts(Strict):
    """The header of an index."""

    chunk: Annotated[int, Field(ge=1, le=1 << 20)]
    samples: Count
    shards: Annotated[int, Field(ge=0, le=10_000_000)]
    members: Annotated[tuple[Count, ...], Field(min_length=len(KINDS), max_length=len(KINDS), strict=False)]
    largest: Count
    content: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    name_bytes: Annotated[int, Field(ge=0, le=1 << 34)]
    tag_bytes: Annotated[int, Field(ge=0, le=1 << 34)]
    rest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the arrays that `content` does not cover."""

    @property
    def chunks(self) -> int:
        return -(-self.samples // self.chunk)

    def sections(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, dtype and shape of each array of the file, in order."""
        for name, rows in (
            ("lengths", self.shards),
            ("firsts", self.shards + 1),
            ("starts", self.chunks),
            ("name_ends", self.shards),
            ("tag_ends", self.shards),
        ):
            yield name, "<i8", (rows,)
        yield "digests", "|u1", (self.chunks, DIGEST)
        yield "names", "|u1", (self.name_bytes,)
        yield "tags", "|u1", (self.tag_bytes,)


class ChunkIndex:
    """An open index; see the module's docstring. Its arrays are read-only and mapped from the file.

    Use `open_index`. It can be pickled: the copy opens the same file.
    """

    lengths: np.ndarray
    """``(shards,)`` int64: bytes of each shard."""
    firsts: np.ndarray
    """``(shards + 1,)`` int64: first sample of each shard, and the number of samples."""
    starts: np.ndarray
    """``(chunks,)`` int64: byte where each chunk begins, in the shard of its first sample."""
    digests: np.ndarray
    """``(chunks, 16)`` uint8: `chunk_digest` of each chunk."""

    def __init__(self, path: Path, facts: _Facts):
        self.path = path
        self.chunk, self.samples = facts.chunk, facts.samples
        self.content = facts.content
        """SHA-256 of chunk, counts and digests: equal if the same samples are stored in the same bytes. Names, folders
        and tags do not matter."""
        self.largest = facts.largest
        """Bytes of the largest chunk."""
        self.members = np.array(facts.members, dtype=np.int64)
        """``(4,)`` int64: samples with each of `vqclip.data.members.KINDS`."""
        self._facts = facts
        body = np.memmap(path, np.uint8, "r", offset=_HEADER) if facts.shards else np.zeros(8, np.uint8)
        at = 0
        for name, kind, shape in facts.sections():
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            setattr(self, name, np.asarray(body[at : at + size]).view(kind).reshape(shape))
            at += size

    _names: np.ndarray
    name_ends: np.ndarray
    tag_ends: np.ndarray
    names: np.ndarray
    tags: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.lengths)

    def shard_name(self, number: int) -> str:
        """Return the path of a shard, without the folders that all shards have in common and without credentials."""
        return _text(self.names, self.name_ends, number)

    def tag(self, number: int) -> str:
        """Return the ETag of a shard; of a local file its modification time in ns."""
        return _text(self.tags, self.tag_ends, number)

    def has_names(self, names: Sequence[str]) -> bool:
        """Return whether these are the names of the shards, in order."""
        expected, ends = _join(names)
        return np.array_equal(self.names, expected) and np.array_equal(self.name_ends, ends)

    def has_tags(self, tags: Sequence[str]) -> bool:
        """Return whether these are the tags of the shards, in order."""
        expected, ends = _join(tags)
        return np.array_equal(self.tags, expected) and np.array_equal(self.tag_ends, ends)

    def samples_of(self, chunk: int) -> range:
        """Return the numbers of the samples of a chunk."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, self.samples))

    def ranges(self, chunk: int) -> tuple[ByteRange, ...]:
        """Return the bytes of a chunk: one range for each shard with samples of it, in order.

        Raises:
            IndexError: there is no such chunk.
        """
        if not 0 <= chunk < len(self):
            raise IndexError(chunk)
        samples = self.samples_of(chunk)
        shard, last = (int(np.searchsorted(self.firsts, n, side="right")) - 1 for n in (samples[0], samples[-1]))
        found, start = [], int(self.starts[chunk])
        for number in range(shard, last + 1):
            end = int(self.lengths[number])
            if number == last and samples.stop < int(self.firsts[last + 1]):
                end = int(self.starts[chunk + 1])
            if self.firsts[number] < self.firsts[number + 1]:  # an empty shard is never read
                found.append(ByteRange(number, start, end))
            start = 0
        return tuple(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_same_index, (self.path, self.content)


def chunk_digest(samples: bytes) -> bytes:
    """Return the digest of a chunk: that of the digests of its samples, so that no shard needs those before it.

    Args:
        samples: the first 16 bytes of the SHA-256 of each sample's bytes, concatenated.

    Returns:
        The first 16 bytes of their SHA-256.
    """
    return hashlib.sha256(samples).digest()[:DIGEST]


def write_index(path: Path, content: IndexContent) -> ChunkIndex:
    """Write an index atomically, and open it.

    Raises:
        OSError: it cannot be written.
    """
    names, name_ends = _join(content.names)
    tags, tag_ends = _join(content.tags)
    arrays = {
        "lengths": content.lengths.astype("<i8"),
        "firsts": content.firsts.astype("<i8"),
        "starts": content.starts.astype("<i8"),
        "name_ends": name_ends,
        "tag_ends": tag_ends,
        "digests": np.ascontiguousarray(content.digests, np.uint8),
        "names": names,
        "tags": tags,
    }
    content_sha, rest = _digests(
        content.chunk, ((name, array.data.cast("B")) for name, array in arrays.items() if array.size)
    )
    facts = _Facts(
        chunk=content.chunk,
        samples=int(content.firsts[-1]),
        shards=len(content.lengths),
        members=tuple(map(int, content.members)),
        largest=max(0, _largest_chunk(content)),
        content=content_sha,
        name_bytes=len(names),
        tag_bytes=len(tags),
        rest=rest,
    )
    assert all(arrays[name].shape == shape for name, _, shape in facts.sections())
    header = add_checksum({**_FORMAT, **facts.model_dump(mode="json")}).ljust(_HEADER, b"\0")

    def fill(file: BinaryIO) -> None:
        file.write(header)
        for array in arrays.values():
            file.write(array.data.cast("B") if array.size else b"")

    write_file(path, fill)
    return open_index(path, verify=False)


def open_index(path: Path, verify: bool = True) -> ChunkIndex:
    """Open an index.

    Args:
        path: the file.
        verify: compare the checksums and check all numbers, which reads the file once; one process of a machine should.
            Without it only the header and the size are checked.

    Raises:
        DataError: it is missing, damaged, of another version, or points outside of the shards.
    """
    try:
        with open_regular(path) as file:
            facts = _read_header(path, file.read(_HEADER))
            expected = _HEADER + sum(
                int(np.prod(shape)) * np.dtype(kind).itemsize for _, kind, shape in facts.sections()
            )
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise DataError(f"{path}: {size} bytes, its header says {expected}: the index is cut short; {_REMEDY}")
            if verify:
                _verify_body(path, file, facts)
        index = ChunkIndex(path, facts)
    except OSError as error:
        raise DataError(f"{path}: the index cannot be read ({error.strerror}); {_REMEDY}") from None
    if verify:
        _require_consistent(index)
    return index


def _open_same_index(path: Path, content: str) -> ChunkIndex:
    index = open_index(path, verify=False)
    if index.content != content:
        raise DataError(f"{path}: the index was replaced by one of other data while it was in use; start again")
    return index


def _read_header(path: Path, data: bytes) -> _Facts:
    text = data.rstrip(b"\0")
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError(f"contains a {type(body).__name__}")
    except (ValueError, RecursionError):
        raise DataError(f"{path}: is not an index of chunks, or its header is damaged; {_REMEDY}") from None
    for key, value in _FORMAT.items():
        if body.get(key) != value:
            raise DataError(
                f"{path}: {key} is {printable(repr(body.get(key)))}, this vqclip reads {value!r}; {_REMEDY}"
            )
    try:
        body = verify_checksum(path, body, text)
        return validate(path, _Facts, {key: value for key, value in body.items() if key not in _FORMAT})
    except CheckpointError as error:
        raise DataError(f"{error}; {_REMEDY}") from None


def _verify_body(path: Path, file: BinaryIO, facts: _Facts) -> None:
    def blocks() -> Iterator[tuple[str, bytes]]:
        for name, kind, shape in facts.sections():
            left = int(np.prod(shape)) * np.dtype(kind).itemsize
            while left and (block := file.read(min(left, _BLOCK))):
                left -= len(block)
                yield name, block

    if _digests(facts.chunk, blocks()) != (facts.content, facts.rest):
        raise DataError(f"{path}: does not match its own checksums: the index is damaged; {_REMEDY}")


def _digests(chunk: int, blocks: Iterable[tuple[str, bytes | memoryview]]) -> tuple[str, str]:
    """Return the SHA-256 of chunk, counts and digests, and that of the other arrays, from pairs of name and bytes."""
    content, rest = hashlib.sha256(b"vqclip chunks of %d\n" % chunk), hashlib.sha256()
    for name, block in blocks:
        (content if name in ("firsts", "digests") else rest).update(block)
    return content.hexdigest(), rest.hexdigest()


def _require_consistent(index: ChunkIndex) -> None:
    """Check the numbers of an untrusted index, some thousand shards at a time.

    Raises:
        DataError: chunks outside of shards, or not in ascending order; counts that do not fit.
    """
    facts = index._facts
    problem = None
    if index.firsts[0] != 0 or index.firsts[-1] != index.samples or (np.diff(index.firsts) < 0).any():
        problem = "counts of samples"
    elif ((index.lengths < 0) | (index.lengths > 2**50)).any():
        problem = "sizes of shards"
    elif (index.members > index.samples).any():
        problem = "counts of members"
    elif not (_are_ends(index.name_ends, facts.name_bytes) and _are_ends(index.tag_ends, facts.tag_bytes)):
        problem = "names"
    else:
        problem = None if _largest_chunk(index) == index.largest else "byte ranges"
    if problem:
        raise DataError(f"{index.path}: has {problem} that contradict each other; {_REMEDY}")


def _are_ends(ends: np.ndarray, total: int) -> bool:
    return bool(not len(ends) and not total) or bool(
        len(ends) and ends[0] >= 0 and (np.diff(ends) >= 0).all() and ends[-1] == total
    )


def _largest_chunk(index: ChunkIndex | IndexContent) -> int:
    """Return the bytes of the largest chunk; -1 if a chunk begins outside of its shard, or not before the next one."""
    largest, base, previous = 0, 0, -1
    for first in range(0, len(index.lengths), _SHARDS_AT_ONCE):
        firsts = index.firsts[first : first + _SHARDS_AT_ONCE + 1]
        lengths = index.lengths[first : first + _SHARDS_AT_ONCE]
        shard, numbers = _shards_of_chunks(firsts, index.chunk)
        starts, offsets = index.starts[numbers], _offsets(lengths, firsts)
        is_first = np.arange(numbers.start, numbers.stop) * index.chunk == firsts[shard]
        fits = (starts >= 0) & (starts < lengths[shard]) & (starts % _TAR_BLOCK == 0) & ((starts == 0) == is_first)
        sizes = np.diff(base + offsets[shard] + starts, prepend=[] if previous < 0 else previous)
        if not fits.all() or (sizes <= 0).any():
            return -1
        if len(starts):
            largest, previous = max(largest, int(sizes.max(initial=0))), base + int(offsets[shard[-1]] + starts[-1])
        base += int(offsets[-1])
    return max(largest, base - max(previous, 0))


def _offsets(lengths: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Return the position of each shard, and the end, in the concatenated shards that have samples."""
    return np.cumsum(np.concatenate(([0], np.where(np.diff(firsts) > 0, lengths, 0))), dtype=np.int64)


def _shards_of_chunks(firsts: np.ndarray, chunk: int) -> tuple[np.ndarray, slice]:
    """Return the chunks that begin in some shards, and for each the shard of its first sample, from 0."""
    numbers = -(-firsts // chunk)
    return np.repeat(np.arange(len(firsts) - 1), np.diff(numbers)), slice(int(numbers[0]), int(numbers[-1]))


def _join(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    parts = [text.encode("utf-8", "surrogateescape") for text in texts]
    ends = np.array(list(itertools.accumulate(map(len, parts))), dtype="<i8")
    return np.frombuffer(b"".join(parts), np.uint8), ends


def _text(data: np.ndarray, ends: np.ndarray, number: int) -> str:
    if not 0 <= number < len(ends):
        raise IndexError(number)
    start = int(ends[number - 1]) if number else 0
    return printable(data[start : int(ends[number])].tobytes().decode("utf-8", "surrogateescape"), one_line=True)
