"""Processes that fetch, read and die together, for half a minute."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.data import serving
from tests.data.serving import FaultyServer
from vqclip.data.remote import RemoteConfig, RemoteShard

pytestmark = pytest.mark.faults

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])  # torch takes seconds to import
SHARDS, SIZE, ROOM = 8, 200_000, 3
WHOLE = {hashlib.sha256(random.Random(number).randbytes(SIZE + number)).hexdigest() for number in range(SHARDS)}


@pytest.fixture
def urls(server: FaultyServer) -> list[str]:
    server.files |= {f"/{number}.tar": random.Random(number).randbytes(SIZE + number) for number in range(SHARDS)}
    return [f"{server.url}/{number}.tar" for number in range(SHARDS)]


def options(room: int) -> RemoteConfig:
    return RemoteConfig(cache_gib=room * (SIZE + SHARDS) / 2**30, total_s=60.0)


def use_cache(cache: Path) -> None:
    os.environ.update(VQCLIP_CACHE=str(cache), no_proxy="*")


def read_at_random(cache: Path, urls: list[str], room: int, seed: int, seconds: float, results) -> None:
    """Opens shards and compares what is in them: (reads, wrong ones)."""
    use_cache(cache)
    draws, end, reads, wrong = random.Random(seed), time.monotonic() + seconds, 0, []
    while time.monotonic() < end:
        number = draws.randrange(SHARDS)
        file = RemoteShard(urls[number], options(room)).open()
        try:
            if os.pread(file, 2 * SIZE, 0) != random.Random(number).randbytes(SIZE + number):
                wrong.append(number)
        finally:
            os.close(file)
        reads += 1
    results.put((reads, wrong))


def require_whole(cache: Path) -> None:
    for path in (cache / "shards").glob("*.tar"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in WHOLE


@pytest.mark.parametrize("room", [1, ROOM])
def test_processes_share_a_small_cache(server: FaultyServer, urls: list[str], cache: Path, room: int) -> None:
    results = CONTEXT.Queue()
    workers = [
        CONTEXT.Process(target=read_at_random, args=(cache, urls, room, seed, 6.0, results)) for seed in range(3)
    ]
    largest, over = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not over.wait(0.002):
            size = 0
            for entry in os.scandir(cache / "shards") if (cache / "shards").exists() else ():
                try:
                    size += entry.stat().st_size
                except FileNotFoundError:  # seen before it went; so a sum may be of what never was at once, but is not
                    continue  # larger than what was at either moment
            largest = max(largest, size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for worker in workers:
            worker.start()
        found = [results.get(timeout=120) for _ in workers]
        for worker in workers:
            worker.join(60)
    finally:
        over.set()
        watcher.join()
        for worker in workers:
            worker.kill()
    assert all(not wrong for _, wrong in found)
    assert sum(reads for reads, _ in found) > 30
    assert len(server.requests) > SHARDS  # it did fetch again
    # A scan is not one moment: what is evicted and what replaces it may both be in it.
    assert largest <= (room + 2) * (SIZE + SHARDS) + 24  # with the ledger
    assert sum(path.stat().st_size for path in (cache / "shards").iterdir()) <= options(room).cache_bytes + 24
    require_whole(cache)


def fetch_all(cache: Path, urls: list[str], ready) -> None:
    use_cache(cache)
    ready.set()
    for url in urls:
        os.close(RemoteShard(url, options(SHARDS)).open())


def test_kills_while_fetching(server: FaultyServer, urls: list[str], cache: Path) -> None:
    """The moment of a kill is drawn: the shard that is asked for, and how long after."""
    draws = random.Random(0)
    for path in server.files:
        server.for_ever[path] = serving.late(server, 0.03)
    killed = 0
    for _ in range(20):
        for path in (cache / "shards").glob("*.tar"):
            path.unlink()
        ready = CONTEXT.Event()
        process = CONTEXT.Process(target=fetch_all, args=(cache, urls, ready))
        process.start()
        assert ready.wait(120)
        before, goal = len(server.requests), draws.randrange(len(urls))
        while process.is_alive() and len(server.requests) - before <= goal:
            time.sleep(0.001)
        process.join(draws.uniform(0.0, 0.06))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        killed += process.exitcode == -signal.SIGKILL
        require_whole(cache)
    assert killed >= 10
    for number, url in enumerate(urls):
        file = RemoteShard(url, options(SHARDS)).open()
        assert os.pread(file, 2 * SIZE, 0) == server.files[f"/{number}.tar"]
        os.close(file)
    assert not list((cache / "shards").glob("*.part"))
