"""Figures of `vqclip data plan` beside those of real small runs, from a web server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.data.loading import open_data
from tests.data.making import caption_shards
from tests.data.serving import FaultyServer, serving
from vqclip.data import CaptionShardsConfig
from vqclip.data.chunks.index_file import open_index
from vqclip.data.chunks.location import index_name
from vqclip.data.chunks.make import make_index
from vqclip.data.order import WindowedOrder
from vqclip.data_tools.plan import Job, Plan, WindowedPlan
from vqclip.data_tools.plan_counts import count_index

pytestmark = pytest.mark.slow

SHARDS, SAMPLES, CHUNK, WINDOW, BATCH, EPOCHS = 20, 118, 4, 120, 20, 2
KIND = WindowedOrder(chunk=CHUNK, window=WINDOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,360 samples in 590 chunks, of five windows with 14 lanes; ten chunks cross the end of a shard."""
    folder = caption_shards(tmp_path_factory.mktemp("data") / "shards", (SAMPLES,) * SHARDS)
    shards = sorted(folder.glob("*.tar"))
    make_index(shards, folder / index_name(shards), CHUNK)
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as running:
        yield running


def run(server: FaultyServer, folder: Path, tmp_path: Path, nodes: int, steps: int, cache_gib: float) -> None:
    """Train for some steps on simulated nodes, one process each, with a cache each."""
    url = f"{server.add(folder)}/{{00000..{SHARDS - 1:05}}}.tar"
    for node in range(nodes):
        os.environ["VQCLIP_CACHE"] = str(tmp_path / f"cache{node}")
        source = CaptionShardsConfig(path=url, remote={"cache_gib": cache_gib})
        with mock.patch("vqclip.dist.nodes", return_value=tuple(range(nodes))):
            data = open_data(tmp_path, sources=(source,), batch_size=BATCH, order=KIND)
        for _ in data.batches(0, steps, node, nodes, nodes=list(range(nodes))):
            pass


def plan_of(folder: Path, **job: object) -> Plan:
    index = open_index(next(folder.glob("*.index")))
    return WindowedPlan([count_index(index, at_urls=True)], Job(BATCH, order=KIND, **job))  # type: ignore[arg-type]


def ranges(server: FaultyServer) -> int:
    return sum(".tar" in each for each in server.requests)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_requests_bytes_and_cache(nodes, folder, server, tmp_path, monkeypatch):
    """The next window, a fifth of an epoch, is fetched ahead of the last one."""
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path))
    needed = plan_of(folder, nodes=nodes).cache_bytes * 1.001 / 0.95 / 2**30
    plan = plan_of(folder, nodes=nodes, cache_gib=needed)
    assert plan.advice() == []
    run(server, folder, tmp_path, nodes, EPOCHS * int(plan.epoch_steps), needed)
    sent = server.sent - nodes * next(folder.glob("*.index")).stat().st_size
    assert EPOCHS - 0.05 < ranges(server) / plan.epoch_requests < 1.15 * (EPOCHS + 0.2)
    assert EPOCHS - 0.05 < sent / plan.epoch_bytes < 1.15 * (EPOCHS + 0.2)
    for node in range(nodes):
        chunks = (tmp_path / f"cache{node}" / "chunks").glob("*-chunk")  # parts may go at any moment
        used = sum(each.stat().st_size for each in chunks)
        assert 0.6 * plan.cache_bytes < used < 1.1 * plan.cache_bytes


def test_bytes_of_the_first_batch(folder, server, tmp_path, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path))
    monkeypatch.setattr("vqclip.data.chunks.supply.ChunkSupply.advance", lambda *_: None)  # nothing ahead of need
    plan = plan_of(folder)
    run(server, folder, tmp_path, 1, 1, 1.0)
    index = next(folder.glob("*.index")).stat().st_size
    assert server.sent - index == pytest.approx(plan.first_batch_bytes, rel=0.2)


MEMORY = """
import json, os, re, sys, time
from pathlib import Path
from vqclip.data import DataConfig
from vqclip.towers.bpe import BPE

def pss(pid="self"):
    return float(re.search(r"Pss_Anon: +(\\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[1]) * 1000

def shared():  # batches, which no process has mapped until they are used
    files = [each for each in Path("/proc/self/fd").iterdir() if str(each.resolve()).startswith("/dev/shm/torch")]
    return sum(os.stat(each).st_blocks * 512 for each in files)

order = {"kind": "windowed", "chunk": 8, "window": 30}
config = DataConfig(sources=({"kind": "shards", "path": sys.argv[1]},), order=order, workers=2)
data = config.build(224, BPE(32).with_lengths, 240, 0)
before = pss()
batches = data.batches()
for _ in range(4):
    batch = next(batches)
time.sleep(2)
workers = Path("/proc/self/task").glob("*/children")
total = shared() + pss() + sum(pss(pid) for each in workers for pid in each.read_text().split())
print(json.dumps(total - before))
"""


def test_memory_of_a_rank(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path))
    command = [sys.executable, "-c", MEMORY, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    index = open_index(next(folder.glob("*.index")))
    plan = WindowedPlan([count_index(index, at_urls=False)], Job(240, order=KIND))
    assert json.loads(done.stdout) == pytest.approx(plan.rank_bytes, rel=0.3)
