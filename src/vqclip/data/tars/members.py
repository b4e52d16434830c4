"""The samples of a shard: its members, grouped by name, and digests of their bytes.

A member's name is a key and an ending: ``d/22.05.png`` is the image of the sample ``d/22.05``. The ending is what a
setting names (``image.jpg``), else the last part of the name if it is a usual one. (WebDataset cuts at the first dot,
and would make one sample of ``22.05.png`` and ``22.06.png``.) A key that extends another one by a part, and has no
image with a caption or label of its own, is no sample: ``0.depth.png`` beside ``0.png`` is a member that is not read.

    samples   begin with their first member (its extended header, if it has one) and end where the next one begins;
              the first sample of a shard begins at byte 0, the last one ends at the end of the shard
    digest    of a sample: the first 16 bytes of the SHA-256 of its bytes
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vqclip.data.decode import IMAGE_ENDINGS, OTHER_ENDINGS
from vqclip.data.remote.files import Shard
from vqclip.data.table_file import Texts
from vqclip.data.tars.headers import Member, walk_tar
from vqclip.errors import encodable

KINDS = ("image", "txt", "json", "cls")
"""Members of a sample; the columns of `SampleTable.offsets` and `.sizes`."""
IMAGES = (*(ending[1:] for ending in IMAGE_ENDINGS), "img")
"""Usual endings of images."""
_TEXTS = ("txt", "text", "caption", "cap")
"""Usual endings of captions; the first that a sample has is its caption."""
_IMAGE_LIKE = frozenset((*IMAGES, *(ending[1:] for ending in OTHER_ENDINGS)))
DIGEST = 16
"""Bytes of the digest of a sample or chunk."""
NONE, AMBIGUOUS = -1, -2
"""Offsets of a member that a sample lacks, and of one that it has twice, with different endings."""
_SHOWN = 40
"""Different endings that are counted in a shard."""


class MemberRules(NamedTuple):
    """Endings of the members of a sample."""

    image: tuple[str, ...] = ()
    """Endings of the image, such as ``image.jpg``; the first that a sample has. Empty: the usual ones."""
    text: tuple[str, ...] = ()
    """Endings of the caption. Empty: the usual ones."""
    text_kind: str = "txt"
    """Kind of the member that `text` names: txt or json."""

    def to_json(self) -> dict[str, Any]:
        """Return the rules as a JSON value, for an index and its name."""
        return {"image": [*self.image], "text": [*self.text], "text_kind": self.text_kind if self.text else "txt"}


USUAL = MemberRules()
"""Usual endings alone."""


class SampleTable(NamedTuple):
    """Samples, in the order of their first members."""

    keys: Texts
    """Their names: the members' names without the ending."""
    offsets: np.ndarray
    """``(samples, 4)`` int64: offset of each of `KINDS`; `NONE` or `AMBIGUOUS` where there is none to read."""
    sizes: np.ndarray
    """``(samples, 4)`` int64: bytes of each of `KINDS`; 0 where the sample has none."""

    def __len__(self) -> int:
        return len(self.offsets)


class ShardScan(NamedTuple):
    """Everything that an index needs of a shard."""

    begins: np.ndarray
    """``(samples,)`` int64: byte where each sample begins."""
    digests: np.ndarray
    """``(samples, 16)`` uint8."""
    table: SampleTable
    is_scattered: bool
    """Whether members of other samples are between those of a sample, so that it cannot be read in chunks."""
    counts: Mapping[str, Any]
    """``endings``: members by the part of their name after its first dot. ``ignored``: members that are not read by
    their ending, where it is that of an image. ``ambiguous``: samples with two members of a kind, by their endings:
    ``.jpg and .png``."""


def scan_shard(
    shard: Shard,
    blocks: Iterable[bytes],
    length: int,
    rules: MemberRules = USUAL,
    first: int = 0,
    end: int | None = None,
) -> ShardScan:
    """Index one shard, or consecutive samples of it, in one pass over the bytes.

    Args:
        shard: for messages.
        blocks: the bytes, in order.
        length: bytes of the shard.
        rules: endings of the members.
        first: position of the first byte, with which a sample begins.
        end: position behind the last one; None: ``length``.

    Raises:
        DataError: it is damaged.
    """
    scan, digest = _MemberScan(rules), hashlib.sha256()
    begins, digests = list[int](), list[bytes]()  # of the bytes of each key: up to the next key
    for member, data in walk_tar(shard, blocks, length, first, end):
        if member is not None and scan.add(member):
            if begins:
                digests.append(digest.digest()[:DIGEST])
                digest = hashlib.sha256()
            begins.append(member.begin if begins else first)
        digest.update(data)
    return scan.finish(begins, [*digests, digest.digest()[:DIGEST]])


@dataclass
class _Sample:
    """Members with one key."""

    number: int
    """Its place among all keys; it begins where the bytes of `number` begin."""
    offsets: list[int] = field(default_factory=lambda: [NONE] * len(KINDS))
    sizes: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    endings: list[str] = field(default_factory=lambda: [""] * len(KINDS))

    @property
    def is_complete(self) -> bool:
        """Return whether it has an image, and a caption or label."""
        return self.offsets[0] != NONE and any(offset != NONE for offset in self.offsets[1:])


class _MemberScan:
    """Members of consecutive bytes of a shard, grouped into samples; see `scan_shard`."""

    def __init__(self, rules: MemberRules):
        self._endings = _Endings(rules)
        self._samples: dict[str, _Sample] = {}
        self._order: list[int] = []  # numbers of the keys, member by member, without repetitions
        self._counts = {name: Counter[str]() for name in ("endings", "ignored", "ambiguous")}

    def add(self, member: Member) -> bool:
        """Add a member; return whether it has a new key."""
        base = member.name[member.name.rfind("/") + 1 :]
        seen, rest = self._counts["endings"], base.partition(".")[2].lower()
        if len(seen) < _SHOWN or rest in seen:
            seen[rest] += 1
        found = None if base.startswith(".") else self._endings.split(member.name)
        if found is None:
            last = base.rpartition(".")[2].lower()
            self._counts["ignored"][f".{last}"] += last in _IMAGE_LIKE and not base.startswith(".")
            return False
        key, ending, column, rank = found
        sample = self._samples.get(key)
        is_new = sample is None
        if sample is None:
            sample = self._samples[key] = _Sample(len(self._samples))
        if not self._order or self._order[-1] != sample.number:
            self._order.append(sample.number)
        former = sample.endings[column]
        if sample.offsets[column] != NONE and ending != former:
            if (former_rank := self._endings.rank(former)) == rank:
                self._counts["ambiguous"][" and ".join(sorted([f".{former}", f".{ending}"]))] += 1
                sample.offsets[column], sample.sizes[column] = AMBIGUOUS, 0
                return is_new
            if former_rank < rank:
                return is_new
        if former != ending or sample.offsets[column] != AMBIGUOUS:  # of equal names the last counts, as with tar -r
            sample.offsets[column], sample.sizes[column], sample.endings[column] = member.offset, member.size, ending
        return is_new

    def finish(self, begins: Sequence[int], digests: Sequence[bytes]) -> ShardScan:
        """Return the scan, from the first byte of each key and the digests of the bytes up to the next key."""
        owners = self._find_owners()
        order = owners[np.array(self._order, np.int64)]
        is_scattered = bool(len(order)) and 1 + int((np.diff(order) != 0).sum()) != len(np.unique(order))
        samples = {key: each for key, each in self._samples.items() if owners[each.number] == each.number}
        numbers = np.array([each.number for each in samples.values()], np.int64)
        # Members that are not read are part of the sample that they extend, before it too.
        firsts = numbers.copy()
        if not is_scattered:
            least = np.arange(len(owners))
            np.minimum.at(least, owners, np.arange(len(owners)))
            firsts = least[numbers]
        firsts[:1] = 0
        edges = [*firsts.tolist(), len(owners)]
        parts = (digests[start:end] for start, end in itertools.pairwise(edges))
        joined = [hashlib.sha256(b"".join(each)).digest()[:DIGEST] if len(each) > 1 else each[0] for each in parts]
        count = len(samples)
        table = SampleTable(
            Texts.join(samples),
            np.array([each.offsets for each in samples.values()], np.int64).reshape(count, len(KINDS)),
            np.array([each.sizes for each in samples.values()], np.int64).reshape(count, len(KINDS)),
        )
        return ShardScan(
            np.array(begins, np.int64)[firsts],
            np.frombuffer(b"".join(joined), np.uint8).reshape(-1, DIGEST),
            table,
            is_scattered,
            {
                name: {encodable(each): count for each, count in counts.most_common(_SHOWN) if count > 0}
                for name, counts in self._counts.items()
            },
        )

    def _find_owners(self) -> np.ndarray:
        """Return for each key the number of its sample: its own, or that of the sample which it only extends."""
        owners = np.arange(len(self._samples))
        for key, sample in self._samples.items():
            prefix, base = key, key[key.rfind("/") + 1 :]
            while "." in base and not sample.is_complete:
                prefix, base = prefix.rpartition(".")[0], base.rpartition(".")[0]
                if (other := self._samples.get(prefix)) is not None:
                    owners[sample.number] = other.number
                    if sample.endings[0]:
                        self._counts["ignored"][f"{key[len(prefix) :]}.{sample.endings[0]}"] += 1
                    break
        while (owners[owners] != owners).any():  # 0.a.b extends 0.a, which extends 0
            owners = owners[owners]
        return owners


class _Endings:
    """Cuts names of members into key and ending."""

    def __init__(self, rules: MemberRules):
        columns: list[tuple[Sequence[str], int, bool]] = [
            (rules.image or IMAGES, 0, bool(rules.image)),
            (_TEXTS, 1, True),
            (("json",), 2, True),
            (("cls",), 3, True),
        ]
        if rules.text:
            column = KINDS.index(rules.text_kind)
            columns[column] = (rules.text, column, True)
        self._known = {
            ending: (column, rank * is_ranked)
            for endings, column, is_ranked in reversed(columns)
            for rank, ending in reversed([*enumerate(each.lower().strip(".") for each in endings)])
        }
        self._long = sorted((f".{each}" for each in self._known if "." in each), key=len, reverse=True)

    def split(self, name: str) -> tuple[str, str, int, int] | None:
        """Return key, ending in lower case, column and rank of a member; None if it is not read."""
        if self._long:
            lower = name.lower()
            for ending in self._long:
                if lower.endswith(ending) and name[: -len(ending)].rpartition("/")[2]:
                    return (name[: -len(ending)], ending[1:], *self._known[ending[1:]])
        key, _, ending = name.rpartition(".")
        ending = ending.lower()
        found = self._known.get(ending)
        return None if found is None or not key.rpartition("/")[2] else (key, ending, *found)

    def rank(self, ending: str) -> int:
        """Return the rank of an ending among those of its column."""
        return self._known[ending][1]
