import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from benchmarks.order import start
from hypothesis import given, settings
from hypothesis import strategies as st

from vqclip.data.batch import share_sizes
from vqclip.data.draws import hash_integers, permute
from vqclip.data.order import FullOrder, GlobalOrder, WindowedOrder
from vqclip.data.windows import Windows

Order = FullOrder | WindowedOrder

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)
WINDOWED = WindowedOrder(chunk=4, window=3)
ORDERS = pytest.mark.parametrize("kind", [FullOrder(), WINDOWED], ids=["full", "windowed"])


def test_every_permutation_of_a_few_is_about_as_likely() -> None:
    counts = Counter(tuple(permute(np.arange(4), 4, hash_integers(key)).tolist()) for key in range(4800))
    assert len(counts) == 24
    assert min(counts.values()) > 100
    assert max(counts.values()) < 320


def test_large_domains_look_shuffled() -> None:
    size = 1_000_003
    image = permute(np.arange(size), size, hash_integers(7))
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.005
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.005
    assert np.abs(np.diff(image)).min() > 0
    # Neighbours end up at neighbours no more often than by chance (2 of a million).
    assert (np.abs(np.diff(image)) == 1).sum() < 15
    other = permute(np.arange(size), size, hash_integers(8))
    assert (image == other).sum() < 15


@ORDERS
@settings(deadline=None, max_examples=50)
@given(sizes=SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 5), batch=st.integers(1, 80))
def test_each_sample_exactly_once_an_epoch(kind: Order, sizes: list[int], seed: int, epoch: int, batch: int) -> None:
    order = kind.build(sizes, [1.0] * len(sizes), seed, batch)
    assert order.epoch_size == sum(sizes)
    slots = order[np.arange(epoch * order.epoch_size, (epoch + 1) * order.epoch_size)]
    shown = sorted(zip(slots.source.tolist(), slots.sample.tolist(), strict=True))
    assert shown == [(source, sample) for source, size in enumerate(sizes) for sample in range(size)]
    assert (slots.epoch == epoch).all()


@ORDERS
@settings(deadline=None, max_examples=50)
@given(
    sizes=SIZES,
    weights=st.lists(st.sampled_from([0.01, 0.25, 0.3, 0.5, 1.0, 1.5, 3.0]), min_size=4, max_size=4),
    seed=st.integers(0, 99),
    epochs=st.integers(1, 9),
    batch=st.integers(1, 80),
)
def test_weights_are_kept_to_one_appearance_and_batches_have_no_sample_twice(kind, sizes, weights, seed, epochs, batch):
    order = kind.build(sizes, weights[: len(sizes)], seed, batch)
    end = order.begin(epochs)
    slots = order[np.arange(end)]
    for source, size in enumerate(sizes):
        mine = slots.source == source
        counts = np.bincount(slots.sample[mine], minlength=size)
        # Of the epochs together, in exact decimal arithmetic; see `test_an_epoch_has_its_part_of_the_running_total`.
        assert counts.sum() == epochs * size * Fraction(str(weights[source])) // 1
        assert counts.max() - counts.min() <= 1
        for step in (end // batch // 2, end // batch):
            assert order.count_used(step, source) == mine[: step * batch].sum()
        for step in range(end // batch):
            of_batch = slots.sample[step * batch : (step + 1) * batch][mine[step * batch : (step + 1) * batch]]
            assert len(of_batch) > size or len(np.unique(of_batch)) == len(of_batch)
        # The n-th appearance of a sample is in pass n - 1: no draw keyed by (pass, sample) comes twice.
        pairs = set(zip(slots.sample[mine].tolist(), slots.epoch[mine].tolist(), strict=True))
        assert len(pairs) == counts.sum()


@ORDERS
@pytest.mark.parametrize(("size", "batch"), [(320, 128), (320, 256), (257, 256), (256, 256), (100, 99), (7, 3), (5, 1)])
def test_passes_of_any_length_repeat_nothing_in_a_batch(kind: Order, size: int, batch: int) -> None:
    """Also passes of less than two batches, whose tails depend on their openings."""
    order, plain = kind.build([size], [1.0], 1, batch), kind.build([size], [1.0], 1)
    positions = np.arange(20 * size // batch * batch)
    found = order[positions].sample
    assert all(len(np.unique(each)) == batch for each in found.reshape(-1, batch))
    assert np.array_equal(order[positions[::-7]].sample, found[::-7])  # from any position
    changed = found != plain[positions].sample
    assert not changed[positions % size >= batch].any()
    assert changed.mean() < batch / size
    far = 10**9 * batch + np.arange(batch)
    assert len(np.unique(order[far].sample)) == batch


@ORDERS
@pytest.mark.parametrize(
    ("size", "weight", "expected"),
    [(5, 0.5, [2, 3, 2, 3]), (3, 0.4, [1, 1, 1, 1, 2]), (1, 0.01, [0] * 99 + [1, 0]), (10, 0.3, [3, 3, 3])],
)
def test_an_epoch_has_its_part_of_the_running_total(kind: Order, size: int, weight: float, expected: list[int]) -> None:
    order = kind.build([size, 1000], [weight, 1.0], 0)
    whole = order[np.arange(order.begin(len(expected)))]
    for epoch, count in enumerate(expected):
        first, end = order.begin(epoch), order.begin(epoch + 1)
        assert np.bincount(whole.source[first:end], minlength=2).tolist() == [count, 1000]
        assert [order.epoch_of(each) for each in (first, end - 1, end)] == [epoch, epoch, epoch + 1]
        part = order[np.arange(end - 1, first - 1, -1)]  # as from the beginning of the run
        assert np.array_equal(part.sample[::-1], whole.sample[first:end])
    far = kind.build([size], [weight], 0)[np.array([10**15 + 1, 10**15])]
    assert (np.abs(far.epoch - 10**15 // size) <= 1).all()  # cheap at any epoch


@pytest.mark.parametrize(
    ("kind", "sources", "samples"),
    [
        (FullOrder(), "100001100101101101100000", "282414096331002451371240"),
        (WINDOWED, "100001100101101101100000", "005844239113074223161385"),
    ],
)
def test_orders_are_the_same_in_every_version(kind: Order, sources: str, samples: str) -> None:
    # A change here makes runs unable to resume.
    slots = kind.build([10, 5], [1.0, 2.0], 3, 8)[np.arange(24)]
    assert ("".join(map(str, slots.source)), "".join(map(str, slots.sample))) == (sources, samples)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 900), chunk=st.integers(1, 40), window=st.integers(1, 120), key=st.integers(0, 2**64 - 1))
def test_a_window_reads_its_chunks_and_no_others(size: int, chunk: int, window: int, key: int) -> None:
    windows = Windows(size, chunk, window, key)
    places = np.arange(size)
    samples, of = windows.samples(places), windows.window_of(places)
    assert (np.diff(of) >= 0).all()
    assert of.max() == windows.windows - 1
    sizes = np.diff([windows.first_chunk(each) for each in range(windows.windows + 1)])
    assert sizes.max() - sizes.min() < 2 * windows.lanes
    assert -(-sizes.max() // windows.lanes) == windows.most_rows
    assert window / 2 <= sizes.mean() <= 3 * window / 2 or windows.windows == 1
    for number in range(windows.windows):
        chunks = np.unique(samples[of == number] // windows.chunk).tolist()
        assert len(chunks) == sizes[number]
        within = [sample for each in chunks for sample in range(each * windows.chunk, (each + 1) * windows.chunk)]
        assert sorted(samples[of == number].tolist()) == [sample for sample in within if sample < size]


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 900), chunk=st.integers(1, 9), window=st.integers(1, 120), key=st.integers(0, 2**64 - 1))
def test_a_round_has_a_sample_of_every_chunk_and_goes_through_the_lanes(size, chunk, window, key):
    windows = Windows(size, chunk, window, key)
    places = np.arange(size)
    chunks, lanes = windows.samples(places) // windows.chunk, windows.lane_of(places)
    assert all(len(set(lanes[chunks == each])) == 1 for each in range(windows.chunks))
    short = size % windows.chunk
    for number in range(windows.windows):
        first, end = windows.first_chunk(number), windows.first_chunk(number + 1)
        place = first * windows.chunk
        for each in range(windows.chunk):
            count = end - first - (0 < short <= each and number == windows.windows - 1)
            assert len(set(chunks[place : place + count])) == count
            assert np.array_equal(lanes[place : place + count], np.arange(count) % windows.lanes)
            place += count
        assert place == min(size, end * windows.chunk)


@pytest.mark.parametrize("topics", [50, 1000])
def test_topics_of_a_batch_vary_as_stated(topics: int) -> None:
    """Samples sorted by topic: variance of topic shares, independent draws = 1; it is 1, or G / window if larger."""
    size, batch = 4_000_000, 4096
    windows = {window: WindowedOrder(chunk=100, window=window) for window in (5000, 1000)}
    for kind, expected in ((FullOrder(), 1), (windows[5000], 1), (windows[1000], batch / 1000)):
        order, of_batch = kind.build([size], [1.0], 1), batch / topics
        drawn = (order[t * batch + np.arange(batch)].sample * topics // size for t in range(0, 960, 32))
        counts = [np.bincount(each, minlength=topics) for each in drawn]
        found = np.mean([((each - of_batch) ** 2 / of_batch).sum() / (topics - 1) for each in counts])
        assert 0.75 * expected < found < 1.25 * expected


@pytest.mark.parametrize("kind", [FullOrder(), WindowedOrder()], ids=["full", "windowed"])
def test_orders_of_billions_cost_no_memory(kind: Order) -> None:
    order = kind.build([1_300_000_000, 77], [1.0, 2.0], 1, 4096)
    border = order[order.begin(3) // 4096 * 4096 + np.arange(8192)]
    assert set(border.epoch[border.source == 0].tolist()) == {2, 3}
    slots = order[10**6 * 4096 + np.arange(4096)]
    chunks = np.unique(slots.sample[slots.source == 0] // 128)
    assert len(chunks) > 3_800
    assert slots.sample.max() < 1_300_000_000


# ---- nodes and ranks

LARGE = WindowedOrder(chunk=100, window=5000)
SMALL = WindowedOrder(chunk=4, window=100)
EITHER = pytest.mark.parametrize("kind", [FullOrder(), SMALL], ids=["full", "windowed"])


def layout(nodes: int, ranks: int) -> list[int]:
    return [rank // ranks for rank in range(nodes * ranks)]


def nodes_of(order: GlobalOrder, step: int, nodes: list[int]) -> np.ndarray:
    """The node that makes each sample of a global batch."""
    node = np.full(order.batch_size, -1)
    for rank, each in enumerate(nodes):
        node[order.deal(step, rank, nodes)[1]] = each
    return node


@EITHER
@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    batch=st.integers(1, 300),
    nodes=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    step=st.integers(0, 50),
)
def test_the_parts_of_all_ranks_are_the_global_batch(kind, sizes, batch, nodes, step):
    order = kind.build(sizes, [1.0, 0.5, 2.0][: len(sizes)], 5, batch)
    whole = order[step * batch + np.arange(batch)]
    places = []
    for rank in range(len(nodes)):
        slots, mine = order.deal(step, rank, nodes)
        assert len(mine) == share_sizes(batch, len(nodes))[rank]
        assert (np.diff(mine) > 0).all()
        for each, everyone in zip(slots, whole, strict=True):
            assert np.array_equal(each, everyone[mine])
        places += mine.tolist()
    assert sorted(places) == list(range(batch))


def test_a_node_gets_samples_of_its_own_lanes_only_where_the_numbers_divide() -> None:
    """In all windows but the last of a pass, whose rows are not full; also in the second pass."""
    size, batch = 1_000_003, 4080
    order = LARGE.build([size], [1.0], 5, batch)
    for nodes, step in itertools.product((2, 3, 60), (0, 3, 117, 250)):
        passes, place = np.divmod(np.arange(step * batch, (step + 1) * batch), size)
        windows = order.windows(0, int(passes[0]))
        assert (windows.lanes, windows.windows, int(passes[-1])) == (960, 2, step // 200)
        assert np.array_equal(nodes_of(order, step, layout(nodes, 2)), windows.lane_of(place) % nodes)


@pytest.mark.parametrize(("nodes", "batch", "most"), [(4, 600, 1), (4, 599, 1.01), (16, 600, 1.05), (9, 601, 1.05)])
def test_few_chunks_are_read_by_two_nodes(nodes: int, batch: int, most: float) -> None:
    """Pairs of a node and a chunk that it reads, per chunk of the window."""
    order = WindowedOrder(chunk=30, window=2000).build([60_000], [1.0], 5, batch)
    pairs = set()
    for step in range(60_000 // batch):
        node = nodes_of(order, step, layout(nodes, 1))
        chunks = order[step * batch + np.arange(batch)].sample // 30
        pairs |= set(zip(node.tolist(), chunks.tolist(), strict=True))
    assert 1 <= len(pairs) / 2000 <= most


def test_nodes_of_different_sizes_own_as_much_as_they_use() -> None:
    order = WindowedOrder(chunk=30, window=1920).build([57_600], [1.0], 5, 600)
    node = nodes_of(order, 3, [0, 0, 0, 0, 1, 1])
    lanes = order.windows(0).lane_of(np.arange(1800, 2400))
    assert np.array_equal(node, np.where(lanes % 3 == 2, 1, 0))


@pytest.mark.parametrize(("nodes", "rank", "start"), [([0, 0], 1, 1), (layout(3, 2), 5, 0), (layout(7, 1), 3, 16)])
def test_needs_name_the_chunks_of_a_node_in_the_order_of_use(nodes: list[int], rank: int, start: int) -> None:
    sizes, batch = [6011, 900], 400
    order, used, foreign = SMALL.build(sizes, [1.0, 1.0], 5, batch), 0, 0
    found: list[set[tuple[int, int]]] = []
    for source in range(len(sizes)):
        needs = list(itertools.islice(order.needs(start, source, rank, nodes), 3000))
        assert needs == sorted(needs)
        places = [(*divmod(used, sizes[source]), chunk) for used, chunk in needs]
        found.append({(passes, chunk) for passes, _, chunk in places})
        assert len(found[-1]) == len(needs)
        in_window = Counter((passes, int(order.windows(source).window_of(np.array(at)))) for passes, at, _ in places)
        assert max(in_window.values()) <= order.window_chunks(source, rank, nodes)
    for step in range(start, start + 20):  # over the end of the epoch
        slots = order.deal(step, rank, nodes)[0]
        for source, sample, passes in zip(*(part.tolist() for part in slots), strict=True):
            used, foreign = used + 1, foreign + ((passes, sample // 4) not in found[source])
    assert foreign == 0 if len(set(nodes)) == 1 else foreign < 0.05 * used


# ---- a billion samples, with an index that is made without the data


@pytest.mark.slow
@pytest.mark.parametrize("samples", [10**6, 1_300_000_000])
def test_memory_before_the_first_batch(samples, tmp_path):
    first, further = start(samples, tmp_path)
    assert first["after"]["pss"] - first["before"]["pss"] < 400
    assert further["after"]["pss"] - further["before"]["pss"] < 50
    assert first["samples"] == further["samples"]
    assert len(set(first["samples"])) == 64
    assert max(first["samples"]) < samples
