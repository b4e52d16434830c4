"""The global batches of data that are read in chunks: those of the same order read shard by shard."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.data.loading import global_batches, open_data, same
from tests.data.making import caption_shards, class_folder, make_index
from tests.data.serving import FaultyServer
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, TrainData
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data.tars.index import open_index
from vqclip.data.tars.open import cached_index, index_name
from vqclip.data.tars.reader import TarReader
from vqclip.errors import ConfigError, DataError, StorageError

WINDOWED = {"kind": "windowed", "chunk": 6, "window": 3}
COUNTS = (9, 0, 8, 14)
STEPS = 8
"""Batches of ten samples; an epoch has 31 + 5 + 6."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    caption_shards(tmp_path / "a", COUNTS)
    caption_shards(tmp_path / "b", (7, 3), first=100)
    class_folder(tmp_path / "c", 6)
    return tmp_path


@pytest.fixture(autouse=True)
def _wait_for_fetches() -> Iterator[None]:
    """Threads that fetch ahead end with their last chunk, and the server should not end before."""
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread.name == "vqclip-fetch" and thread not in before:
            thread.join(20)


def sources(where: Path | str) -> tuple[SourceConfigBase, ...]:
    options, half = RemoteConfig(tries=3, total_s=60.0), {"weight": 0.5, "captions": "json", "json_keys": ("many",)}
    return (
        CaptionShardsConfig(path=f"{where}/a/{{00000..{len(COUNTS) - 1:05d}}}.tar", remote=options),
        CaptionShardsConfig(path=f"{where}/b/{{00000..00001}}.tar", remote=options, **half),
        ClassShardsConfig(path=f"{where}/c", split="train", remote=options),
    )


@pytest.fixture
def expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """Batches of the same order, read shard by shard."""
    with monkeypatch.context() as context:
        for config in (CaptionShardsConfig, ClassShardsConfig):
            context.setattr(config, "in_chunks", SourceConfigBase.in_chunks)
        data = open_data(folder, sources=sources(folder), order=WINDOWED)
        return global_batches(data, 0, STEPS, 1)


def open_chunks(where: Path | str) -> TrainData:
    data = open_data(Path(), sources=sources(where), order=WINDOWED)
    assert all(isinstance(source.tars, TarReader) for source in data.samples.sources)
    return data


def require_same(data, expected, nodes, start=0):
    assert same(global_batches(data, start, STEPS, len(nodes), nodes), expected[start:])


def test_batches_of_local_shards(folder: Path, expected: list[tuple[torch.Tensor, ...]]) -> None:
    data = open_chunks(folder)
    require_same(data, expected, (0,))
    require_same(data, expected, (0, 0, 1), start=5)
    again = open_chunks(folder)
    assert again.fingerprint == data.fingerprint
    assert [source["samples"] for source in data.fingerprint["sources"]] == [31, 10, 6]
    os.utime(folder / "a" / "00000.tar")
    assert open_chunks(folder).fingerprint == data.fingerprint  # other times, the same content
    caption_shards(folder / "b", (7, 3), first=200)
    changed = open_chunks(folder).fingerprint
    pairs = zip(changed["sources"], data.fingerprint["sources"], strict=True)
    assert [one == other for one, other in pairs] == [True, False, True]


def test_batches_of_shards_on_a_server(folder, expected, server, cache):
    url = server.add(folder, "/data")
    data = open_chunks(url)
    server.requests.clear()
    require_same(data, expected, (0, 0, 1))
    tars = [request for request in server.requests if request.endswith(".tar")]
    indexes = [source.tars.index for source in data.samples.sources]
    assert len(tars) <= sum(len(index.ranges(chunk)) for index in indexes for chunk in range(len(index)))
    assert not (cache / "packed").exists()
    assert open_chunks(folder).fingerprint == data.fingerprint


# ---- what does not fit


def one_source(url: str, gib: float = 1.0) -> CaptionShardsConfig:
    remote = RemoteConfig(cache_gib=gib, tries=2, total_s=20.0)
    return CaptionShardsConfig(path=f"{url}/{{00000..00003}}.tar", remote=remote)


def test_indexes_that_do_not_fit(folder, server, tmp_path, caplog, monkeypatch):
    url = server.add(folder / "a", "/a")
    size = sum(len(data) for data in server.files.values()) / 2**30
    with pytest.raises(DataError, match=r"data\.sources\[0\]: http.*00000\.tar and 3 more: no index.*data index"):
        open_data(folder, sources=(one_source(url, 0.9 * size),), order=WINDOWED)
    shards = one_source(url, 0.9 * size).tars()
    index = make_index(sorted((folder / "a").iterdir()), tmp_path / "index", 4)
    server.files[f"/a/{index_name(shards)}"] = index.path.read_bytes()
    with pytest.raises(ConfigError, match=r"order\.chunk: got 6, and the index .* has chunks of 4 samples.*--chunk 6"):
        open_data(folder, sources=(one_source(url, 0.9 * size),), order=WINDOWED)
    order = {"kind": "windowed", "chunk": 8, "window": 2}
    cached_index(shards).unlink()
    with pytest.raises(ConfigError, match=r"data\.order\.window: a window takes .* GiB of the cache of a node"):
        open_data(folder, sources=(one_source(url, 0.5 * size),), order=order)
    data = open_data(folder, sources=(one_source(url, 0.9 * size),), order=order)
    assert "the cache has room for 1." in caplog.text
    ids = torch.cat([batch.sample_ids for batch in data.batches(0, 31)])
    assert ids.bincount().tolist() == [10] * 31


def test_other_indexes_that_cannot_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vqclip.data.tars.make.MOST_WITH_MEMBERS", 0)
    local = CaptionShardsConfig(path=str(folder / "a"))
    data = open_data(folder, sources=(local,), order=WINDOWED)
    path = cached_index(local.tars())
    with monkeypatch.context() as context:
        context.setattr("vqclip.data.tars.open.MAX_CHUNK", 5000)
        with pytest.raises(DataError, match=r"data\.sources\[0\]: .*a chunk of 6 samples has .*--chunk 16"):
            open_data(folder, sources=(local,), order=WINDOWED)
    content = bytearray(path.read_bytes())
    content[content.find(open_index(path).digests[1].tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"the file is damaged.*It was in the cache and is removed: start again"):
        open_data(folder, sources=(local,), order=WINDOWED)
    assert open_data(folder, sources=(local,), order=WINDOWED).fingerprint == data.fingerprint
    assert open_data(folder, sources=(local,), order={"kind": "windowed", "chunk": 4}).epoch_size == sum(COUNTS)


# ---- interruptions


def test_the_cache_may_go_and_shards_may_change(folder, expected, cache, server):
    data = open_chunks(server.add(folder, "/data"))
    batches = data.batches()
    for number, (batch, (ids, *_)) in enumerate(zip(batches, expected, strict=False)):
        assert torch.equal(batch.sample_ids, ids)
        if number in (1, 4):
            (cache / "chunks").rename(cache / f"chunks before {number}")
    for name, content in server.files.items():
        server.files[name] = content.replace(b"caption ", b"Caption ")
    (cache / "chunks").rename(cache / "former chunks")
    with pytest.raises(StorageError, match=r"a/0000\d\.tar: changed since they were indexed.*run\.resume_allow"):
        list(itertools.islice(batches, 40))


def test_an_outdated_index_in_the_cache_gives_way(folder: Path, server: FaultyServer) -> None:
    """To the one beside the shards, after a run has met the difference."""
    url, tars = server.add(folder / "a", "/a"), sorted((folder / "a").iterdir())
    shards = one_source(url).tars()
    beside = f"/a/{index_name(shards)}"
    server.files[beside] = make_index(tars, folder / "index", 6).path.read_bytes()
    data = open_data(folder, sources=(one_source(url),), order=WINDOWED)
    for path in tars:
        path.write_bytes(path.read_bytes().replace(b"caption ", b"Caption "))
        server.files[f"/a/{path.name}"] = path.read_bytes()
    server.files[beside] = make_index(tars, folder / "index", 6).path.read_bytes()
    with pytest.raises(StorageError, match="changed since they were indexed"):
        list(data.batches(0, 1))
    data = open_data(folder, sources=(one_source(url),), order=WINDOWED)
    assert len(list(data.batches(0, STEPS))) == STEPS
