from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vqclip.data.dealing import share_sizes
from vqclip.data.order import FullOrder, WindowedOrder

WINDOWED = WindowedOrder(chunk=100, window=5000)
SMALL = WindowedOrder(chunk=4, window=100)


def layout(nodes: int, ranks: int) -> list[int]:
    return [rank // ranks for rank in range(nodes * ranks)]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    batch=st.integers(1, 300),
    nodes=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    step=st.integers(0, 50),
)
def test_the_parts_of_all_ranks_are_the_global_batch(sizes: list[int], batch: int, nodes: list[int], step: int) -> None:
    order = SMALL.build(sizes, [1.0, 0.5, 2.0][: len(sizes)], 5)
    whole = order.batch(step, batch)
    places = []
    for rank in range(len(nodes)):
        part = order.deal(step, batch, rank, nodes)
        assert len(part.places) == share_sizes(batch, len(nodes))[rank]
        assert (np.diff(part.places) > 0).all()
        for mine, everyone in zip(part.slots, whole, strict=True):
            assert np.array_equal(mine, everyone[part.places])
        places += part.places.tolist()
    assert sorted(places) == list(range(batch))


@pytest.mark.parametrize("kind", [FullOrder(), SMALL], ids=["full", "windowed"])
def test_one_node_and_the_full_order_take_every_nth_sample(kind: FullOrder | WindowedOrder) -> None:
    order = kind.build([5000], [1.0], 5)
    nodes = [0, 0, 0] if kind is SMALL else [0, 1, 1]
    for rank in range(3):
        assert order.deal(7, 50, rank, nodes).places.tolist() == list(range(rank, 50, 3))


def test_a_node_gets_samples_of_its_own_lanes_only_where_the_numbers_divide() -> None:
    """In all windows but the last of a pass, whose rows are not full; also in the second pass."""
    size, batch = 1_000_003, 4080
    order = WINDOWED.build([size], [1.0], 5)
    for nodes, step in itertools.product((2, 3, 60), (0, 3, 117, 250)):
        passes, place = np.divmod(np.arange(step * batch, (step + 1) * batch), size)
        windows = order.windows(0, int(passes[0]))
        assert (windows.lanes, windows.windows, int(passes[-1])) == (960, 2, step // 200)
        assert np.array_equal(order.nodes(step, batch, layout(nodes, 2)), windows.lane_of(place) % nodes)


@pytest.mark.parametrize(
    ("nodes", "batch", "most"), [(4, 600, 1), (4, 599, 1.01), (7, 600, 1.03), (16, 600, 1.05), (9, 601, 1.05)]
)
def test_few_chunks_are_read_by_two_nodes(nodes: int, batch: int, most: float) -> None:
    """Pairs of a node and a chunk that it reads, per chunk of the window."""
    order = WindowedOrder(chunk=30, window=2000).build([60_000], [1.0], 5)
    pairs = set()
    for step in range(60_000 // batch):
        node = order.nodes(step, batch, layout(nodes, 2))
        pairs |= set(zip(node.tolist(), (order.batch(step, batch).sample // 30).tolist(), strict=True))
    assert 1 <= len(pairs) / 2000 <= most


def test_nodes_of_different_sizes_own_as_much_as_they_use() -> None:
    order = WindowedOrder(chunk=30, window=1920).build([57_600], [1.0], 5)
    node = order.nodes(3, 600, [0, 0, 0, 0, 1, 1])
    lanes = order.windows(0).lane_of(np.arange(1800, 2400))
    assert np.array_equal(node, np.where(lanes % 3 == 2, 1, 0))


@pytest.mark.parametrize(("nodes", "rank", "start"), [([0, 0], 1, 1), (layout(3, 2), 5, 0), (layout(7, 1), 3, 16)])
def test_needs_name_the_chunks_of_a_node_in_the_order_of_use(nodes: list[int], rank: int, start: int) -> None:
    sizes, batch = [6011, 900], 400
    order, used, foreign = SMALL.build(sizes, [1.0, 1.0], 5), 0, 0
    found: list[dict[tuple[int, int], int]] = []
    for source in range(len(sizes)):
        needs = list(itertools.islice(order.needs(start, batch, source, rank, nodes), 3000))
        found.append({(need.passes, need.chunk): need.place for need in needs})
        assert len(found[-1]) == len(needs)
        assert [need[1:] for need in needs] == sorted(need[1:] for need in needs)
        in_window = Counter((need.passes, int(order.windows(source).window_of(np.array(need.place)))) for need in needs)
        assert max(in_window.values()) <= order.window_chunks(source, rank, nodes)
    for step in range(start, start + 20):  # over the end of the epoch
        slots = order.deal(step, batch, rank, nodes).slots
        for source, sample, passes in zip(*(part.tolist() for part in slots), strict=True):
            used, foreign = used + 1, foreign + ((passes, sample // 4) not in found[source])
    assert foreign == 0 if len(set(nodes)) == 1 else foreign < 0.05 * used
