"""Chunks that the workers of a node fetch ahead: when, how many, and who."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vqclip.data.order import WindowedOrder
from vqclip.data.tars import ahead
from vqclip.data.tars.ahead import ChunkSupply, NodeNeeds, find_needs

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


def needs_of(reader: Reader, rank: int = 0, nodes: Sequence[int] = (0,)) -> NodeNeeds:
    order = WindowedOrder(chunk=CHUNK, window=WINDOW).build([SIZE], [1.0], 7)
    needs = find_needs([SimpleNamespace(tars=reader)], order, G, rank, nodes)
    assert needs is not None
    return needs


def test_a_window_is_fetched_after_the_first_round_of_the_one_before() -> None:
    reader = Reader(cache_room=24)
    each = ChunkSupply(needs_of(reader), STEPS)
    # The first window, the second one from the second round on, and the third one likewise.
    for step, expected in enumerate([12, 14, 24, 24, 24, 26, 36]):
        each.advance(step)
        assert reader.count(expected) == expected
    each.close()
    assert len(set(reader.chunks)) == 36


def test_no_chunk_is_fetched_that_only_later_steps_need() -> None:
    reader = Reader(cache_room=24)
    each = ChunkSupply(needs_of(reader), range(0, 6))  # of the second window, the first two rounds
    for step, expected in enumerate([12, 14, 24, 24, 24, 24]):  # what is late is left to the reader, so wait
        each.advance(step)
        assert reader.count(expected) == expected
    each.close()
    plan = list(needs_of(reader).plan(range(2, 3), 0))
    assert len(plan) == 12, "a round needs each chunk of the window"


@pytest.mark.parametrize(("ranks", "expected"), [(1, [6, 6, 7, 12]), (2, [3, 3, 3, 3])])
def test_the_slowest_worker_decides(monkeypatch: pytest.MonkeyPatch, ranks: int, expected: list[int]) -> None:
    reader = Reader(cache_room=24)
    each = ChunkSupply(needs_of(reader, nodes=(0,) * ranks), STEPS, workers=2, lead=2)
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
        each = ChunkSupply(needs_of(reader, rank, (5, 9, 5)), STEPS, workers=2)
        each.advance(0)
        reader.count(1)
        each.close()
        parts.append(set(reader.chunks))
    plan = needs_of(Reader(24), 2, (5, 9, 5)).plan(STEPS, 0)
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert set.union(*parts) <= {next(plan).chunk for _ in range(24)}


@pytest.mark.parametrize(
    ("nodes", "told"), [((0, 0), ""), ((0, 1, 2), "lanes of chunks in a window: 1, and nodes: 3;")]
)
def test_a_window_too_small_for_the_nodes_is_warned_of(
    caplog: pytest.LogCaptureFixture, nodes: Sequence[int], told: str
) -> None:
    needs_of(Reader(cache_room=24), nodes=nodes).warn()
    assert bool(caplog.messages) == bool(told)
    assert told in caplog.text
