"""Reading in chunks gives the samples that an index of members gives, or an error that names what is wrong."""

import os
import pickle
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.data.making import caption_members, make_index, open_tars, write_tar
from tests.data.serving import FaultyServer, answer
from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.files import RemoteShard, Shard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.tars import make
from vqclip.data.tars.index import ByteRange
from vqclip.data.tars.members import USUAL
from vqclip.data.tars.reader import TarReader
from vqclip.errors import DataError, StorageError

COUNTS = (0, 5, 1, 0, 7)
"""Samples of the shards; chunks of four cross their ends."""


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths, first = [], 0
    for number, count in enumerate(COUNTS):
        members = caption_members(first, count)
        if number == 1:
            members["000000001.txt"] = b""
            del members["000000002.txt"]
            members["000000003.json"] = b" " * ((4 << 20) + 1)
        paths.append(write_tar(tmp_path / "shards" / f"{number}.tar", members))
        first += count
    return paths


def open_reader(shards: Sequence[Shard], folder: Path, local: Sequence[Path] = (), chunk: int = 4) -> TarReader:
    """A reader that reads in chunks, as of data at URLs or too large for an index of members."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "MOST_WITH_MEMBERS", 0)
        index = make_index(local or [shard for shard in shards if isinstance(shard, Path)], folder / "index", chunk)
    return TarReader(shards, index, USUAL, BoundedCache(folder / "chunks", 1 << 30), 20.0)


def outcome(reader: TarReader, sample: int, kind: str) -> bytes | tuple[str, str]:
    try:
        return reader.read(sample, kind)
    except StorageError:
        raise
    except DataError as error:
        return str(error), error.kind


def require_equal(reader: TarReader, expected: TarReader) -> None:
    assert len(reader) == len(expected) == sum(COUNTS)
    assert reader.index.facts.members == expected.index.facts.members
    for kind in ("image", "txt", "json", "cls"):
        for sample in reversed(range(len(expected))):
            assert outcome(reader, sample, kind) == outcome(expected, sample, kind)
    for sample in range(len(expected)):
        assert reader.name(sample) == expected.name(sample)
        assert reader.key(sample) == expected.key(sample)
        assert reader.place(sample) == expected.place(sample)
    assert reader.shards == expected.shards
    assert reader.index.facts.content == expected.index.facts.content


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_samples_are_those_of_the_shards(shards: list[Path], tmp_path: Path, chunk: int) -> None:
    reader, expected = open_reader(shards, tmp_path, chunk=chunk), open_tars(*shards)
    require_equal(reader, expected)
    require_equal(pickle.loads(pickle.dumps(reader)), expected)
    assert sum(path.stat().st_size for path in (tmp_path / "chunks").iterdir()) < 20_000  # tables only
    for sample in (-1, 13):
        with pytest.raises(IndexError):
            reader.read(sample, "txt")


def tables(folder: Path) -> list[Path]:
    return [path for path in (folder / "chunks").iterdir() if path.name not in ("lock", "ledger")]


def test_a_damaged_table_is_made_again(shards: list[Path], tmp_path: Path) -> None:
    reader, expected = open_reader(shards, tmp_path, chunk=13), open_tars(*shards)
    assert reader.read(0, "image") == expected.read(0, "image")
    (table,) = tables(tmp_path)
    whole = table.read_bytes()
    for at in (*range(0, 60, 7), 13 * 52, 13 * 52 + 8):  # of the head, the first sample and its name
        damaged = bytearray(whole)
        damaged[at] ^= 1
        table.write_bytes(damaged)
        reader.close()
        assert (reader.read(0, "image"), reader.key(0)) == (expected.read(0, "image"), "000000000")
        assert table.read_bytes() == whole
    (tmp_path / "chunks").rename(tmp_path / "away")
    reader.close()
    require_equal(reader, expected)


def test_what_was_changed_is_named(shards: list[Path], tmp_path: Path) -> None:
    reader = open_reader(shards, tmp_path)
    times = shards[1].stat()
    data = bytearray(shards[1].read_bytes())
    at = data.find(b"caption 4")
    data[at + 8] ^= 1
    with open(shards[1], "r+b") as file:
        file.write(data)
    with pytest.raises(StorageError, match=r"1\.tar.*the shard has changed since it was indexed") as error:
        reader.read(4, "txt")
    assert error.value.kind == "changed shard"
    os.utime(shards[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    for sample in (4, 5):  # the chunk of samples 4 to 7
        with pytest.raises(StorageError, match=r"bytes \d+ to \d+ of .*1\.tar.*another digest.*chunk 1 of") as error:
            reader.read(sample, "image")
        assert error.value.kind == "changed shard"
    assert reader.read(3, "txt") == b"caption 3"


def test_a_change_after_the_verification_is_named(shards: list[Path], tmp_path: Path) -> None:
    reader = open_reader(shards, tmp_path)
    assert reader.read(4, "txt") == b"caption 4"
    times = shards[1].stat()
    with open(shards[1], "r+b") as file:
        file.seek(shards[1].read_bytes().find(b"caption 4"))
        file.write(b"C")
    os.utime(shards[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StorageError, match=r"1\.tar: sample 000000004: its bytes have changed"):
        reader.read(4, "txt")


# ---- at URLs


def flipped(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """One bit is lost on the way."""
    answer(handler, body[:-600] + bytes([body[-600] ^ 1]) + body[-599:], part=handler.headers["Range"])


def open_remote(server: FaultyServer, shards: list[Path], folder: Path) -> TarReader:
    server.add(shards[0].parent, "/d")
    remote = [RemoteShard(f"{server.url}/d/{path.name}", RemoteConfig(tries=2, total_s=20.0)) for path in shards]
    return open_reader(remote, folder, shards)


def test_shards_on_a_server(shards: list[Path], tmp_path: Path, server: FaultyServer) -> None:
    reader, expected = open_remote(server, shards, tmp_path), open_tars(*shards)
    for sample in range(len(expected)):
        for kind in ("image", "txt", "json"):
            one, other = outcome(reader, sample, kind), outcome(expected, sample, kind)
            assert one == other or str(one).replace(f"{server.url}/d", str(shards[0].parent)) == str(other)
    assert len(tables(tmp_path)) == len(reader.index) == 4
    assert len(server.requests) == sum(len(reader.index.ranges(chunk)) for chunk in range(4))
    for table in tables(tmp_path):  # a bit in the content of a sample
        data = bytearray(table.read_bytes())
        data[data.find(b"caption") + 8] ^= 1
        table.write_bytes(data)
    reader.close()
    for sample in (0, 4, 8, 12):
        assert reader.read(sample, "txt") == expected.read(sample, "txt")


def test_damage_on_the_way_and_changes_on_the_server(shards, tmp_path, server, pauses):
    reader, expected = open_remote(server, shards, tmp_path), open_tars(*shards)
    reader.read(0, "image")
    server.faults["/d/4.tar"] = [flipped]
    assert reader.read(12, "image") == expected.read(12, "image")
    data = server.files["/d/4.tar"]
    server.files["/d/4.tar"] = data.replace(b"caption 8", b"Caption 8")
    with pytest.raises(StorageError, match=r"bytes \d+ to \d+ of http.*/d/4\.tar: changed.*read twice") as error:
        reader.read(8, "image")
    assert error.value.kind == "changed shard"
    server.files["/d/4.tar"] = data + bytes(512)
    with pytest.raises(StorageError, match=r"4\.tar: has changed since it was indexed"):
        reader.read(8, "image")
    server.files["/d/4.tar"] = data
    assert reader.read(8, "image") == expected.read(8, "image")


def test_a_table_that_was_verified_with_other_ranges(shards: list[Path], tmp_path: Path) -> None:
    """An index beside the data may be crafted: the same digests, other places."""
    reader = open_reader(shards, tmp_path)
    reader.read(3, "txt")
    reader.close()
    reader.index.ranges = lambda chunk: (ByteRange(1, 0, 512),)
    with pytest.raises(StorageError, match="make it again"):
        reader.read(3, "txt")
