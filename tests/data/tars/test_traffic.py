"""Data ten times as large as the cache: each byte is fetched about once an epoch, whatever happens on the way."""

import errno
import itertools
import os
import random
import shutil
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.loading import global_batch, open_data, same
from tests.data.making import caption_shards, make_index
from tests.data.serving import FaultyServer, answer, reset_at_once, status
from vqclip import dist
from vqclip.data import Batch, CaptionShardsConfig, TrainData
from vqclip.data.remote import cache as cache_module
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.tars.open import cached_index
from vqclip.errors import StorageError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_times")]

SHARDS, SAMPLES, CHUNK, G = 20, 64, 8, 8
TOTAL = SHARDS * SAMPLES
STEPS = 2 * TOTAL // G  # two epochs
OPTIONS = {"tries": 4, "timeout_s": 5.0, "total_s": 60.0}
ORDER = {"kind": "windowed", "chunk": CHUNK}


class Bucket:
    """Shards on a server, and their bytes."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder, url
        self.bytes = sum(file.stat().st_size for file in folder.glob("*.tar"))

    def open(
        self,
        cache: Path,
        part: float,
        window: int,
        monkeypatch: pytest.MonkeyPatch,
        tries: int = 4,
        **options: Any,
    ) -> TrainData:
        """Opens the data with a cache for a part of them; and makes the index, which another machine made."""
        monkeypatch.setenv("VQCLIP_CACHE", str(cache))
        config = CaptionShardsConfig(path=f"{self.url}/{{00000..{SHARDS - 1:05d}}}.tar", remote=OPTIONS)
        index = cache.parent / "the index"
        path = cached_index(config.tars())
        if not index.exists():
            make_index(config.tars(), index, CHUNK)
        path.parent.mkdir(parents=True)
        shutil.copyfile(index, path)
        limit = RemoteConfig(cache_gib=part * self.bytes / 2**30, **OPTIONS | {"tries": tries})
        source = config.model_copy(update={"remote": limit})
        return open_data(cache, sources=(source,), order=ORDER | {"window": window}, batch_size=G, **options)

    def local(self, window: int) -> TrainData:
        """The same data from this disk."""
        source = CaptionShardsConfig(path=str(self.folder))
        return open_data(self.folder, sources=(source,), order=ORDER | {"window": window}, batch_size=G)


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of a window takes a moment here, and seconds elsewhere."""
    monkeypatch.setattr(cache_module, "_USED_S", 0.0)


@pytest.fixture
def bucket(server: FaultyServer, tmp_path: Path) -> Bucket:
    folder = caption_shards(tmp_path / "data", (SAMPLES,) * SHARDS)
    return Bucket(folder, server.add(folder, "/data"))


def require_all(batches: list[tuple[torch.Tensor, ...]]) -> None:
    ids = torch.cat([batch[0] for batch in batches])
    assert ids.bincount().tolist() == [2] * TOTAL


@pytest.mark.parametrize("workers", [0, 2])
def test_one_machine(
    bucket: Bucket, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    data = bucket.open(tmp_path / "cache", 0.1, window=6, monkeypatch=monkeypatch, workers=workers)
    server.sent = 0
    found = [global_batch([batch]) for batch in data.batches(0, STEPS)]
    require_all(found)
    ratio = server.sent / (2 * bucket.bytes)
    print(f"{workers} workers: {ratio:.3f} bytes fetched for each byte of data")
    assert 0.9 <= ratio <= 1.1
    folder = tmp_path / "cache" / "chunks"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 0.1 * bucket.bytes + 4096
    assert same(found, [global_batch([batch]) for batch in bucket.local(6).batches(0, STEPS)])


def test_four_machines_with_caches_of_their_own(
    bucket: Bucket, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[Batch]] = []
    nodes, sent = (0, 1, 2, 3), []
    monkeypatch.setattr(dist, "nodes", lambda: nodes)
    for node in nodes:
        data = bucket.open(tmp_path / f"cache {node}", 0.1, window=32, monkeypatch=monkeypatch)
        before = server.sent
        parts.append(list(data.batches(0, STEPS, node, nodes)))
        sent.append(server.sent - before)
    ratio = sum(sent) / (2 * bucket.bytes)
    print(f"4 nodes: {ratio:.3f} bytes fetched for each byte of data; {[round(each / sum(sent), 2) for each in sent]}")
    assert 0.9 <= ratio <= 1.2
    found = [global_batch(list(each)) for each in zip(*parts, strict=True)]
    require_all(found)
    assert same(found, [global_batch([batch]) for batch in bucket.local(32).batches(0, STEPS, 0, (0,))])


def test_a_storm_costs_no_bytes(
    bucket: Bucket, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """A third of the requests are refused, and of another tenth the connection breaks."""
    draws = random.Random(22)

    def storm(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        with server.counting:
            draw = draws.random()
        if draw < 0.33:
            status(503, Retry_After="1")(handler, body)
        elif draw < 0.43:
            reset_at_once(handler, body)
        else:
            answer(handler, body, part=handler.headers["Range"], count=server.count)

    data = bucket.open(tmp_path / "cache", 0.1, window=6, monkeypatch=monkeypatch, tries=20)
    server.sent = 0
    server.for_ever = dict.fromkeys(server.files, storm)
    found = [global_batch([batch]) for batch in data.batches(0, STEPS)]
    assert same(found, [global_batch([batch]) for batch in bucket.local(6).batches(0, STEPS)])
    print(f"storm: {server.sent / 2 / bucket.bytes:.3f} bytes fetched for each byte of data, {len(pauses)} pauses")
    assert 0.9 <= server.sent / (2 * bucket.bytes) <= 1.1
    assert len(pauses) > 100


def test_a_full_disk_ends_the_run_and_loses_nothing(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bucket.open(tmp_path / "cache", 0.1, window=6, monkeypatch=monkeypatch)
    expected = [global_batch([batch]) for batch in bucket.local(6).batches(0, STEPS)]
    found: list[tuple[torch.Tensor, ...]] = []
    write = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        if len(data) > 1000:  # a chunk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, at)

    for _ in range(3):
        batches = data.batches(len(found), STEPS)
        found += [global_batch([batch]) for batch in itertools.islice(batches, 30)]
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(
                StorageError, match=r"chunks: cannot be written \(No space left on device\); set VQCLIP"
            ):
                found += [global_batch([batch]) for batch in batches]
    found += [global_batch([batch]) for batch in data.batches(len(found), STEPS)]
    assert same(found[:STEPS], expected)
    assert not list((tmp_path / "cache" / "chunks").glob("*.part"))
