"""The index of tars: what is written is read; what was damaged or crafted is refused."""

import pickle
from pathlib import Path
from tarfile import GNU_FORMAT, PAX_FORMAT, USTAR_FORMAT

import numpy as np
import pytest

from tests.data.making import make_index, write_tar
from vqclip.data.remote.cache import BoundedCache
from vqclip.data.table_file import Texts, open_table, save_table
from vqclip.data.tars.index import TarIndex, open_index, scan_chunk
from vqclip.data.tars.members import USUAL
from vqclip.data.tars.reader import TarReader
from vqclip.errors import DataError, StorageError

COUNTS = (0, 3, 9, 1, 0, 2, 5, 0)


def tiny(folder: Path, counts: tuple[int, ...] = COUNTS, kind: int = USTAR_FORMAT) -> list[Path]:
    shards, first = [], 0
    for number, count in enumerate(counts):
        members: dict[str, bytes] = {}
        for sample in range(first, first + count):
            key = f"d/{sample:09d}" if kind == USTAR_FORMAT else f"{'long/' * 40}{sample:09d}"
            members |= {f"{key}.jpg": bytes([sample]) * (700 * sample), f"{key}.seg.png": b"s", f"{key}.pyd": b"x"}
            members |= {f"{key}.txt": b"%d" % sample}
        shards.append(write_tar(folder / f"{number}.tar", members, kind))
        first += count
    return shards


def read(index: TarIndex, chunk: int, shards: list[Path]) -> bytes:
    return b"".join(shards[n].read_bytes()[first:end] for n, first, end in index.ranges(chunk))


KINDS = [(1, USTAR_FORMAT), (4, GNU_FORMAT), (7, PAX_FORMAT), (128, USTAR_FORMAT)]


@pytest.mark.parametrize(("chunk", "kind"), KINDS)
def test_chunks_partition_the_shards_and_hold_their_samples(tmp_path: Path, chunk: int, kind: int) -> None:
    shards = tiny(tmp_path, kind=kind)
    index = make_index(shards, tmp_path / "index", chunk)
    index = open_index(index.path)
    assert (len(index), index.samples, index.facts.members) == (-(-20 // chunk), 20, (20, 20, 0, 0))
    assert [index.names.read(n) for n in range(index.shards)] == [path.name for path in shards]
    assert index.tags.read(3) == str(shards[3].stat().st_mtime_ns)
    chunks = [read(index, number, shards) for number in range(len(index))]
    assert b"".join(chunks) == b"".join(path.read_bytes() for path, count in zip(shards, COUNTS, strict=True) if count)
    assert index.facts.largest == max(map(len, chunks))
    sample = 0
    for number, data in enumerate(chunks):
        table = scan_chunk(index, number, data, shards)
        for row, (offsets, sizes) in enumerate(zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)):
            assert table.keys.read(row).endswith(f"{sample:09d}")
            assert data[offsets[0] :][: sizes[0]] == bytes([sample]) * (700 * sample)
            assert data[offsets[1] :][: sizes[1]] == b"%d" % sample
            assert (offsets[2:], sizes[2:]) == ([-1, -1], [0, 0])
            assert index.member(sample, 1)[1] == sizes[1]
            sample += 1
    assert sample == 20
    with pytest.raises(IndexError):
        index.ranges(len(index))


def test_damaged_and_changed_chunks_are_named(tmp_path: Path) -> None:
    shards = tiny(tmp_path)
    index = make_index(shards, tmp_path / "index", 4)
    good = read(index, 1, shards)
    for at in (3, 600, 2000, len(good) - 1):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(StorageError, match=r"2.tar: changed since they were indexed, or damaged") as error:
            scan_chunk(index, 1, bytes(bad), shards)
        assert error.value.kind == "changed shard"
    for cut in (good[:-512], good + bytes(512), b""):
        with pytest.raises(StorageError, match="changed since"):
            scan_chunk(index, 1, cut, shards)


def test_members_apart_are_noticed(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "2.jpg": b"y", "1.txt": b"1", "2.txt": b"2"})
    index = make_index([shard], tmp_path / "index")
    assert index.facts.scattered == "a.tar"
    assert [index.member(row, 1)[1] for row in range(2)] == [1, 1]


def test_other_processes_share_the_file(tmp_path: Path) -> None:
    index = make_index(tiny(tmp_path), tmp_path / "index", 4)
    with pytest.raises(ValueError, match="read-only"):
        index.starts[0] = 1
    copy = pickle.loads(pickle.dumps(index))
    assert [copy.ranges(n) for n in range(5)] == [index.ranges(n) for n in range(5)]
    assert len(pickle.dumps(index)) < 500
    stored = pickle.dumps(index)
    make_index(tiny(tmp_path / "b", (2,)), tmp_path / "index", 4)
    with pytest.raises(DataError, match="was replaced by one of other data while it was in use"):
        pickle.loads(stored)


def test_no_samples(tmp_path: Path) -> None:
    for counts in ((), (0, 0)):
        index = make_index(tiny(tmp_path, counts), tmp_path / "index")
        assert (len(index), index.samples, index.facts.largest) == (0, 0, 0)
        assert open_index(index.path).firsts.tolist() == [0] * (len(counts) + 1)


# ---- damage


def change(path: Path, facts: dict[str, object], arrays: dict[str, object]) -> None:
    """Write an index with other numbers, whose checksums fit."""
    table = open_table(path, {})
    copies = {name: np.array(array) for name, array in table.arrays.items()}
    for name, value in arrays.items():
        if isinstance(value, tuple):
            copies[name].flat[value[0]] = value[1]
        elif value is None:
            del copies[name]
        else:
            copies[name] = np.asarray(value)
    save_table(path, table.facts | facts, copies, "x")


@pytest.mark.parametrize(
    ("facts", "arrays", "message"),
    [
        ({"format_version": 3}, {}, "format_version is 3; expected 2"),
        ({"chunk": 0}, {}, "chunk: got 0"),
        ({"members": [1, 2]}, {}, "members"),
        ({"largest": "9"}, {}, "largest"),
        ({"more": 1}, {}, "more"),
        ({"chunk": 5}, {}, "other arrays"),
        ({"largest": 10**9}, {}, "byte ranges that contradict each other"),
        ({}, {"names": None}, "other arrays"),
        ({}, {"sizes": None}, "other arrays"),
        ({}, {"lengths": np.zeros((2, 2))}, "other arrays"),
        ({}, {"firsts": np.zeros(9)}, "other arrays"),
        ({}, {"firsts": (0, 1)}, "counts of samples"),
        ({}, {"firsts": (3, 30)}, "counts of samples"),
        ({}, {"firsts": (8, 2**62)}, "other arrays"),
        ({}, {"lengths": (2, -1)}, "sizes of shards"),
        ({}, {"lengths": (2, 2**62)}, "sizes of shards"),
        ({}, {"lengths": (2, 512)}, "byte ranges"),
        ({}, {"starts": (1, 2**63 - 1)}, "byte ranges"),
        ({}, {"starts": (1, -512)}, "byte ranges"),
        ({}, {"starts": (1, 513)}, "byte ranges"),
        ({}, {"starts": (1, 0)}, "byte ranges"),
        ({}, {"starts": (2, 512)}, "byte ranges"),
        ({}, {"starts": (0, 512)}, "byte ranges"),
        ({}, {"name_ends": (0, -5)}, "names"),
        ({}, {"tag_ends": (7, 1)}, "names"),
        ({}, {"key_ends": (3, 2**62)}, "names"),
    ],
)
def test_crafted_numbers(tmp_path: Path, facts: dict[str, object], arrays: dict[str, object], message: str) -> None:
    index = make_index(tiny(tmp_path), tmp_path / "index", 4)
    assert open_index(index.path).facts.largest == index.facts.largest
    change(index.path, facts, arrays)
    with pytest.raises(DataError, match=f"(?s){index.path}.*{message}.*vqclip data index SOURCE"):
        open_index(index.path)


def test_names_cannot_forge_lines(tmp_path: Path) -> None:
    shards = tiny(tmp_path, (1,))
    index = make_index(shards, tmp_path / "index")
    names = Texts.join(["a\nb\x1b[2J\udcff"])
    change(index.path, {}, {"names": names.content, "name_ends": names.ends})
    reader = TarReader(shards, open_index(index.path), USUAL, BoundedCache(tmp_path / "chunks", 1))
    assert reader.place(0) == "a\\nb\\x1b[2J\\udcff/d/000000000"
