from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.making import caption_shards
from vqclip.cli.data import main
from vqclip.data.chunks.index_file import open_index
from vqclip.data.chunks.location import index_name
from vqclip.data.chunks.make import make_index
from vqclip.data.order import FullOrder, WindowedOrder
from vqclip.data_tools.plan import DataCounts, FullPlan, Job, WindowedPlan, make_plan
from vqclip.data_tools.plan_counts import count_index
from vqclip.errors import ConfigError

BILLION = DataCounts(1_300_000_000, 130_000, 10 * 10**12)
SMALL = DataCounts(24_000, 24, 24_000_000, chunk=8)
KIND = WindowedOrder(chunk=8, window=960)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_billion_samples_on_64_machines(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--samples", "1.3e9", "--shards", "130000", "--bytes", "10e12"]
    found = run(capsys, *numbers, "--nodes", "64", "--gpus", "8", "--batch", "32768", "--request-price", "0.5")
    assert found["index"] == pytest.approx(256e6, rel=0.01)
    assert found["cache of a machine"] == pytest.approx(2 * 4.2e6 / 64 * (10e12 / 1.3e9 + 80), rel=0.03)
    assert found["bytes an epoch"] == pytest.approx(10e12)
    assert found["requests an epoch"] == pytest.approx(1.3e9 / 128 + 130_000, rel=1e-3)
    assert found["price of an epoch"] == pytest.approx((1.3e9 / 128 + 130_000) / 1000 * 0.5, rel=1e-3)
    assert found["seconds an epoch"] == pytest.approx(1.3e9 / 512_000)
    assert found["bytes a second"] == pytest.approx(10e12 / (1.3e9 / 512_000))
    assert found["mixing, simulated"][0] == pytest.approx(found["mixing"], rel=0.15)
    assert found["advice"] == []


@pytest.mark.parametrize(("nodes", "batch"), [(1, 480), (7, 480), (8, 1000), (8, 1001)])
def test_chunks_that_several_nodes_need_are_those_of_the_order(nodes: int, batch: int) -> None:
    plan = WindowedPlan([SMALL], Job(batch, nodes, 2, KIND, seed=3))
    of_rank = np.repeat(np.arange(nodes), 2).tolist()
    steps = range(int(plan.windows[0].first_chunk(1)) * 8 // batch)
    chunks: list[set[int]] = [set() for _ in range(nodes)]
    for step, (rank, node) in itertools.product(steps, enumerate(of_rank)):
        chunks[node].update((plan.order.deal(step, batch, rank, of_rank).slots.sample // 8).tolist())
    real = sum(map(len, chunks)) / len(set().union(*chunks)) - 1
    assert real - 0.01 <= plan.extra[0] <= real + 0.051


@pytest.mark.parametrize("batch", [101, 700, 2999])
def test_mixing_by_formula_is_that_of_the_order(batch: int) -> None:
    data = DataCounts(2_000_000, 31_250, 10**9, chunk=64)
    plan = WindowedPlan([data], Job(batch, order=WindowedOrder(chunk=64, window=960)))
    steps = np.random.default_rng(0).integers(2_000_000 // batch, size=100)
    samples = [plan.order.batch(int(step), batch).sample // 64 for step in steps]
    pairs = [(np.unique(each, return_counts=True)[1] ** 2).sum() / batch for each in samples]
    assert plan.mixing == pytest.approx(np.mean(pairs), rel=0.08)


def test_shards_fetched_in_the_full_order_are_those_of_a_simulated_cache() -> None:
    data, batch, nodes = DataCounts(40_000, 40, 40 * 2**20), 80, 2
    plan = FullPlan([data], Job(batch, nodes, 1, FullOrder(), cache_gib=10 / 1024))
    fetched, steps = 0, 100
    for node in range(nodes):
        held: dict[int, None] = {}
        for step in range(steps):
            for shard in (plan.order.deal(step, batch, node, range(nodes)).slots.sample // 1000).tolist():
                fetched += shard not in held
                held.pop(shard, None)
                held[shard] = None
                if len(held) > 10:
                    held.pop(next(iter(held)))
    assert plan.epoch_requests == pytest.approx(fetched / steps * plan.epoch_steps, rel=0.05)
    assert "fetched 750 times" in plan.advice()[0]
    assert "windowed" in plan.advice()[0]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(32_768, cache_gib=50), "raise remote.cache_gib to 65.5, or lower data.order.window to 24,9"),
        (Job(32_768, cache_gib=1e-4), "raise remote.cache_gib to 65.5, or use more nodes"),
        (Job(32_768, 64, 8, order=WindowedOrder(window=1024)), "raise data.order.window to 32,768"),
        (
            Job(4096, 7, 8, WindowedOrder(window=1024)),
            "3% of the chunks are fetched by several of the 7 nodes; 8 nodes",
        ),
        (Job(32_768, 64, 8, bandwidth=30e6), "at 30 MB/s a GPU gets 488 images a second"),
        (Job(32_768, order=FullOrder()), "114.4 GB of indexes"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(job: Job, words: str) -> None:
    assert any(words in each for each in make_plan([BILLION], job).advice()), make_plan([BILLION], job).advice()


@pytest.mark.parametrize(("cache", "then"), [(100, "fetches all of them"), (1e-3, "ends: they exceed the cache")])
def test_a_missing_index_at_urls(cache: float, then: str) -> None:
    data = replace(SMALL, at_urls=True, is_indexed=False)
    assert f"without one training {then}" in make_plan([data], Job(64, order=KIND, cache_gib=cache)).advice()[0]


def test_sizes_come_from_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = caption_shards(tmp_path / "shards", counts=(5, 3, 8))
    assert main(["plan", str(folder), "--batch", "4"]) == 1
    assert "no index; make it (vqclip data index SOURCE)" in capsys.readouterr().err
    shards = sorted(folder.glob("*.tar"))
    make_index(shards, folder / index_name(shards), chunk=4)
    found = run(capsys, str(folder), "--batch", "4", "--chunk", "4", "--window", "2")
    assert (found["samples"], found["requests an epoch"]) == (16, 0)
    assert found["bytes an epoch"] == sum(each.stat().st_size for each in shards)
    assert count_index(open_index(folder / index_name(shards)), at_urls=True).requests == 4 + 1
    assert main(["plan", str(folder), "--batch", "4", "--chunk", "6"]) == 2
    assert "multiple of the 4 samples" in capsys.readouterr().err


def test_small_local_data_need_no_change() -> None:
    assert WindowedPlan([DataCounts(480, 12, 10**6, at_urls=False)], Job(64, 2, 4)).advice() == []


def test_a_missing_index_is_to_be_made() -> None:
    plan = WindowedPlan([replace(BILLION, is_indexed=False)], Job(32_768, 64, 8))
    assert plan.preparation_bytes == BILLION.bytes
    assert "vqclip data index" in plan.advice()[0]


def test_several_sources_share_the_batch() -> None:
    whole = WindowedPlan([SMALL], Job(240, 2, 1, KIND))
    halves = WindowedPlan([DataCounts(12_000, 12, 12_000_000, chunk=8, crossing=0)] * 2, Job(240, 2, 1, KIND))
    assert halves.epoch_s == whole.epoch_s
    assert halves.epoch_bytes == whole.epoch_bytes
    assert halves.epoch_requests == whole.epoch_requests - 23
    assert halves.first_batch_bytes == pytest.approx(whole.first_batch_bytes)
    twice = WindowedPlan([replace(SMALL, weight=2.0)], Job(240, 2, 1, KIND))
    for figure in ("epoch_s", "epoch_bytes", "epoch_requests"):
        assert getattr(twice, figure) == pytest.approx(2 * getattr(whole, figure))


def test_a_batch_reads_no_more_than_a_window() -> None:
    plan = WindowedPlan([SMALL], Job(5000, order=KIND))
    assert plan.first_batch_bytes == pytest.approx(SMALL.bytes / plan.windows[0].windows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "10", "--shards", "1", "--bytes", "99", "--batch", "11"], "more than the 10 samples"),
        (["--samples", "10", "--batch", "1"], "--shards: got nothing"),
        (["--batch", "1"], "--samples: got nothing; expected SOURCE"),
        (["--samples", "10", "--shards", "1", "--bytes", "99"], "--batch: got nothing"),
        (["--config", "x.yaml", "--batch", "2"], "--batch: got it beside --config"),
        (["x.tar", "--samples", "3", "--batch", "2"], "--samples: got it beside SOURCE"),
        (["--order", "full", "--window", "3", "--batch", "2"], "--window: got it beside --order full"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "nan", "inf", "ten"])
def test_numbers_are_whole(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--samples", number, "--batch", "2"])
    assert "expected a whole number from 1, such as 1.3e9" in capsys.readouterr().err


def test_chunks_of_the_order_are_whole_chunks_of_the_index() -> None:
    with pytest.raises(ConfigError, match="got 12; expected a multiple of the 8"):
        WindowedPlan([SMALL], Job(240, order=WindowedOrder(chunk=12)))
