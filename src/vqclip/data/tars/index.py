"""The index of a list of shards: one table, mapped into memory and shared by all processes of a machine.

A chunk is a number of consecutive samples of the concatenated shards, so it may cross the ends of shards. The bytes of
the chunks partition all shards that have samples. See `vqclip.data.tars.members` for where a sample begins.

    lengths        int64 (shards,)        bytes of each shard
    firsts         int64 (shards + 1,)    first sample of each shard
    starts         int64 (chunks,)        byte where each chunk begins, in the shard of its first sample
    digests        uint8 (chunks, 16)     see `chunk_digest`
    shard_digests  uint8 (shards, 32)     SHA-256 of the digests of the samples of each shard
    names, tags    Texts (shards)         paths below the common folder; ETags, or modification times in ns

Of tars on this machine, up to a number of bytes, the place of every member too, so that one `pread` reads it:

    offsets        uint32 (samples, 4)    first byte of each of `KINDS`, in blocks of 512 bytes
    sizes          uint32 (samples, 4)    bytes of each of `KINDS`
    keys           Texts (samples)        names of the samples

1.3e9 samples in chunks of 128 take 250 MB without the members, and about 50 bytes a sample with them.

A part of an index, of which `vqclip.data.tars.make` joins it, is the index of one shard in chunks of one sample, with
the digests of the samples themselves.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from vqclip.data.remote.files import Shard
from vqclip.data.table_file import Table, Texts, open_table, save_table
from vqclip.data.tars.headers import BLOCK
from vqclip.data.tars.members import DIGEST, KINDS, USUAL, MemberRules, SampleTable, scan_shard
from vqclip.errors import CheckpointError, DataError, StorageError, encodable
from vqclip.io.json_files import Strict, validate

logger = logging.getLogger("vqclip.data")

INDEX_VERSION = 2
"""Version of the format, also in the names of indexes."""
_FORMAT: dict[str, object] = {"format": "vqclip index of tars", "format_version": INDEX_VERSION}
_REMEDY = "make the index again: vqclip data index SOURCE"
_MISSING = 2**32 + np.array([-1, -2], np.int64)
"""`NONE` and `AMBIGUOUS` as offsets in an index."""
Count = Annotated[int, Field(ge=0, le=2**50)]
Counts = Annotated[tuple[Count, ...], Field(min_length=len(KINDS), max_length=len(KINDS), strict=False)]


class ByteRange(NamedTuple):
    """Bytes of one shard."""

    shard: int
    """Number of the shard."""
    first: int
    """First byte."""
    end: int
    """Byte after the last one."""


class IndexFacts(Strict):
    """Facts of an index about its shards as a whole."""

    chunk: Annotated[int, Field(ge=1, le=1 << 20)]
    """Samples of a chunk."""
    members: Counts
    """Samples with each of `KINDS`."""
    complete: Counts
    """Samples with an image and each of `KINDS`."""
    content: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the hexadecimal digits of `shard_digests`: equal if the same samples are stored in the same bytes,
    whatever the names of the shards."""
    rules: dict[str, Any]
    """`MemberRules.to_json`."""
    largest: Count = 0
    """Bytes of the largest chunk."""
    scattered: str = ""
    """Name of a shard that cannot be read in chunks, since members of a sample are apart; "" without one."""
    endings: dict[str, int] = {}
    ignored: dict[str, int] = {}
    ambiguous: dict[str, int] = {}
    """See `vqclip.data.tars.members.ShardScan`."""
    damaged: dict[str, str] = {}
    """Name of each shard that is left out since it is damaged or missing, and the reason."""


class TarIndex:
    """An open index; see the module's docstring. Its arrays are read-only and mapped from the file.

    Use `open_index`. It can be pickled: the copy opens the same file.
    """

    def __init__(self, path: Path, facts: IndexFacts, arrays: Mapping[str, np.ndarray]):
        self.path, self.facts, self.arrays = path, facts, arrays
        self.chunk = facts.chunk
        self.lengths, self.firsts = arrays["lengths"], arrays["firsts"]
        self.starts, self.digests, self.shard_digests = arrays["starts"], arrays["digests"], arrays["shard_digests"]
        self.names, self.tags = _texts(arrays, "names"), _texts(arrays, "tags")
        self.keys = _texts(arrays, "keys") if "keys" in arrays else None
        """Names of the samples; None if the index has no members."""
        self._offsets, self._sizes = arrays.get("offsets"), arrays.get("sizes")

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.firsts[-1])

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.lengths)

    def stamp(self, number: int) -> tuple[int, int]:
        """Return size and modification time of a shard on this machine when it was indexed."""
        return int(self.lengths[number]), int(self.tags.read(number))

    def has_shards(
        self, names: Sequence[str], rules: MemberRules, states: Iterable[tuple[int, str] | None] = ()
    ) -> bool:
        """Return whether these are the shards, in order, and the rules by which they were indexed.

        Args:
            names: of the shards.
            rules: how members are grouped.
            states: size and tag of each shard now; None: unknown.
        """
        same = self.facts.rules == rules.to_json() and all(map(np.array_equal, self.names, Texts.join(names)))
        return same and all(
            state in (None, (int(self.lengths[number]), self.tags.read(number))) for number, state in enumerate(states)
        )

    def shard_of(self, sample: int) -> int:
        """Return the shard of a sample."""
        return int(self.firsts.searchsorted(sample, side="right")) - 1

    def member(self, sample: int, column: int) -> tuple[int, int]:
        """Return offset and size of a member, of an index that has them; see `SampleTable`."""
        assert self._offsets is not None
        assert self._sizes is not None
        block = int(self._offsets[sample, column])
        return (block * BLOCK, int(self._sizes[sample, column])) if block < _MISSING[1] else (block - 2**32, 0)

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
        shard, last = self.shard_of(samples[0]), self.shard_of(samples[-1])
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
        return _open_same_index, (self.path, self.facts.content)


def chunk_digest(samples: bytes) -> bytes:
    """Return the digest of a chunk: that of the digests of its samples, so that no shard needs those before it.

    Args:
        samples: the first 16 bytes of the SHA-256 of each sample's bytes, concatenated.

    Returns:
        The first 16 bytes of their SHA-256.
    """
    return hashlib.sha256(samples).digest()[:DIGEST]


def scan_chunk(
    index: TarIndex, chunk: int, data: bytes, shards: Sequence[Shard], rules: MemberRules = USUAL
) -> SampleTable:
    """Return the samples in the bytes of a chunk, after comparing the bytes with the index.

    Args:
        index: the index.
        chunk: number of the chunk.
        data: the bytes of ``index.ranges(chunk)``, joined.
        shards: the shards, for messages.
        rules: the rules by which the index groups members.

    Returns:
        Offsets count from the beginning of ``data``.

    Raises:
        StorageError: they are not the bytes that were indexed; its `kind` is "changed shard".
    """
    keys, offsets, sizes, digests, at = [], [], [], b"", 0
    ranges = index.ranges(chunk)
    try:
        for number, first, end in ranges:
            block = data[at : at + end - first]
            scan = scan_shard(shards[number], [block], int(index.lengths[number]), rules, first, end)
            table = scan.table
            keys += [table.keys.read(row) for row in range(len(table))]
            offsets.append(np.where(table.offsets >= 0, table.offsets + at - first, table.offsets))
            sizes.append(table.sizes)
            digests += scan.digests.tobytes()
            at += end - first
        fits = at == len(data) and chunk_digest(digests) == index.digests[chunk].tobytes()
        reason = "another digest"
    except DataError as error:
        fits, reason = False, str(error)
    if not fits or len(keys) != len(index.samples_of(chunk)):
        places = ", ".join(f"bytes {first} to {end} of {shards[number]}" for number, first, end in ranges)
        raise StorageError(
            f"{places}: changed since they were indexed, or damaged ({reason}). Restore the file, or {_REMEDY}",
            "changed shard",
        )
    return SampleTable(Texts.join(keys), np.concatenate(offsets), np.concatenate(sizes))


def write_index(path: Path, facts: IndexFacts, arrays: Mapping[str, np.ndarray]) -> TarIndex:
    """Write an index atomically, and open it.

    Args:
        path: the file.
        facts: its facts; ``largest`` is computed.
        arrays: see the module's docstring; a column of texts is two arrays, ``names`` and ``name_ends``.

    Raises:
        StorageError: it cannot be written.
    """
    facts = facts.model_copy(update={"largest": max(0, _largest_chunk(TarIndex(path, facts, arrays)))})
    save_table(path, {**_FORMAT, **facts.model_dump(mode="json")}, arrays, encodable(str(path)))
    return open_index(path, verify=False)


def open_index(path: Path, verify: bool = True) -> TarIndex:
    """Open an index.

    Args:
        path: the file.
        verify: compare the checksums and check all numbers, which reads the file once; one process of a machine should.

    Raises:
        DataError: it is missing, damaged, of another version, or points outside of the shards.
    """
    try:
        table = open_table(path, _FORMAT, verify)
        facts = validate(path, IndexFacts, {key: each for key, each in table.facts.items() if key not in _FORMAT})
        _require_arrays(path, table, facts)
        index = TarIndex(path, facts, table.arrays)
        if verify:
            _require_consistent(index)
    except (DataError, CheckpointError) as error:
        raise DataError(f"{error}; {_REMEDY}") from None
    return index


def find_valid_index(path: Path, verify: bool = True) -> TarIndex | None:
    """Open an index; None if it is missing, or damaged, which is logged; see `open_index`."""
    try:
        return open_index(path, verify) if path.exists() else None
    except DataError as error:
        logger.warning("%s", error)
        return None


def _open_same_index(path: Path, content: str) -> TarIndex:
    index = open_index(path, verify=False)
    if index.facts.content != content:
        raise DataError(f"{path}: the index was replaced by one of other data while it was in use; start again")
    return index


def _texts(arrays: Mapping[str, np.ndarray], name: str) -> Texts:
    return Texts(arrays[name], arrays[f"{name[:-1]}_ends"])


def _require_arrays(path: Path, table: Table, facts: IndexFacts) -> None:
    """Check names, types and shapes of the arrays of an untrusted index."""
    got = {name: (str(array.dtype), array.shape) for name, array in table.arrays.items()}
    shards, firsts = table.arrays.get("lengths"), table.arrays.get("firsts")
    rows = len(shards) if shards is not None and shards.ndim else 0
    samples = int(firsts[-1]) if firsts is not None and firsts.shape == (rows + 1,) and firsts.dtype == np.int64 else -1
    chunks = -(-samples // facts.chunk)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "lengths": ("int64", (rows,)),
        "firsts": ("int64", (rows + 1,)),
        "starts": ("int64", (chunks,)),
        "digests": ("uint8", (chunks, DIGEST)),
        "shard_digests": ("uint8", (rows, 32)),
        "name_ends": ("int64", (rows,)),
        "tag_ends": ("int64", (rows,)),
    }
    if "offsets" in got:
        expected |= {name: ("uint32", (samples, len(KINDS))) for name in ("offsets", "sizes")}
        expected["key_ends"] = ("int64", (samples,))
    expected |= {name: ("uint8", got[name][1]) for name in ("names", "tags", "keys") if name in got}
    if got != expected or samples < 0 or not {"names", "tags"} <= got.keys() or ("offsets" in got) != ("keys" in got):
        raise DataError(f"{path}: contains other arrays than an index")


def _require_consistent(index: TarIndex) -> None:
    """Check the numbers of an untrusted index.

    Raises:
        DataError: chunks outside of shards, or not in ascending order; counts that do not fit. Members outside are
            noticed when they are read.
    """
    problem = None
    if index.firsts[0] != 0 or (np.diff(index.firsts) < 0).any():
        problem = "counts of samples"
    elif ((index.lengths < 0) | (index.lengths > 2**50)).any():
        problem = "sizes of shards"
    elif not all(texts.are_consistent for texts in (index.names, index.tags, index.keys) if texts is not None):
        problem = "names"
    else:
        problem = None if _largest_chunk(index) == index.facts.largest else "byte ranges"
    if problem:
        raise DataError(f"{index.path}: has {problem} that contradict each other")


def _largest_chunk(index: TarIndex) -> int:
    """Return the bytes of the largest chunk; -1 if a chunk begins outside of its shard, or not before the next one."""
    firsts, starts = index.firsts, index.starts
    lengths = np.where(np.diff(firsts) > 0, index.lengths, 0)  # an empty shard is never read
    shard = np.repeat(np.arange(len(lengths)), np.diff(-(-firsts // index.chunk)))  # of the first sample of each chunk
    is_first = np.arange(len(starts)) * index.chunk == firsts[shard]
    fits = (starts >= 0) & (starts < lengths[shard]) & (starts % BLOCK == 0) & ((starts == 0) == is_first)
    # Positions in the concatenated shards.
    sizes = np.diff((np.cumsum(lengths) - lengths)[shard] + starts, append=lengths.sum())
    return int(sizes.max(initial=0)) if fits.all() and (sizes > 0).all() else -1
