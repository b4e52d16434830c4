"""Figures of `vqclip data plan`: by hand, from an index, and beside real small runs from a web server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.data.loading import open_data
from tests.data.making import caption_shards
from tests.data.serving import serving
from vqclip.cli.data import main
from vqclip.data import CaptionShardsConfig
from vqclip.data.order import FullOrder, WindowedOrder
from vqclip.data.tars.locate import index_name
from vqclip.data.tars.make import make_index
from vqclip.data_tools.plan import DataCounts, Job, count_source, make_plan
from vqclip.errors import ConfigError

BILLION = DataCounts(1_300_000_000, 130_000, 10 * 10**12)
SMALL = DataCounts(24_000, 24, 24_000_000, chunk=8)
KIND = WindowedOrder(chunk=8, window=960)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_billion_samples_on_64_machines(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--samples", "1.3e9", "--shards", "130000", "--bytes", "10e12"]
    machines = ["--nodes", "64", "--gpus", "8", "--batch", "32768"]
    found = run(capsys, *numbers, *machines)
    assert found["index_bytes"] == pytest.approx(256e6, rel=0.01)
    assert found["cache_bytes"] == pytest.approx(2 * 4.2e6 / 64 * (10e12 / 1.3e9 + 80), rel=0.03)
    assert found["epoch_bytes"] == pytest.approx(10e12)
    assert found["epoch_requests"] == pytest.approx(1.3e9 / 128 + 130_000, rel=1e-3)
    assert found["epoch_s"] == pytest.approx(1.3e9 / 512_000)
    assert found["advice"] == []
    assert main(["plan", *numbers, *machines]) == 0
    assert capsys.readouterr().out.endswith("it fits\n")


def test_shards_fetched_in_the_full_order() -> None:
    data = DataCounts(40_000, 40, 40 * 2**20, chunk=100)
    whole = make_plan([data], Job(80, 2, 1, FullOrder(), cache_gib=1))
    assert (whole.epoch_bytes, whole.epoch_requests, whole.advice) == (2 * data.bytes, 2 * (400 + 39), [])
    half = make_plan([data], Job(80, 2, 1, FullOrder(), cache_gib=20 / 1024 / 0.95))
    assert half.epoch_bytes == pytest.approx(20_000 / 400 * data.bytes)  # each of 20,000 samples fetches a chunk
    assert "fetched 50.0 times an epoch; choose data.order=windowed" in half.advice[0]
    local = make_plan([replace(data, at_urls=False)], Job(80, 2, 1, FullOrder(), cache_gib=1e-6))
    assert (local.cache_bytes, local.epoch_requests, local.advice) == (0, 0, [])


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(32_768, cache_gib=50), "raise remote.cache_gib to 65.5, or lower data.order.window to 24,9"),
        (Job(32_768, cache_gib=1e-4), "raise remote.cache_gib to 65.5, or use more nodes"),
        (Job(32_768, 64, 8, order=WindowedOrder(window=1024)), "raise data.order.window to 32,768"),
        (Job(4096, 7, 8, WindowedOrder(window=1024)), "of the chunks are fetched by two of the 7 nodes; 8 nodes"),
        (Job(32_768, 64, 8, bandwidth=30e6), "at 30 MB/s a GPU gets 488 images a second"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(job: Job, words: str) -> None:
    advice = make_plan([BILLION], job).advice
    assert any(words in each for each in advice), advice


@pytest.mark.parametrize(("cache", "then"), [(100, "fetches all of them"), (1e-3, "ends: they exceed the cache")])
def test_a_missing_index_at_urls(cache: float, then: str) -> None:
    data = replace(SMALL, is_indexed=False)
    assert f"without one training {then}" in make_plan([data], Job(64, order=KIND, cache_gib=cache)).advice[0]
    assert make_plan([replace(data, at_urls=False)], Job(64, 2, 4, KIND)).advice == []


def test_sizes_come_from_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = caption_shards(tmp_path / "shards", counts=(5, 3, 8))
    assert main(["plan", str(folder), "--batch", "4"]) == 1
    assert "no index; make it (vqclip data index SOURCE)" in capsys.readouterr().err
    shards = sorted(folder.glob("*.tar"))
    make_index(shards, folder / index_name(shards), chunk=4)
    found = run(capsys, str(folder), "--batch", "4", "--chunk", "4", "--window", "2")
    assert (found["samples"], found["epoch_requests"]) == (16, 0)
    assert found["epoch_bytes"] == sum(each.stat().st_size for each in shards)
    assert main(["plan", str(folder), "--batch", "4", "--chunk", "6"]) == 2
    assert "multiple of the 4 samples" in capsys.readouterr().err


def test_several_sources_share_the_batch() -> None:
    whole = make_plan([SMALL], Job(240, 2, 1, KIND))
    halves = make_plan([DataCounts(12_000, 12, 12_000_000, chunk=8)] * 2, Job(240, 2, 1, KIND))
    assert halves.epoch_s == whole.epoch_s
    assert halves.epoch_bytes == whole.epoch_bytes
    twice = make_plan([replace(SMALL, weight=2.0)], Job(240, 2, 1, KIND))
    for figure in ("epoch_s", "epoch_bytes", "epoch_requests"):
        assert getattr(twice, figure) == pytest.approx(2 * getattr(whole, figure))
    with pytest.raises(ConfigError, match="got 12; expected a multiple of the 8"):
        make_plan([SMALL], Job(240, order=WindowedOrder(chunk=12)))


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


@pytest.mark.parametrize("number", ["0", "1.5", "nan", "inf", "ten"])
def test_numbers_are_whole(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--samples", number, "--batch", "2"])
    assert "expected a whole number from 1, such as 1.3e9" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_real_run_fetches_what_the_plan_says(nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated nodes, one process and cache each, for an epoch; the cache holds it all."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path))
    kind, folder = WindowedOrder(chunk=4, window=120), caption_shards(tmp_path / "data", (118,) * 20)
    shards = sorted(folder.glob("*.tar"))
    make_index(shards, folder / index_name(shards), 4)
    data = replace(count_source(CaptionShardsConfig(path=str(folder)), 4), at_urls=True)
    plan = make_plan([data], Job(20, nodes, order=kind))
    with serving() as server:
        url = f"{server.add(folder)}/{{00000..00019}}.tar"
        for node in range(nodes):
            os.environ["VQCLIP_CACHE"] = str(tmp_path / f"cache{node}")
            source = CaptionShardsConfig(path=url, remote={"cache_gib": 1.0})
            with mock.patch("vqclip.dist.nodes", return_value=tuple(range(nodes))):
                loader = open_data(tmp_path, sources=(source,), batch_size=20, order=kind)
            for _ in loader.batches(0, int(plan.epoch_steps), node, nodes, nodes=list(range(nodes))):
                pass
        sent = server.sent - nodes * next(folder.glob("*.index")).stat().st_size
        requests = sum(".tar" in each for each in server.requests)
    used = sum(each.stat().st_size for each in (tmp_path / "cache0").glob("chunks/*-chunk"))
    assert requests / plan.epoch_requests == pytest.approx(1, abs=0.05)
    assert sent / plan.epoch_bytes == pytest.approx(1, abs=0.05)
    assert used == pytest.approx(plan.cache_bytes * 5 / 2, rel=0.1)  # five windows
