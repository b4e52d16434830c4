"""Chunks that the workers of a node fetch ahead: when, how many, and who."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vqclip.data.order import WindowedOrder
from vqclip.data.tars import ahead
from vqclip.data.tars.ahead import ChunkSupply, FetchAhead, PlannedFetch
from vqclip.errors import StorageError

SIZE, CHUNK, WINDOW, G = 96, 4, 6, 6
"""Four windows of four rounds; each round is a batch."""
STEPS = range(0, sys.maxsize)


class Reader:
    """A reader whose chunks of the index are half as long as those of the order, and take a byte."""

    index = SimpleNamespace(chunk=CHUNK // 2)
    is_remote = True
    total_bytes = 2 * SIZE // CHUNK

    def __init__(self, cache_room: int) -> None:
        self.cache_room = cache_room
        self.chunks: list[int] = []
        self.fetch = self.chunks.append

    def __len__(self) -> int:
        return SIZE

    def cached_bytes(self, chunk: int) -> int:
        return 1

    def count(self, expected: int) -> int:
        """Number of the chunks that were fetched, when there are so many; or more, if more come soon after."""
        end = time.monotonic() + 5
        while len(self.chunks) < expected and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.01)
        return len(self.chunks)


def supply_of(reader: Reader, rank: int = 0, nodes: Sequence[int] = (0,)) -> ChunkSupply:
    order = WindowedOrder(chunk=CHUNK, window=WINDOW).build([SIZE], [1.0], 7, G)
    supply = ChunkSupply.find([SimpleNamespace(tars=reader)], order, rank, nodes)
    assert supply is not None
    return supply


def test_a_window_is_fetched_after_the_first_round_of_the_one_before() -> None:
    reader = Reader(cache_room=24)
    each = supply_of(reader).start(STEPS)
    # The first window, the second one from the second round on, and the third one likewise.
    for step, expected in enumerate([12, 14, 24, 24, 24, 26, 36]):
        each.advance(step)
        assert reader.count(expected) == expected
    each.close()
    assert len(set(reader.chunks)) == 36


def test_no_chunk_is_fetched_that_only_later_steps_need() -> None:
    reader = Reader(cache_room=24)
    each = supply_of(reader).start(range(0, 6))  # of the second window, the first two rounds
    for step, expected in enumerate([12, 14, 24, 24, 24, 24]):  # what is late is left to the reader, so wait
        each.advance(step)
        assert reader.count(expected) == expected
    each.close()
    plan = list(supply_of(reader).plan(range(2, 3), 0))
    assert len(plan) == 12, "a round needs each chunk of the window"


@pytest.mark.parametrize(("ranks", "expected"), [(1, [6, 6, 7, 12]), (2, [3, 3, 3, 3])])
def test_the_slowest_worker_decides(monkeypatch: pytest.MonkeyPatch, ranks: int, expected: list[int]) -> None:
    reader = Reader(cache_room=24)
    each = supply_of(reader, nodes=(0,) * ranks).start(STEPS, workers=2, lead=2)
    found = []
    for worker, step in (
        (0, 0),
        (0, 2),
        (1, 1),
        (1, 2),
    ):  # only the first fetches: one process holds one set of threads
        info: Any = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr(ahead, "get_worker_info", lambda info=info: info)
        each.advance(step)
        found.append(reader.count(expected[len(found)]))
    each.close()
    assert found == expected


def test_workers_of_a_node_divide_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[set[int]] = []
    for rank, worker in ((0, 0), (0, 1), (2, 0), (2, 1)):
        info: Any = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr(ahead, "get_worker_info", lambda info=info: info)
        reader = Reader(cache_room=24)
        each = supply_of(reader, rank, (5, 9, 5)).start(STEPS, workers=2)
        each.advance(0)
        reader.count(1)
        each.close()
        parts.append(set(reader.chunks))
    plan = supply_of(Reader(24), 2, (5, 9, 5)).plan(STEPS, 0)
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert set.union(*parts) <= {next(plan).chunk for _ in range(24)}


PLAN = [PlannedFetch(position=10 * number, size=100, chunk=number) for number in range(100)]


class Fetched:
    """What was fetched, and what each fetch waits for."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self._lock = threading.Lock()

    def __call__(self, chunk: int) -> None:
        with self._lock:
            self.chunks.append(chunk)
        assert self.may_end.wait(20)

    def come_to(self, count: int) -> list[int]:
        """The chunks, when there are so many; or more, if more come soon after."""
        end = time.monotonic() + 20
        while len(self.chunks) < count and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        return sorted(self.chunks)


def test_chunks_are_fetched_up_to_the_bound() -> None:
    fetched = Fetched()
    ahead = FetchAhead(itertools.chain(PLAN, itertools.repeat(PLAN[-1])), fetched, room=550)
    assert fetched.come_to(5) == list(range(5))
    ahead.advance(0)
    assert fetched.come_to(6) == list(range(6))
    ahead.advance(29)
    assert fetched.come_to(8) == list(range(8))
    ahead.advance(5)  # never back
    ahead.advance(500)  # faster than the threads: what the reader has fetched itself is left out
    assert fetched.come_to(13) == [*range(8), *range(51, 56)]
    ahead.close()


def test_several_at_once() -> None:
    fetched = Fetched()
    fetched.may_end.clear()
    ahead = FetchAhead(PLAN, fetched, room=10_000, threads=3)
    assert fetched.come_to(3) == [0, 1, 2]
    fetched.may_end.set()
    assert fetched.come_to(100) == list(range(100))
    ahead.advance(2000)


def test_a_chunk_larger_than_the_room_is_fetched_alone() -> None:
    fetched = Fetched()
    ahead = FetchAhead(PLAN, fetched, room=99)
    for number in range(5):
        assert fetched.come_to(number + 1) == list(range(number + 1))
        ahead.advance(10 * number)
    ahead.close()


def failing(error: Exception) -> Callable[[int], None]:
    fetched = Fetched()

    def fetch(chunk: int) -> None:
        fetched(chunk)
        if chunk == 3:
            raise error

    fetch.fetched = fetched  # type: ignore[attr-defined]
    return fetch


def test_what_cannot_be_fetched_is_left_to_the_reader() -> None:
    fetch = failing(StorageError("gone"))
    ahead = FetchAhead(PLAN, fetch, room=10_000)
    assert len(fetch.fetched.come_to(100)) == 100  # type: ignore[attr-defined]
    ahead.advance(1000)


def test_other_errors_are_raised() -> None:
    fetch = failing(ZeroDivisionError("a bug"))
    ahead = FetchAhead(PLAN, fetch, room=10_000, threads=1)
    assert fetch.fetched.come_to(4) == [0, 1, 2, 3]  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        ahead.advance(0)


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    fetched = Fetched()
    ahead = FetchAhead(PLAN, fetched, room=300)
    fetched.come_to(3)
    assert threading.active_count() > before
    ahead.close()
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.001)
    assert threading.active_count() == before
    assert fetched.come_to(3) == [0, 1, 2]
