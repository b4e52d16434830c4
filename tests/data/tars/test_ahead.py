"""Chunks fetched before they are needed: their order, the bound, errors, and the end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from vqclip.data.tars.ahead import FetchAhead, PlannedFetch
from vqclip.errors import StorageError

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


def test_workers_divide_the_chunks_and_the_room() -> None:
    every = [Fetched() for _ in range(3)]
    for number, fetched in enumerate(every):
        FetchAhead(PLAN, fetched, room=1000, worker=number, workers=3)
    assert [fetched.come_to(3) for fetched in every] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


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
