"""Make the index of a list of shards: a part for each shard, then one table.

    survey the shards: sizes and tags
    for each shard without a part, in a random order of this process:  read it once, write its part
    when all parts are there:  join them

A part is the index of one shard in chunks of one sample, in a folder that processes and machines may share. Its name is
a function of name, size and tag of the shard, so a shard that has changed has no part, and another list of shards uses
the same parts. Each process takes shards in an order of its own and skips those that have a part; two may read one
shard at the same time, mostly near the end, and write the same bytes. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data.lookup import map_ahead
from vqclip.data.remote.files import RemoteFolder, Shard
from vqclip.data.table_file import Texts
from vqclip.data.tars.headers import BLOCK
from vqclip.data.tars.index import IndexFacts, TarIndex, chunk_digest, find_valid_index, write_index
from vqclip.data.tars.members import DIGEST, KINDS, USUAL, MemberRules, SampleTable, ShardScan, scan_shard
from vqclip.data.tars.store import ShardFacts, read_shard, survey
from vqclip.errors import DataError, StorageError, count_noun, encodable

logger = logging.getLogger("vqclip.data")

CHUNK = 128
"""Samples of a chunk by default."""
_VERSION = 2
MOST_WITH_MEMBERS = 1 << 40
"""Bytes of the shards of which an index has the places of all members, about 3 GB for images of 20 kB."""
_THREADS = 16
"""Parts that are read at a time."""
_SHOWN, _COUNTED = 5, 40
_HINT = "Or leave out shards that are missing or damaged: bad_shards: leave_out"
_NONE = np.zeros((0, len(KINDS)), np.int64)
_NOTHING = ShardScan(
    np.zeros(0, np.int64), np.zeros((0, DIGEST), np.uint8), SampleTable(Texts.join([]), _NONE, _NONE), False, {}
)
"""Scan of a shard that is left out."""


class Parts:
    """Parts of an index.

    Args:
        folder: folder on this machine; made on first use.
        remote: folder of an object store where other machines find them; ``folder`` holds copies.
    """

    def __init__(self, folder: Path, remote: RemoteFolder | None = None):
        self._folder, self._remote = folder, remote

    def list(self) -> set[str]:
        """Return the names of all parts."""
        if self._remote is not None:
            return set(self._remote.list())
        return {path.name for path in self._folder.glob("*.part")}

    def read(self, name: str) -> TarIndex | None:
        """Return a part; None if it is missing or damaged."""
        path = self._folder / name
        if self._remote is not None and not path.exists() and self._remote.list(name):
            self._remote.download(name, path)
        return find_valid_index(path)

    def write(self, name: str, part: TarIndex) -> TarIndex:
        """Write a part, whole or not at all, and open it; raises StorageError if the disk cannot be written."""
        written = write_index(self._folder / name, part.facts, part.arrays)
        if self._remote is not None:
            self._remote.upload(name, self._folder / name)
        return written


class IndexMaker:
    """Makes the parts of an index, and joins them.

    Args:
        shards: the tars.
        parts: where the parts are.
        rules: how members are grouped.
        leave_out: leave out shards that are missing or damaged.
        named: the shards in messages, where some are copies; None: ``shards``.

    Raises:
        DataError: a shard is missing.
        StorageError: a server cannot be reached.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        parts: Parts,
        rules: MemberRules = USUAL,
        leave_out: bool = False,
        named: Sequence[Shard] | None = None,
    ):
        self.shards, self.rules, self.leave_out, self._named = shards, rules, leave_out, named or shards
        self._parts, self._stopped = parts, threading.Event()
        self.facts = survey(shards, leave_out)
        total = sum(each.length for each in self.facts)
        self.with_members = all(isinstance(each, Path) for each in shards) and total <= MOST_WITH_MEMBERS
        """Whether the index has the places of all members."""

    def find_current(self, path: Path, chunk: int) -> TarIndex | None:
        """Open an index; None if there is none, or it is damaged or of other shards or chunks."""
        index = find_valid_index(path)
        names, states = [each.name for each in self.facts], [(each.length, each.tag) for each in self.facts]
        fits = index is not None and index.chunk == chunk and index.has_shards(names, self.rules, states)
        return index if fits else None

    def missing(self) -> list[int]:
        """Return the numbers of the shards without a part."""
        there = self._parts.list()
        return [n for n, facts in enumerate(self.facts) if not facts.problem and self._part_name(n) not in there]

    def read_all(self, workers: int = 1, report: Callable[[int], object] = lambda size: None) -> None:
        """Make all missing parts.

        Args:
            workers: threads; each reads a shard.
            report: called in this thread after each shard, with its bytes.

        Raises:
            DataError: shards are damaged; all others have been read.
            StorageError: a server cannot be reached.
        """
        left, damaged = self.missing(), list[DataError]()
        random.SystemRandom().shuffle(left)

        def read(number: int) -> int:
            try:
                if not self._stopped.is_set():
                    self.part(number)
            except StorageError:
                self._stopped.set()
                raise
            except DataError as error:
                damaged.append(error)
            return self.facts[number].length

        with ThreadPoolExecutor(workers, "index") as pool:
            try:
                for each in as_completed([pool.submit(read, number) for number in left]):
                    report(each.result())
            finally:  # after an interrupt or an error the other threads stop within their shards
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                self._stopped.clear()
        if damaged:
            lines = "".join(f"\n  {error}" for error in damaged[:_SHOWN])
            raise DataError(f"{count_noun(len(damaged), 'shard')} cannot be indexed:{lines}")

    def write(self, path: Path, chunk: int = CHUNK) -> TarIndex:
        """Join the parts to an index, write it, and open it.

        Raises:
            DataError: it cannot be written, or a shard whose part is missing is damaged.
        """
        with ThreadPoolExecutor(_THREADS, "parts") as pool:
            facts, arrays = self._join(map_ahead(pool, self.part, range(len(self.facts)), 2 * _THREADS), chunk)
        return write_index(path, facts, arrays)

    def _join(self, parts: Iterable[TarIndex], chunk: int) -> tuple[IndexFacts, dict[str, np.ndarray]]:
        """Return facts and arrays of the index; see `vqclip.data.tars.index`."""
        firsts, starts, digests, rest = [0], [np.zeros(0, np.int64)], bytearray(), b""
        shard_digests, step = bytearray(), chunk * DIGEST
        keys, key_ends = bytearray(), [np.zeros(0, np.int64)]
        places = [_NONE.astype(np.uint32)], [_NONE.astype(np.uint32)]
        members, complete = np.zeros(len(KINDS), np.int64), np.zeros(len(KINDS), np.int64)
        counts = {name: Counter[str]() for name in ("endings", "ignored", "ambiguous")}
        damaged, scattered = dict[str, str](), ""
        for part in parts:
            starts.append(part.starts[-firsts[-1] % chunk :: chunk])
            firsts.append(firsts[-1] + part.samples)
            rest += part.digests.tobytes()
            end = len(rest) // step * step
            digests += b"".join(chunk_digest(rest[at : at + step]) for at in range(0, end, step))
            rest = rest[end:]
            shard_digests += part.shard_digests.tobytes()
            members += part.facts.members
            complete += part.facts.complete
            for name, counter in counts.items():
                counter.update(getattr(part.facts, name))
            scattered = scattered or part.facts.scattered
            damaged |= part.facts.damaged
            if part.keys is not None:
                key_ends.append(part.keys.ends + len(keys))
                keys += part.keys.content.tobytes()
                for column, name in zip(places, ("offsets", "sizes"), strict=True):
                    column.append(part.arrays[name])
        arrays = _name_arrays(self.facts) | {
            "firsts": np.array(firsts, np.int64),
            "starts": np.concatenate(starts),
            "digests": np.frombuffer(digests + (chunk_digest(rest) if rest else b""), np.uint8).reshape(-1, DIGEST),
            "shard_digests": np.frombuffer(shard_digests, np.uint8).reshape(-1, 32),
        }
        if self.with_members:
            arrays |= {"keys": np.frombuffer(keys, np.uint8), "key_ends": np.concatenate(key_ends)}
            arrays |= {"offsets": np.concatenate(places[0]), "sizes": np.concatenate(places[1])}
        counted: dict[str, Any] = {name: dict(each.most_common(_COUNTED)) for name, each in counts.items()}
        facts = IndexFacts(
            chunk=chunk,
            members=tuple(members.tolist()),
            complete=tuple(complete.tolist()),
            content=hashlib.sha256(shard_digests.hex().encode()).hexdigest(),
            rules=self.rules.to_json(),
            scattered=scattered,
            damaged=damaged,
            **counted,
        )
        return facts, arrays

    def _part_name(self, number: int) -> str:
        facts = self.facts[number]
        rules = json.dumps([self.rules.to_json(), self.with_members])
        text = "\n".join([str(_VERSION), facts.name, str(facts.length), facts.tag, rules])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".part"

    def part(self, number: int) -> TarIndex:
        """Return the part of a shard; it is made if it is missing, and again where it is damaged.

        Raises:
            DataError: the shard is damaged, and not left out.
            StorageError: it cannot be fetched, or the part cannot be written.
        """
        facts = self.facts[number]
        if facts.problem:
            return self._describe(facts, _NOTHING, facts.problem)
        part = self._parts.read(self._part_name(number))
        fits = part is not None and part.chunk == 1 and (part.keys is not None) == self.with_members
        if part is None or not (fits and part.has_shards([facts.name], self.rules, [(facts.length, facts.tag)])):
            return self._make_part(number)
        if part.facts.damaged and not self.leave_out:
            raise DataError(f"{next(iter(part.facts.damaged.values()))}. {_HINT}")
        return part

    def _make_part(self, number: int) -> TarIndex:
        shard, facts, problem = self._named[number], self.facts[number], ""

        def until_stopped(blocks: Iterable[bytes]) -> Iterator[bytes]:
            for block in blocks:
                if self._stopped.is_set():
                    raise StorageError(f"{shard}: not read to its end, as another shard cannot be read")
                yield block

        try:
            scan = read_shard(
                self.shards[number],
                facts,
                lambda blocks: scan_shard(shard, until_stopped(blocks), facts.length, self.rules),
            )
        except StorageError:
            raise
        except DataError as error:
            scan, problem = _NOTHING, str(error)
            if not self.leave_out:
                raise DataError(f"{problem}. {_HINT}") from None
        part = self._parts.write(self._part_name(number), self._describe(facts, scan, problem))
        logger.info("indexed %s: %d samples", shard, len(scan.begins))
        return part

    def _describe(self, shard: ShardFacts, scan: ShardScan, problem: str = "") -> TarIndex:
        """Return the index of one shard in chunks of one sample, in memory."""
        there, digest = scan.table.offsets >= 0, hashlib.sha256(scan.digests.tobytes()).digest()
        facts = IndexFacts(
            chunk=1,
            members=tuple(there.sum(axis=0).tolist()),
            complete=tuple((there & there[:, :1]).sum(axis=0).tolist()),
            content=hashlib.sha256(digest.hex().encode()).hexdigest(),
            rules=self.rules.to_json(),
            scattered=encodable(shard.name) if scan.is_scattered else "",
            damaged={encodable(shard.name): encodable(problem)} if problem else {},
            **scan.counts,
        )
        arrays = _name_arrays([shard]) | {
            "firsts": np.array([0, len(scan.begins)], np.int64),
            "starts": scan.begins,
            "digests": scan.digests,
            "shard_digests": np.frombuffer(digest, np.uint8).reshape(1, 32),
        }
        if self.with_members:
            offsets = np.where(there, scan.table.offsets // BLOCK, scan.table.offsets + 2**32)
            arrays["keys"], arrays["key_ends"] = scan.table.keys
            arrays["offsets"] = offsets.astype(np.uint32)
            arrays["sizes"] = np.minimum(scan.table.sizes, 2**32 - 1).astype(np.uint32)
        return TarIndex(Path(shard.name), facts, arrays)


def _name_arrays(shards: Sequence[ShardFacts]) -> dict[str, np.ndarray]:
    """Return the arrays of an index with names, sizes and tags of shards."""
    arrays = {"lengths": np.array([each.length for each in shards], np.int64)}
    arrays["names"], arrays["name_ends"] = Texts.join(each.name for each in shards)
    arrays["tags"], arrays["tag_ends"] = Texts.join(each.tag for each in shards)
    return arrays
