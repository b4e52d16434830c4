"""The index of chunks: what is written is read; what was damaged or crafted is refused."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.making import caption_members, write_tar
from vqclip.data.chunks import index_file
from vqclip.data.chunks.index_file import ChunkIndex, open_index, write_index
from vqclip.data.chunks.make import make_index
from vqclip.data.chunks.scan import scan_chunk
from vqclip.data.index import load_index
from vqclip.errors import DataError, StorageError
from vqclip.io.json_files import add_checksum

COUNTS = (0, 3, 9, 1, 0, 2, 5, 0)


def tiny(folder: Path, counts: tuple[int, ...] = COUNTS, kind: int = tarfile.USTAR_FORMAT) -> list[Path]:
    shards, first = [], 0
    for number, count in enumerate(counts):
        members: dict[str, bytes] = {}
        for sample in range(first, first + count):
            key = f"d/{sample:09d}" if kind == tarfile.USTAR_FORMAT else f"{'long/' * 40}{sample:09d}"
            members |= {f"{key}.jpg": bytes([sample]) * (700 * sample), f"{key}.seg.png": b"s", f"{key}.pyd": b"x"}
            members |= {f"{key}.txt": b"%d" % sample}
        shards.append(write_tar(folder / f"{number}.tar", members, kind))
        first += count
    return shards


def read(index: ChunkIndex, chunk: int, shards: list[Path]) -> bytes:
    return b"".join(shards[n].read_bytes()[first:end] for n, first, end in index.ranges(chunk))


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("chunk", [1, 4, 7, 20, 128])
def test_chunks_partition_the_shards_and_hold_their_samples(tmp_path: Path, chunk: int, kind: int) -> None:
    shards = tiny(tmp_path, kind=kind)
    index = make_index(shards, tmp_path / "index", chunk)
    index = open_index(index.path)
    assert (len(index), index.samples, index.members.tolist()) == (-(-20 // chunk), 20, [20, 20, 0, 0])
    assert [index.shard_name(n) for n in range(index.shards)] == [path.name for path in shards]
    assert index.tag(3) == str(shards[3].stat().st_mtime_ns)
    chunks = [read(index, number, shards) for number in range(len(index))]
    assert b"".join(chunks) == b"".join(path.read_bytes() for path, count in zip(shards, COUNTS, strict=True) if count)
    assert index.largest == max(map(len, chunks))
    sample = 0
    for number, data in enumerate(chunks):
        table = scan_chunk(index, number, data, shards)
        ends = [0, *table.key_ends.tolist()]
        for row, (offsets, sizes) in enumerate(zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)):
            assert table.keys[ends[row] : ends[row + 1]].endswith(b"%09d" % sample)
            assert data[offsets[0] :][: sizes[0]] == bytes([sample]) * (700 * sample)
            assert data[offsets[1] :][: sizes[1]] == b"%d" % sample
            assert (offsets[2:], sizes[2:]) == ([-1, -1], [0, 0])
            sample += 1
    assert sample == 20
    with pytest.raises(IndexError):
        index.ranges(len(index))


def test_samples_are_those_of_the_shard_indexes(tmp_path: Path) -> None:
    shards = [write_tar(tmp_path / f"{n}.tar", caption_members(5 * n, 5)) for n in range(3)]
    index = make_index(shards, tmp_path / "index", 4)
    assert index.firsts.tolist() == [0, 5, 10, 15]
    assert index.members.tolist() == [15, 15, 15, 0]
    keys = b"".join(scan_chunk(index, n, read(index, n, shards), shards).keys for n in range(len(index)))
    assert keys == b"".join(load_index(shard).keys for shard in shards)


def test_only_chunk_counts_and_bytes_make_the_content(tmp_path: Path) -> None:
    one = make_index(tiny(tmp_path / "a"), tmp_path / "1", 4).content
    assert make_index(tiny(tmp_path / "b" / "c"), tmp_path / "2", 4).content == one
    others = [make_index(tiny(tmp_path / "a"), tmp_path / "3", 5)]
    others += [make_index(tiny(tmp_path / "d", (0, 3, 9, 1, 0, 2, 4, 1)), tmp_path / "4", 4)]
    shards = tiny(tmp_path / "e")
    data = bytearray(shards[2].read_bytes())
    data[9000] ^= 1  # in an image
    shards[2].write_bytes(data)
    others += [make_index(shards, tmp_path / "5", 4)]
    assert len({one, *(other.content for other in others)}) == 4


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


def test_members_apart_are_refused(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "2.jpg": b"y", "1.txt": b"1", "2.txt": b"2"})
    with pytest.raises(DataError, match=r"a.tar: member '1.txt' at offset 2560 is apart .* data.order: full"):
        make_index([shard], tmp_path / "index")


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
        assert (len(index), index.samples, index.largest) == (0, 0, 0)
        assert open_index(index.path).firsts.tolist() == [0] * (len(counts) + 1)


# ---- damage


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        open_index(path)
    assert str(path) in str(error.value)
    assert "vqclip data index SOURCE" in str(error.value)
    return str(error.value)


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = make_index(tiny(tmp_path), tmp_path / "index", 4).path
    good = path.read_bytes()
    for at in [*range(0, 4096, 97), *range(4096, len(good), 13)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refusal(path)
    for size in (0, 100, 4096, len(good) - 1):
        path.write_bytes(good[:size])
        assert "not an index" in refusal(path) or "cut short" in refusal(path)
    path.write_bytes(good + b"x")
    assert "its header says" in refusal(path)
    path.write_bytes(b"[" * 4096)
    assert "is not an index of chunks" in refusal(path)
    path.unlink()
    assert "cannot be read (No such file" in refusal(path)


def with_header(path: Path, **facts: object) -> None:
    good = path.read_bytes()
    body = json.loads(good[:4096].rstrip(b"\0"))
    del body["sha256"]
    path.write_bytes(add_checksum({**body, **facts}).ljust(4096, b"\0") + good[4096:])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"format_version": 2}, "format_version is 2, this vqclip reads 1"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"chunk": 1e400}, "not an index of chunks|chunk"),
        ({"samples": 2**60}, "samples: got"),
        ({"samples": -1}, "samples: got -1"),
        ({"samples": 2**50}, "its header says"),
        ({"shards": 10**9}, "shards: got"),
        ({"members": [1, 2]}, "members"),
        ({"largest": "9"}, "largest"),
        ({"more": 1}, "more"),
        ({"largest": 10**9}, "byte ranges that contradict each other"),
        ({"members": [21, 0, 0, 0]}, "counts of members that contradict"),
    ],
)
def test_crafted_headers(tmp_path: Path, facts: dict[str, object], message: str) -> None:
    path = make_index(tiny(tmp_path), tmp_path / "index", 4).path
    with_header(path, **facts)
    with pytest.raises(DataError, match=message):
        open_index(path)


def _set(name: str, place: int, value: int) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays[name].__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set("firsts", 0, 1), "counts of samples"),
        (_set("firsts", 3, 30), "counts of samples"),
        (_set("firsts", 8, 2**62), "counts of samples"),
        (_set("lengths", 2, -1), "sizes of shards"),
        (_set("lengths", 2, 2**62), "sizes of shards"),
        (_set("lengths", 2, 512), "byte ranges"),
        (_set("starts", 1, 2**63 - 1), "byte ranges"),
        (_set("starts", 1, -512), "byte ranges"),
        (_set("starts", 1, 513), "byte ranges"),
        (_set("starts", 1, 0), "byte ranges"),
        (_set("starts", 2, 512), "byte ranges"),
        (_set("starts", 0, 512), "byte ranges"),
        (_set("name_ends", 0, -5), "names"),
        (_set("name_ends", 3, 2**62), "names"),
        (_set("tag_ends", 7, 1), "names"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 4096])
def test_crafted_numbers(
    tmp_path: Path,
    change: Callable[[dict[str, np.ndarray]], None],
    problem: str,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All checksums fit."""
    monkeypatch.setattr(index_file, "_SHARDS_AT_ONCE", at_once)
    index = make_index(tiny(tmp_path), tmp_path / "index", 4)
    assert open_index(index.path).largest == index.largest
    sections = list(index._facts.sections())
    arrays = {name: np.array(getattr(index, name)) for name, _, _ in sections}
    change(arrays)
    content, rest = index_file._digests(4, ((name, arrays[name].data.cast("B")) for name, _, _ in sections))
    with index.path.open("r+b") as file:
        file.seek(4096)
        file.writelines(array.tobytes() for array in arrays.values())
    with_header(index.path, content=content, rest=rest)
    assert f"has {problem} that contradict each other" in refusal(index.path)


def test_names_cannot_forge_lines(tmp_path: Path) -> None:
    index = make_index(tiny(tmp_path, (1,)), tmp_path / "index")
    content = index_file.IndexContent(
        4,
        ["a\nb\x1b[2J\udcff"],
        ["t"],
        *(getattr(index, n) for n in ("lengths", "firsts", "starts", "digests", "members")),
    )
    assert write_index(tmp_path / "2", content).shard_name(0) == "a\\nb\\x1b[2J\\udcff"


def test_spawned_process_reads_it(tmp_path: Path) -> None:
    index = make_index(tiny(tmp_path), tmp_path / "index", 4)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(index.ranges, range(5)) == [index.ranges(n) for n in range(5)]
