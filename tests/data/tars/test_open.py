"""Where an index is looked for, and which one is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data import serving
from tests.data.making import count_calls, make_index
from tests.data.serving import FaultyServer
from tests.data.tars.test_index import tiny
from vqclip.data.remote.files import RemoteShard, Shard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.sources.paths import find_shards
from vqclip.data.tars import open as module
from vqclip.data.tars.index import TarIndex, open_index
from vqclip.data.tars.open import cached_index, data_folder, find_index, index_name
from vqclip.errors import DataError, StorageError


def remote(*urls: str, **options: float) -> list[RemoteShard]:
    return [RemoteShard(url, RemoteConfig(**{"tries": 3, "total_s": 5.0, **options})) for url in urls]


def place(shards: Sequence[Shard]) -> Path | None:
    index = find_index(shards)
    return None if index is None else index.path


def test_folder_of_the_data() -> None:
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


def test_name_depends_on_the_names_below_the_folder() -> None:
    one = index_name(remote("https://me:pw@x/a/0.tar?k=1", "https://me:pw@x/a/1.tar?k=2"))
    assert one == index_name([Path("/d/0.tar"), Path("/d/1.tar")])
    assert one != index_name([Path("/d/0.tar"), Path("/d/2.tar")])


def test_index_beside_local_data_or_in_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = tiny(tmp_path)
    assert find_index(shards) is None
    cached = make_index(shards, cached_index(shards)).path
    assert place(shards) == cached
    beside = make_index(shards, tmp_path / index_name(shards)).path
    assert place(shards) == beside
    assert find_index(shards[:-1]) is None
    beside.write_bytes(b"x")
    assert place(shards) == cached
    assert f"{beside}: cannot be read" in caplog.text
    os.utime(shards[2])
    assert find_index(shards) is None  # made from another file
    shards[2].unlink()
    assert find_index(shards) is None


def test_index_at_a_url_is_fetched_once(
    tmp_path: Path, server: FaultyServer, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    shards = tiny(tmp_path)
    there = remote(*(f"{server.url}/a/{path.name}?key=secret" for path in shards))
    assert find_index(there) is None
    index = make_index(shards, tmp_path / index_name(shards))
    server.files[f"/a/{index.path.name}"] = index.path.read_bytes()
    server.faults[f"/a/{index.path.name}"] += [serving.status(503), serving.truncated]
    found = find_index(there)
    assert found is not None
    assert found.path == cached_index(there)
    assert len(pauses) == 2
    assert found.facts == index.facts
    assert "secret" not in caplog.text
    before = len(server.requests)
    assert place(there) == found.path
    assert len(server.requests) == before
    shutil.rmtree(found.path.parent)
    server.for_ever[f"/a/{index.path.name}"] = serving.status(503)
    with pytest.raises(StorageError, match=r"HTTP 503") as error:
        find_index(there)
    assert "secret" not in str(error.value)
    server.for_ever[f"/a/{index.path.name}"] = serving.status(403)
    assert find_index(there) is None


def test_damaged_and_crafted_indexes_at_a_url(
    tmp_path: Path, server: FaultyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_cache_that_cannot_be_written(tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written .*set VQCLIP_CACHE to a folder with room"):
        find_index(remote(f"{server.url}/a/0.tar"))


def test_names_of_many_urls_take_few_calls() -> None:
    """130,000 URLs are named before the first step: at most 15 calls of Python functions for each."""

    def name() -> None:
        shards = find_shards(["http://127.0.0.1:9/data/{0000..3999}.tar"])
        assert data_folder(shards) == "http://127.0.0.1:9/data"
        assert (cached_index(shards).suffix, index_name(shards)[-6:]) == (".tars", ".index")

    assert count_calls(name) < 15 * 4000
