"""Chunks that the workers of a node fetch ahead: when, how many, and who."""

import itertools
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from vqclip.data.order import WindowedOrder
from vqclip.data.tars import ahead
from vqclip.data.tars.ahead import ChunkSupply, FetchAhead, PlannedFetch
from vqclip.errors import StorageError

SIZE, CHUNK, WINDOW, G = 96, 4, 6, 6
"""Four windows of four rounds; each round is a batch."""
STEPS = range(0, sys.maxsize)


class Fetched:
    """The chunks that were fetched; fetching chunk 3 raises the error, if there is one."""

    def __init__(self, error=None):
        self.chunks, self.error = [], error

    def __call__(self, chunk):
        self.chunks.append(chunk)
        if chunk == 3 and self.error:
            raise self.error

    def come_to(self, count):
        """The chunks, when there are so many; or more, if more come soon after."""
        end = time.monotonic() + 20
        while len(self.chunks) < count and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        return sorted(self.chunks)


class Reader:
    """A reader whose chunks of the index are half as long as those of the order, and take a byte."""

    index, is_remote, total_bytes = SimpleNamespace(chunk=CHUNK // 2), True, 2 * SIZE // CHUNK
    cache = SimpleNamespace(room=24)

    def __init__(self):
        self.fetch = Fetched()

    def __len__(self):
        return SIZE

    def cached_bytes(self, chunk):
        return 1

    def supply(self, rank=0, nodes=(0,)):
        order = WindowedOrder(chunk=CHUNK, window=WINDOW).build([SIZE], [1.0], 7, G)
        return ChunkSupply.find([SimpleNamespace(tars=self)], order, rank, nodes)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # The first window, the second one from the second round on, and the third one likewise.
        (STEPS, [12, 14, 24, 24, 24, 26, 36]),
        # Of the second window, the first two rounds: what is late is left to the reader, so wait.
        (range(0, 6), [12, 14, 24, 24, 24, 24]),
    ],
)
def test_a_window_is_fetched_after_the_first_round_of_the_one_before(steps, expected):
    reader = Reader()
    each = reader.supply().start(steps)
    for step, count in enumerate(expected):
        each.advance(step)
        assert len(reader.fetch.come_to(count)) == count
    each.close()
    assert len(set(reader.fetch.chunks)) == expected[-1]
    assert len(list(reader.supply().plan(range(2, 3), 0))) == 12, "a round needs each chunk of the window"


@pytest.mark.parametrize(("ranks", "expected"), [(1, [6, 6, 7, 12]), (2, [3, 3, 3, 3])])
def test_the_slowest_worker_decides(monkeypatch, ranks, expected):
    """Only the first fetches: one process holds one set of threads."""
    reader = Reader()
    each = reader.supply(nodes=(0,) * ranks).start(STEPS, workers=2, lead=2)
    for (worker, step), count in zip(((0, 0), (0, 2), (1, 1), (1, 2)), expected, strict=True):
        monkeypatch.setattr(ahead, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker, num_workers=2))
        each.advance(step)
        assert len(reader.fetch.come_to(count)) == count
    each.close()


def test_workers_of_a_node_divide_its_chunks(monkeypatch):
    parts = []
    for rank, worker in ((0, 0), (0, 1), (2, 0), (2, 1)):
        monkeypatch.setattr(ahead, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker, num_workers=2))
        reader = Reader()
        each = reader.supply(rank, (5, 9, 5)).start(STEPS, workers=2)
        each.advance(0)
        reader.fetch.come_to(1)
        each.close()
        parts.append(set(reader.fetch.chunks))
    plan = Reader().supply(2, (5, 9, 5)).plan(STEPS, 0)
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert set.union(*parts) <= {next(plan).chunk for _ in range(24)}


PLAN = [PlannedFetch(position=10 * number, size=100, chunk=number) for number in range(100)]


def test_chunks_are_fetched_up_to_the_bound():
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


def test_a_chunk_larger_than_the_room_is_fetched_alone():
    fetched = Fetched()
    ahead = FetchAhead(PLAN, fetched, room=99)
    for number in range(5):
        assert fetched.come_to(number + 1) == list(range(number + 1))
        ahead.advance(10 * number)
    ahead.close()


def test_what_cannot_be_fetched_is_left_to_the_reader_and_other_errors_are_raised():
    fetched = Fetched(StorageError("gone"))
    ahead = FetchAhead(PLAN, fetched, room=10_000)
    assert len(fetched.come_to(100)) == 100
    ahead.advance(1000)
    fetched = Fetched(ZeroDivisionError("a bug"))
    ahead = FetchAhead(PLAN, fetched, room=10_000, threads=1)
    assert fetched.come_to(4) == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        ahead.advance(0)


def test_close_ends_the_threads():
    before, fetched = threading.active_count(), Fetched()
    ahead = FetchAhead(PLAN, fetched, room=300)
    fetched.come_to(3)
    assert threading.active_count() > before
    ahead.close()
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.001)
    assert threading.active_count() == before
    assert fetched.come_to(3) == [0, 1, 2]
