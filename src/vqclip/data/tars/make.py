"""Make the index of a list of shards: a part for each shard, then one table.

    survey the shards: sizes and tags
    for each shard without a part, in a random order of this process:  read it once, write its part
    when all parts are there:  join them

A part is a table in a folder that processes and machines may share. Its name is a function of name, size and tag of the
shard, so a shard that has changed has no part, and another list of shards uses the same parts. Each process takes
shards in an order of its own and skips those that have a part; two may read one shard at the same time, mostly near the
end, and write the same bytes. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vqclip.data.remote import GzipShard, RemoteShard, is_gzip
from vqclip.data.remote.folder import RemoteFolder
from vqclip.data.remote.retry import Deadline, FetchError, retry
from vqclip.data.remote.transfer import list_facts, open_url, url_facts
from vqclip.data.remote.urls import path_in_url, protocol_of
from vqclip.data.shard import Shard
from vqclip.data.table_file import Table, Texts, find_table, save_table
from vqclip.data.tars.index import BLOCK, IndexFacts, TarIndex, chunk_digest, content_digest, open_index, write_index
from vqclip.data.tars.locate import MISSING, local_state, shard_names
from vqclip.data.tars.members import DIGEST, KINDS, USUAL, MemberRules, ShardScan, scan_shard
from vqclip.data.tars.store import is_whole
from vqclip.errors import DataError, StorageError, encodable
from vqclip.io.files import open_regular

__all__ = ["CHUNK", "IndexMaker", "Parts", "ShardFacts", "make_index", "survey"]

logger = logging.getLogger("vqclip.data")
T = TypeVar("T")

CHUNK = 128
"""Samples of a chunk by default."""
_VERSION = 1
MOST_WITH_MEMBERS = 1 << 40
"""Bytes of the shards of which an index has the places of all members, about 3 GB for images of 20 kB."""
_READ = 4 << 20
_WEB = ("http", "https")
_THREADS = 16
"""Requests for sizes, or parts that are read, at a time."""
_SHOWN, _COUNTED = 5, 40
_POLL_S = 0.2


@dataclass(frozen=True)
class ShardFacts:
    """Name, size and tag of a shard; see `TarIndex`."""

    name: str
    length: int
    tag: str
    problem: str = ""
    """Reason for which it is left out; "" without one."""


def make_index(
    shards: Sequence[Shard], path: Path, chunk: int = CHUNK, parts: Parts | None = None, **options: Any
) -> TarIndex:
    """Read all shards that have no part yet, write their index, and open it.

    Args:
        shards: the tars.
        path: the file to write.
        chunk: samples of a chunk.
        parts: the parts; default in a folder beside ``path``.
        **options: see `IndexMaker`.

    Raises:
        DataError: a shard is damaged, or the index cannot be written.
    """
    maker = IndexMaker(shards, parts or Parts(path.with_name(f"{path.name}.parts")), **options)
    maker.read_all()
    return maker.write(path, chunk)


class Parts:
    """Parts of an index.

    Args:
        folder: folder on this machine; made on first use.
        remote: folder of an object store where other machines find them; ``folder`` holds copies.
    """

    def __init__(self, folder: Path, remote: RemoteFolder | None = None):
        self._folder, self._remote = folder, remote

    def __str__(self) -> str:
        return str(self._remote or self._folder)

    def list(self) -> set[str]:
        """Return the names of all parts."""
        if self._remote is not None:
            return set(self._remote.list())
        return {path.name for path in self._folder.glob("*.part")}

    def has(self, name: str) -> bool:
        """Return whether there is a part with this name."""
        return (self._folder / name).exists() or (self._remote is not None and bool(self._remote.list(name)))

    def read(self, name: str) -> Table | None:
        """Return a part; None if it is missing or damaged."""
        if self._remote is not None and not (self._folder / name).exists() and self._remote.list(name):
            self._remote.download(name, self._folder / name)
        return find_table(self._folder / name, {"format": "vqclip part"}, f"{self}/{name}", lambda table: table)

    def write(self, name: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write a part, whole or not at all; raises StorageError if the disk cannot be written."""
        save_table(self._folder / name, {"format": "vqclip part", **facts}, arrays, "shards")
        if self._remote is not None:
            self._remote.upload(name, self._folder / name)


class _Part(NamedTuple):
    """Content of a part."""

    facts: dict[str, Any]
    """``samples``, ``members``, ``complete``, ``scattered``, ``problem``, and the counts of `ShardScan`."""
    begins: np.ndarray
    digests: np.ndarray
    members: tuple[Texts, np.ndarray, np.ndarray] | None
    """Keys, offsets in blocks (uint32) and sizes (uint32), of an index that has them."""


class IndexMaker:
    """Makes the parts of an index, and joins them.

    Args:
        shards: the tars.
        parts: where the parts are.
        rules: how members are grouped.
        leave_out: leave out shards that are missing or damaged.

    Raises:
        DataError: a shard is missing.
        StorageError: a server cannot be reached.
    """

    def __init__(self, shards: Sequence[Shard], parts: Parts, rules: MemberRules = USUAL, leave_out: bool = False):
        self.shards, self.rules, self.leave_out = shards, rules, leave_out
        self._parts, self._stopped = parts, threading.Event()
        self.facts = survey(shards, leave_out)
        total = sum(each.length for each in self.facts)
        self.with_members = all(map(is_whole, shards)) and total <= MOST_WITH_MEMBERS
        """Whether the index has the places of all members."""

    def find_current(self, path: Path, chunk: int) -> TarIndex | None:
        """Open an index; None if there is none, or it is damaged or of other shards or chunks."""
        if not path.exists():
            return None
        try:
            index = open_index(path)
        except DataError as error:
            logger.warning("%s", error)
            return None
        fits = index.chunk == chunk and index.lengths.tolist() == [each.length for each in self.facts]
        fits = fits and index.has_shards([each.name for each in self.facts], self.rules)
        return index if fits and [index.tag(n) for n in range(index.shards)] == [f.tag for f in self.facts] else None

    def missing(self) -> list[int]:
        """Return the numbers of the shards without a part."""
        there = self._parts.list()
        return [n for n, facts in enumerate(self.facts) if not facts.problem and self._part_name(n) not in there]

    def read(self, number: int) -> None:
        """Make the part of a shard, unless another process has made it.

        Raises:
            DataError: the shard is damaged.
            StorageError: it cannot be fetched, or the part cannot be written.
        """
        if not self._parts.has(self._part_name(number)):
            self._make_part(number)

    def read_all(self, workers: int = 1, report: Callable[[int, int], object] = lambda shards, size: None) -> None:
        """Make all missing parts.

        Args:
            workers: threads; each reads a shard.
            report: called in this thread with the shards that are finished since the last call, and their bytes.

        Raises:
            DataError: shards are damaged; all others have been read.
            StorageError: a server cannot be reached.
        """
        left, damaged = self.missing(), list[DataError]()
        random.Random(os.urandom(8)).shuffle(left)
        running = dict[Future[None], int]()
        with ThreadPoolExecutor(workers, "index") as pool:
            try:
                while left or running:
                    while left and len(running) < 2 * workers:
                        number = left.pop()
                        running[pool.submit(self._read_unless_stopped, number)] = number
                    finished, _ = wait(running, _POLL_S, FIRST_COMPLETED)
                    numbers = [running.pop(each) for each in finished]
                    report(len(numbers), sum(self.facts[number].length for number in numbers))
                    for each in finished:
                        error = each.exception()
                        if isinstance(error, DataError) and not isinstance(error, StorageError):
                            damaged.append(error)
                        elif error is not None:
                            raise error
            finally:  # after an interrupt or an error the other threads stop within their shards
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                self._stopped.clear()
        if damaged:
            lines = "".join(f"\n  {error}" for error in damaged[:_SHOWN]) if len(damaged) > 1 else ""
            raise DataError(
                str(damaged[0]) if len(damaged) == 1 else f"{len(damaged)} shards cannot be indexed:{lines}"
            )

    def _read_unless_stopped(self, number: int) -> None:
        try:
            if not self._stopped.is_set():
                self.read(number)
        except StorageError:
            self._stopped.set()
            raise

    def write(self, path: Path, chunk: int = CHUNK) -> TarIndex:
        """Join the parts to an index, write it, and open it.

        Raises:
            DataError: it cannot be written, or a shard whose part is missing is damaged.
        """
        with ThreadPoolExecutor(_THREADS, "parts") as pool:
            facts, arrays = self._join(_map_ahead(pool, self._part, range(len(self.facts))), chunk)
        return write_index(path, facts, arrays)

    def _join(self, parts: Iterable[_Part], chunk: int) -> tuple[IndexFacts, dict[str, np.ndarray]]:
        counts, starts, digests, shard_digests = [0], [np.zeros(0, np.int64)], bytearray(), list[bytes]()
        keys, offsets, sizes = bytearray(), list[np.ndarray](), list[np.ndarray]()
        key_ends, rest, step = [np.zeros(0, np.int64)], b"", chunk * DIGEST
        members, complete = np.zeros(len(KINDS), np.int64), np.zeros(len(KINDS), np.int64)
        names = {name: Counter[str]() for name in ("endings", "ignored", "ambiguous")}
        damaged, scattered, total = dict[str, str](), "", 0
        for shard, part in zip(self.facts, parts, strict=True):
            starts.append(part.begins[-total % chunk :: chunk])
            plain = part.digests.tobytes()
            shard_digests.append(hashlib.sha256(plain).digest())
            plain = rest + plain
            end = len(plain) // step * step
            digests += b"".join(chunk_digest(plain[at : at + step]) for at in range(0, end, step))
            rest = plain[end:]
            counts.append(len(part.begins))
            total += len(part.begins)
            members += np.array(part.facts["members"])
            complete += np.array(part.facts["complete"])
            for name, counter in names.items():
                counter.update(part.facts[name])
            scattered = scattered or (shard.name if part.facts["scattered"] else "")
            if part.facts["problem"]:
                damaged[encodable(shard.name)] = encodable(part.facts["problem"])
            if part.members is not None:
                texts, *places = part.members
                key_ends.append(texts.ends + len(keys))
                keys += texts.content.tobytes()
                offsets.append(places[0])
                sizes.append(places[1])
        if rest:
            digests += chunk_digest(rest)
        arrays: dict[str, np.ndarray] = {
            "lengths": np.array([each.length for each in self.facts], np.int64),
            "firsts": np.cumsum(counts, dtype=np.int64),
            "starts": np.concatenate(starts),
            "digests": np.frombuffer(digests, np.uint8).reshape(-1, DIGEST),
            "shard_digests": np.frombuffer(b"".join(shard_digests), np.uint8).reshape(-1, 32),
        }
        arrays["names"], arrays["name_ends"] = Texts.join(each.name for each in self.facts)
        arrays["tags"], arrays["tag_ends"] = Texts.join(each.tag for each in self.facts)
        if self.with_members:
            empty = [np.zeros((0, len(KINDS)), np.uint32)]
            arrays |= {"offsets": np.concatenate(empty + offsets), "sizes": np.concatenate(empty + sizes)}
            arrays |= {"keys": np.frombuffer(bytes(keys), np.uint8), "key_ends": np.concatenate(key_ends)}
        facts = IndexFacts(
            chunk=chunk,
            members=tuple(members.tolist()),
            complete=tuple(complete.tolist()),
            content=content_digest([each.hex() for each in shard_digests]),
            rules=self.rules.to_json(),
            scattered=encodable(scattered),
            damaged=damaged,
            endings=dict(names["endings"].most_common(_COUNTED)),
            ignored=dict(names["ignored"].most_common(_COUNTED)),
            ambiguous=dict(names["ambiguous"].most_common(_COUNTED)),
        )
        return facts, arrays

    def _part_name(self, number: int) -> str:
        facts = self.facts[number]
        rules = json.dumps([self.rules.to_json(), self.with_members])
        text = "\n".join([str(_VERSION), facts.name, str(facts.length), facts.tag, rules])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".part"

    def _part(self, number: int) -> _Part:
        """Return the part of a shard; it is made, also again where it is damaged."""
        if self.facts[number].problem:
            return _empty_part(self.facts[number].problem, self.with_members)
        for is_new in (False, True):
            if is_new:
                self._make_part(number)
            table = self._parts.read(self._part_name(number))
            if (part := None if table is None else _check_part(table, self.facts[number].length)) is not None:
                break
            if table is not None:
                logger.warning("%s: part of %s is made again", self._parts, self.facts[number].name)
        else:
            raise StorageError(f"{self._parts}: the part of {self.facts[number].name} is damaged whenever it is read")
        if part.facts["problem"] and not self.leave_out:
            raise DataError(part.facts["problem"])
        return part

    def _make_part(self, number: int) -> None:
        shard, length, part = self.shards[number], self.facts[number].length, None
        try:
            part = self._describe(read_shard(shard, self.facts[number], self._scan_of(shard, length)))
        except StorageError:
            raise
        except DataError as error:
            if self._stopped.is_set():
                return
            if not isinstance(shard, Path):
                shard.discard()  # an unpacked copy with the same damage
            message = f"{error}{_advice(shard)}"
            if not self.leave_out:
                raise DataError(message) from None
            part = _empty_part(message, self.with_members)
        arrays = {"begins": (part.begins // BLOCK).astype(np.uint32), "digests": part.digests}
        if part.members is not None:
            arrays |= dict(zip(("keys", "key_ends"), part.members[0], strict=True))
            arrays |= dict(zip(("offsets", "sizes"), part.members[1:], strict=True))
        self._parts.write(self._part_name(number), part.facts, arrays)
        logger.info("indexed %s: %d samples", shard, len(part.begins))

    def _scan_of(self, shard: Shard, length: int) -> Callable[[Iterable[bytes]], ShardScan]:
        def until_stopped(blocks: Iterable[bytes]) -> Iterator[bytes]:
            for block in blocks:
                if self._stopped.is_set():
                    return  # the scan finds a truncated shard, which `_make_part` knows to ignore
                yield block

        return lambda blocks: scan_shard(shard, until_stopped(blocks), length, self.rules)

    def _describe(self, scan: ShardScan) -> _Part:
        there = scan.table.offsets >= 0
        facts: dict[str, Any] = {
            "members": there.sum(axis=0).tolist(),
            "complete": (there & there[:, :1]).sum(axis=0).tolist(),
            "scattered": scan.is_scattered,
            "problem": "",
        }
        for name in ("endings", "ignored", "ambiguous"):
            facts[name] = {encodable(key): count for key, count in getattr(scan, name).items()}
        table = scan.table
        offsets = np.where(there, table.offsets // BLOCK, table.offsets + 2**32).astype(np.uint32)
        sizes = np.minimum(table.sizes, 2**32 - 1).astype(np.uint32)
        return _Part(facts, scan.begins, scan.digests, (table.keys, offsets, sizes) if self.with_members else None)


def _empty_part(problem: str, with_members: bool) -> _Part:
    facts: dict[str, Any] = {"scattered": False, "problem": encodable(problem)}
    facts |= {"members": [0] * len(KINDS), "complete": [0] * len(KINDS), "endings": {}, "ignored": {}, "ambiguous": {}}
    none = np.zeros((0, len(KINDS)), np.uint32)
    members = (Texts.join([]), none, none) if with_members else None
    return _Part(facts, np.zeros(0, np.int64), np.zeros((0, DIGEST), np.uint8), members)


def _check_part(table: Table, length: int) -> _Part | None:
    """Return the content of a part, which may come from anywhere; None if it is not what was written."""
    try:
        arrays, facts = table.arrays, table.facts
        begins, digests = arrays["begins"].astype(np.int64) * BLOCK, arrays["digests"]
        samples, members = len(begins), None
        counts = [np.array(facts[name], np.int64) for name in ("members", "complete")]
        fits = arrays["begins"].dtype == np.uint32 and digests.dtype == np.uint8 and digests.shape == (samples, DIGEST)
        fits &= not samples or (begins[0] == 0 and bool((np.diff(np.append(begins, length)) > 0).all()))
        fits &= all(c.shape == (len(KINDS),) and ((c >= 0) & (c <= samples)).all() for c in counts)
        fits &= all(isinstance(facts[name], dict) for name in ("endings", "ignored", "ambiguous"))
        if "offsets" in arrays:
            keys, places = Texts(arrays["keys"], arrays["key_ends"]), (arrays["offsets"], arrays["sizes"])
            fits &= keys.are_consistent and len(keys.ends) == samples
            fits &= all(each.dtype == np.uint32 and each.shape == (samples, len(KINDS)) for each in places)
            members = (keys, *places)
        return _Part(facts, begins, digests, members) if fits and isinstance(facts["problem"], str) else None
    except (KeyError, TypeError, ValueError):
        return None


def _advice(shard: Shard) -> str:
    """Return what to do about a damaged shard."""
    advice = ". Or leave out shards that are missing or damaged: bad_shards: leave_out"
    if isinstance(shard, Path):
        name = f"{shard.name.partition('.')[0]}_stats.json"
        if not (shard.parent / name).exists() and any(shard.parent.glob("*_stats.json")):
            advice += (
                f" (img2dataset writes {name} when a shard is finished, and there is none: copy or download it again)"
            )
    return advice


def _map_ahead(pool: ThreadPoolExecutor, function: Callable[[int], T], numbers: range) -> Iterator[T]:
    """Yield the results of a function in order, with some of the next calls under way."""
    running: deque[Future[T]] = deque()
    for number in numbers:
        running.append(pool.submit(function, number))
        if len(running) > 2 * _THREADS:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


# ---- sizes, tags and bytes of shards


def survey(shards: Sequence[Shard], leave_out: bool = False) -> list[ShardFacts]:
    """Return name, size and tag of each shard.

    Args:
        shards: the tars; compressed ones are unpacked into the cache.
        leave_out: return a problem instead of raising for those that are missing or damaged.

    Raises:
        DataError: a shard is missing.
        StorageError: a server cannot be reached.
    """
    ask = partial(_ask_or_note, leave_out=leave_out)
    stored = [each for each in shards if isinstance(each, RemoteShard) and protocol_of(each.url) not in _WEB]
    stored = [each for each in stored if not is_gzip(each.name)]
    folders = {each.url.rpartition("/")[0] for each in stored}
    if shards and len(stored) == len(shards) and len(folders) <= max(1, len(shards) // _THREADS):
        there = _list_folders(sorted(folders), stored[0])
        # A shard that is not listed is asked for, which names the reason.
        found = [(*there[where], "") if (where := _path_in_store(each)) in there else ask(each) for each in stored]
    else:
        with ThreadPoolExecutor(_THREADS, "survey") as pool:
            found = list(pool.map(ask, shards))
    return [ShardFacts(name, *each) for name, each in zip(shard_names(shards), found, strict=True)]


def read_shard(shard: Shard, facts: ShardFacts, scan: Callable[[Iterable[bytes]], T]) -> T:
    """Read a shard once from beginning to end; a plain one is not stored.

    Args:
        shard: the tar.
        facts: its size and tag from `survey`.
        scan: gets blocks of its bytes; called again if a download breaks.

    Raises:
        DataError: it cannot be read, or has changed; or from ``scan``.
        StorageError: it cannot be fetched.
    """
    if isinstance(shard, RemoteShard) and not is_gzip(shard.name):
        deadline = Deadline(shard.options.total_s)

        def fetch() -> T:
            with open_url(shard.url, shard.options.timeout_s, deadline) as body:
                return scan(_require_length(body.blocks, facts.length))

        return retry(fetch, shard.url, shard.options, deadline)
    try:
        with open_regular(shard) if isinstance(shard, Path) else os.fdopen(shard.open(), "rb") as file:
            _require_unchanged(shard, facts)
            result = scan(iter(lambda: file.read(_READ), b""))
            _require_unchanged(shard, facts)
    except OSError as error:
        raise DataError(f"{shard}: shard cannot be read: {error.strerror}") from None
    return result


def _require_unchanged(shard: Shard, facts: ShardFacts) -> None:
    if isinstance(shard, Path) and local_state(shard) != (facts.length, facts.tag):
        raise StorageError(f"{shard}: was written to while it was indexed; start again when it is complete")


def _require_length(blocks: Iterable[bytes], length: int) -> Iterator[bytes]:
    received = 0
    for block in blocks:
        received += len(block)
        if received > length:
            break
        yield block
    if received != length:
        more = "or more " if received > length else ""
        raise FetchError(f"{received} bytes {more}came, {length} were announced: did it change?", again=True)


def _ask_or_note(shard: Shard, leave_out: bool) -> tuple[int, str, str]:
    try:
        return (*_ask(shard), "")
    except DataError as error:
        if not leave_out or (isinstance(error, StorageError) and error.kind != "gone"):
            raise
        return (*MISSING, str(error))


def _ask(shard: Shard) -> tuple[int, str]:
    if isinstance(shard, Path):
        try:
            open_regular(shard).close()
        except OSError as error:
            raise DataError(f"{shard}: shard cannot be opened: {error.strerror}") from None
        return local_state(shard)
    if isinstance(shard, GzipShard) or is_gzip(shard.name):
        file = shard.open()
        try:
            return os.fstat(file).st_size, f"{shard.stamp[1]}" if isinstance(shard, GzipShard) else ""
        finally:
            os.close(file)
    deadline = Deadline(shard.options.total_s)
    return retry(lambda: url_facts(shard.url, shard.options.timeout_s, deadline), shard.url, shard.options, deadline)


def _list_folders(folders: Sequence[str], shard: RemoteShard) -> dict[str, tuple[int, str]]:
    there: dict[str, tuple[int, str]] = {}
    for folder in folders:
        deadline = Deadline(shard.options.total_s)
        list_folder = partial(list_facts, folder, shard.options.timeout_s, deadline)
        there |= retry(list_folder, folder, shard.options, deadline)
    return there


def _path_in_store(shard: RemoteShard) -> str:
    return path_in_url(shard.url).partition("://")[2]
