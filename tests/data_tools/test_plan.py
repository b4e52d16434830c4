"""Figures of `vqclip plan` on data: by hand, from an index, and beside real small runs from a web server."""

import json
import re
from typing import Any

import pytest

from tests.commands import command
from tests.data.loading import open_data
from tests.data.making import caption_shards, make_index
from tests.training import run_tree
from vqclip.data import CaptionShardsConfig
from vqclip.data.order import WindowedOrder
from vqclip.data.tars.open import index_name
from vqclip.data_tools.plan import DataCounts, count_source, make_plan

main = command("plan")

BILLION = DataCounts(1_300_000_000, 130_000, 10 * 10**12)
SMALL = DataCounts(24_000, 24, 24_000_000, chunk=8)
KIND = WindowedOrder(chunk=8, window=960)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_billion_samples_on_64_machines(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--samples", "1.3e9", "--shards", "130000", "--bytes", "10e12", "--machines", "64"]
    found = run(capsys, *numbers)
    assert found["index_bytes"] == pytest.approx(256e6, rel=0.01)
    windowed = found["windowed"]
    assert windowed["cache_bytes"] == pytest.approx(2 * 4.2e6 / 64 * (10e12 / 1.3e9 + 80), rel=0.03)
    assert windowed["epoch_bytes"] == pytest.approx(10e12)
    assert windowed["epoch_requests"] == pytest.approx(1.3e9 / 128 + 130_000, rel=1e-3)
    assert len(found["advice"]) == 1
    assert main(numbers) == 0
    shown = capsys.readouterr().out
    assert "cache of a machine 10 TB         1.04 GB       of 102 GB (remote.cache_gib=100)\n" in shown
    assert "choose data.order=windowed, which fits: in the full order the data are fetched 126.7 times" in shown


def test_shards_fetched_in_the_full_order() -> None:
    data = DataCounts(40_000, 40, 40 * 2**20, chunk=100)
    whole = make_plan([data], None, 2, cache_gib=1)
    assert whole["full"] == {"cache_bytes": data.bytes, "epoch_bytes": 2 * data.bytes, "epoch_requests": 2 * 439}
    assert whole["advice"] == []
    half = make_plan([data], None, 2, cache_gib=20 / 1024 / 0.95)
    assert half["full"]["epoch_bytes"] == pytest.approx(20_000 / 400 * data.bytes)  # each of 20,000 fetches a chunk
    local = make_plan([data._replace(at_urls=False)], None, 2, cache_gib=1e-6)
    assert (local["full"]["cache_bytes"], local["full"]["epoch_requests"], local["advice"]) == (0, 0, [])


def test_what_does_not_fit_is_named_with_a_remedy() -> None:
    for cache_gib, words in ((50, "lower data.order.window to 24,9"), (1e-4, "use more machines")):
        (advice,) = make_plan([BILLION], cache_gib=cache_gib)["advice"]
        assert f"raise remote.cache_gib to 65.5 for two windows, or {words}" in advice
    data = DataCounts(2594, 3, 18_575_360)  # a window of all data is lowered below them
    (advice,) = make_plan([data], cache_gib=0.01)["advice"]
    assert "or lower data.order.window to 4, or" in advice
    assert make_plan([data], WindowedOrder(window=4), cache_gib=0.01)["advice"][0].startswith("choose")


def test_sizes_come_from_the_index(tmp_path, capsys, refused):
    folder = caption_shards(tmp_path / "shards", counts=(5, 3, 8))
    assert main([str(folder)]) == 1
    assert "no index; make it (vqclip data index SOURCE)" in capsys.readouterr().err
    shards = sorted(folder.glob("*.tar"))
    make_index(shards, folder / index_name(shards), chunk=4)
    found = run(capsys, str(folder))
    assert (found["samples"], found["windowed"]["epoch_requests"]) == (16, 0)
    assert found["full"]["epoch_bytes"] == sum(each.stat().st_size for each in shards)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(run_tree(tmp_path / "runs", folder)))
    assert run(capsys, "--config", str(config))["data"] == found
    assert run(capsys, "--config", str(config), "data.order=windowed")["data"] == found
    message = refused(main(["--config", str(config), "data.order={kind: windowed, chunk: 6}"]))
    assert "multiple of 4, the samples" in message


def test_several_sources_are_added() -> None:
    whole = make_plan([SMALL], KIND, 2)["windowed"]
    halves = make_plan([DataCounts(12_000, 12, 12_000_000, chunk=8)] * 2, KIND, 2)["windowed"]
    assert halves["epoch_bytes"] == whole["epoch_bytes"]
    twice = make_plan([SMALL._replace(weight=2.0)], KIND, 2)["windowed"]
    for figure in ("epoch_bytes", "epoch_requests"):
        assert twice[figure] == pytest.approx(2 * whole[figure])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "10"], "some of --samples, --shards and --bytes; expected all of them"),
        ([], "got no SOURCE; expected one, or a configuration, or all of"),
        (["x.tar", "--samples", "3", "--shards", "1", "--bytes", "9"], "expected all of them, without SOURCE"),
        *((["--samples", n], r"samples: got '.*' \(str\); (expected )?a(\w+)? .*number") for n in ("0", "nan", "x")),
    ],
)
def test_wrong_arguments_are_named(arguments, words, refused):
    assert re.search(words, refused(main(arguments)))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_real_run_fetches_what_the_plan_says(nodes, tmp_path, server, monkeypatch):
    """Simulated nodes, one process and cache each, for an epoch; the cache holds it all."""
    kind, folder = WindowedOrder(chunk=4, window=120), caption_shards(tmp_path / "data", (118,) * 20)
    shards = sorted(folder.glob("*.tar"))
    make_index(shards, folder / index_name(shards), 4)
    data = count_source(CaptionShardsConfig(path=str(folder)))._replace(at_urls=True)
    plan = make_plan([data], kind, nodes)["windowed"]
    source = CaptionShardsConfig(path=f"{server.add(folder)}/{{00000..00019}}.tar", remote={"cache_gib": 1.0})
    monkeypatch.setattr("vqclip.dist.nodes", lambda: tuple(range(nodes)))
    for node in range(nodes):
        monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / f"cache{node}"))
        loader = open_data(tmp_path, sources=(source,), batch_size=20, order=kind)
        for _ in loader.batches(0, data.samples // 20, node, list(range(nodes))):
            pass
    sent = server.sent - nodes * next(folder.glob("*.index")).stat().st_size
    requests = sum(".tar" in each for each in server.requests)
    used = sum(each.stat().st_size for each in (tmp_path / "cache0").glob("chunks/*-chunk"))
    assert requests / plan["epoch_requests"] == pytest.approx(1, abs=0.05)
    assert sent / plan["epoch_bytes"] == pytest.approx(1, abs=0.05)
    assert used == pytest.approx(plan["cache_bytes"] * 5 / 2, rel=0.1)  # five windows
