"""Indexes are made of parts, which processes share, and of which only missing ones are made."""

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data import serving
from tests.data.making import caption_members, count_calls, make_index, write_tar
from tests.data.serving import FaultyServer
from tests.data.tars.test_index import tiny
from vqclip.data.remote.files import RemoteShard, Shard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.sources.paths import find_shards
from vqclip.data.table_file import open_table, save_table
from vqclip.data.tars import make
from vqclip.data.tars import open as module
from vqclip.data.tars.index import TarIndex, open_index
from vqclip.data.tars.make import IndexMaker, Parts
from vqclip.data.tars.open import cached_index, data_folder, find_index, index_name
from vqclip.errors import DataError, StorageError


def test_crafted_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be in a bucket: places and counts that no index may have."""
    shards = tiny(tmp_path)
    maker = IndexMaker(shards, Parts(tmp_path / "parts"))
    maker.read_all()
    for number, change in (
        (1, lambda facts, arrays: facts["members"].__setitem__(0, -1)),
        (2, lambda facts, arrays: arrays.update(starts=arrays["starts"][:-1])),
        (3, lambda facts, arrays: arrays.update(starts=arrays["starts"] + 512)),
        (5, lambda facts, arrays: arrays.pop("digests")),
        (6, lambda facts, arrays: arrays.update(key_ends=arrays["key_ends"] * 9)),
    ):
        path = tmp_path / "parts" / maker._part_name(number)
        facts, arrays = open_table(path, {})
        arrays = {name: array.copy() for name, array in arrays.items()}
        change(facts, arrays)
        save_table(path, facts, arrays, "x")
    scanned, scan = list[str](), make.scan_shard
    monkeypatch.setattr(make, "scan_shard", lambda shard, *args: scanned.append(shard.name) or scan(shard, *args))
    assert maker.write(tmp_path / "index", 4).facts == make_index(shards, tmp_path / "other", 4).facts
    assert sorted(scanned[:5]) == [shards[number].name for number in (1, 2, 3, 5, 6)]


def test_damaged_shards_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    shards = tiny(tmp_path)
    for number in (1, 2):
        os.truncate(shards[number], 5000)
    maker = IndexMaker(shards, Parts(tmp_path / "parts"))
    with pytest.raises(DataError, match=r"(?s)2 shards cannot be indexed:.*[12].tar: ends at .*[12].tar: ends at"):
        maker.read_all(2)
    assert maker.missing() == [1, 2]
    with pytest.raises(DataError, match=r"1.tar: ends at offset 5000"):
        make_index(shards[:2], tmp_path / "1")


def test_what_cannot_be_indexed(tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard, message in (
        (tmp_path / "none.tar", "none.tar: shard cannot be opened: No such file"),
        (tmp_path, "is compressed|Is a directory"),
    ):
        with pytest.raises(DataError, match=message):
            make_index([shard], tmp_path / "index")
    shards = tiny(tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"index of .* cannot be written \((File exists|Not a directory)\).*set VQCLIP"):
        make_index(shards, tmp_path / "file" / "index", parts=Parts(tmp_path / "parts"))
    with pytest.raises(DataError, match=r"index of .* cannot be written \((File exists|Not a directory)\).*set VQCLIP"):
        make_index(shards, tmp_path / "index", parts=Parts(tmp_path / "file" / "parts"))
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written .*set VQCLIP_CACHE to another folder"):
        find_index(remote(f"{server.url}/a/0.tar"))


def test_a_shard_that_is_written_to_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = tiny(tmp_path)
    maker = IndexMaker(shards, Parts(tmp_path / "parts"))
    with shards[1].open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"1.tar: was written to while it was indexed"):
        maker.read_all()


def test_shards_at_urls_are_read_in_streams(tmp_path, server, pauses, cache):
    shards = [write_tar(tmp_path / f"{n}.tar", caption_members(4 * n, 4)) for n in range(3)]
    for path in shards:
        server.files[f"/{path.name}"], server.tags[f"/{path.name}"] = path.read_bytes(), f'"{path.name}"'
    there = remote(*(f"{server.url}/{path.name}?key=secret" for path in shards))
    parts = Parts(tmp_path / "parts")
    maker = IndexMaker(there, parts)
    server.faults["/1.tar"] += [serving.truncated, serving.status(503)]
    maker.read_all(2)
    index = maker.write(tmp_path / "index", 5)
    assert len(pauses) == 2
    assert index.facts.content == make_index(shards, tmp_path / "local", 5).facts.content
    assert [index.tags.read(n) for n in range(3)] == ["0.tar", "1.tar", "2.tar"]
    assert b"secret" not in index.path.read_bytes()
    # one object changes, with equal size
    server.tags["/2.tar"] = '"other"'
    assert IndexMaker(there, parts).missing() == [2]
    server.for_ever["/2.tar"] = serving.status(404)
    with pytest.raises(StorageError, match=r"2.tar.* not found \(404\)") as error:
        IndexMaker(there, parts)
    assert "secret" not in str(error.value)
    server.for_ever["/2.tar"] = serving.unannounced
    with pytest.raises(StorageError, match="the server announces no size"):
        IndexMaker(there, parts)


def test_an_error_of_a_server_stops_all(tmp_path: Path, server: FaultyServer, pauses: list[float]) -> None:
    shards = [write_tar(tmp_path / f"{n}.tar", caption_members(n, 1)) for n in range(2)]
    url = server.add(tmp_path)
    maker = IndexMaker(remote(*(f"{url}/{path.name}" for path in shards)), Parts(tmp_path / "parts"))
    server.for_ever["/0.tar"] = serving.status(503)
    server.for_ever["/1.tar"] = serving.dribbling(server, 0.001)
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"0.tar: cannot be fetched: HTTP 503"):
        maker.read_all(2)
    assert time.monotonic() - start < 5
    assert threading.active_count() < 20


# ---- Where an index is looked for, and which one is used.


def remote(*urls: str, **options: float) -> list[RemoteShard]:
    return [RemoteShard(url, RemoteConfig(**{"tries": 3, "total_s": 5.0, **options})) for url in urls]


def index_place(shards: Sequence[Shard]) -> Path | None:
    index = find_index(shards)
    return None if index is None else index.path


def test_folder_of_the_data_and_name_below_it() -> None:
    assert data_folder([Path("/a/b/0.tar"), Path("/a/b/1.tar")]) == Path("/a/b")
    assert data_folder([Path("/a/b/0.tar"), Path("/a/c/1.tar")]) == Path("/a")
    assert data_folder([Path("/a/0.tar"), Path("/b/1.tar")]) is None
    assert data_folder([Path("/a/b/0.tar"), *remote("s3://x/1.tar")]) is None
    assert data_folder([]) is None
    assert data_folder(remote("s3://x/a/0.tar", "s3://x/a/b/1.tar")) == "s3://x/a"
    assert data_folder(remote("s3://x/ab/0.tar", "s3://x/ac/1.tar")) == "s3://x"
    assert data_folder(remote("s3://x/0.tar", "s3://y/0.tar")) is None
    assert data_folder(remote("https://u:p@x/a/0.tar?k=1", "https://u:p@x/a/1.tar?k=1")) == "https://u:p@x/a?k=1"
    assert data_folder(remote("https://x/a/0.tar?k=1", "https://x/a/1.tar?k=2")) is None
    one = index_name(remote("https://me:pw@x/a/0.tar?k=1", "https://me:pw@x/a/1.tar?k=2"))
    assert one == index_name([Path("/d/0.tar"), Path("/d/1.tar")])
    assert one != index_name([Path("/d/0.tar"), Path("/d/2.tar")])


def test_index_beside_local_data_or_in_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = tiny(tmp_path)
    assert find_index(shards) is None
    cached = make_index(shards, cached_index(shards)).path
    assert index_place(shards) == cached
    beside = make_index(shards, tmp_path / index_name(shards)).path
    assert index_place(shards) == beside
    assert find_index(shards[:-1]) is None
    beside.write_bytes(b"x")
    assert index_place(shards) == cached
    assert f"{beside}: cannot be read" in caplog.text
    os.utime(shards[2])
    assert find_index(shards) is None  # made from another file
    shards[2].unlink()
    assert find_index(shards) is None


def test_index_at_a_url_is_fetched_once(tmp_path, server, pauses, caplog):
    shards = tiny(tmp_path)
    there = remote(*(f"{server.url}/a/{path.name}?key=secret" for path in shards))
    assert find_index(there) is None
    index = make_index(shards, tmp_path / index_name(shards))
    server.files[f"/a/{index.path.name}"] = index.path.read_bytes()
    server.faults[f"/a/{index.path.name}"] += [serving.status(503), serving.truncated]
    found = find_index(there)
    assert found.path == cached_index(there)
    assert len(pauses) == 2
    assert found.facts == index.facts
    assert "secret" not in caplog.text
    before = len(server.requests)
    assert index_place(there) == found.path
    assert len(server.requests) == before
    shutil.rmtree(found.path.parent)
    server.for_ever[f"/a/{index.path.name}"] = serving.status(503)
    with pytest.raises(StorageError, match=r"HTTP 503") as error:
        find_index(there)
    assert "secret" not in str(error.value)
    server.for_ever[f"/a/{index.path.name}"] = serving.status(403)
    assert find_index(there) is None


def test_damaged_and_crafted_indexes_at_a_url(tmp_path, server, caplog, monkeypatch):
    shards = tiny(tmp_path)
    there = remote(*(f"{server.url}/a/{path.name}" for path in shards))
    good = make_index(shards, tmp_path / "index").path.read_bytes()
    name = f"/a/{index_name(shards)}"
    server.files[name] = good[:-1] + bytes([good[-1] ^ 1])
    verified: list[bool] = []

    def verify(path: Path) -> TarIndex:
        verified.append(cached_index(there).exists())  # other processes would open it
        return open_index(path)

    monkeypatch.setattr(module, "open_index", verify)
    with pytest.raises(DataError, match=rf"{server.url}{name}: does not match its own checksums.*vqclip data index"):
        find_index(there)
    assert verified == [False]
    server.files[name] = make_index(shards[:3], tmp_path / "other").path.read_bytes()
    assert find_index(there) is None
    monkeypatch.setattr(module, "_LARGEST_OF_SHARD", 300)
    server.files[name] = good
    cached_index(there).unlink(missing_ok=True)
    with pytest.raises(DataError, match=f"{server.url}{name}: has {len(good)} bytes; at most 2400 are read"):
        find_index(there)


def test_names_of_many_urls_take_few_calls() -> None:
    """130,000 URLs are named before the first step: at most 15 calls of Python functions for each."""

    def name() -> None:
        shards = find_shards(["http://127.0.0.1:9/data/{0000..3999}.tar"])
        assert data_folder(shards) == "http://127.0.0.1:9/data"
        assert (cached_index(shards).suffix, index_name(shards)[-6:]) == (".tars", ".index")

    assert count_calls(name) < 15 * 4000
