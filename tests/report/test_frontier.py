"""Accuracy against bits: points, table and page by hand; the command on runs with seeds, and without codes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.data.making import caption_shards
from tests.models import FSQ, IDENTITY
from tests.training import run_tree
from vqclip.cli.main import main
from vqclip.evaluation import PrefixResult, Result
from vqclip.report.frontier import format_points, measure, points_csv, points_page
from vqclip.train import run as train

RESIDUAL = {"kind": "residual", "layer": FSQ | {"layout": "uniform"}, "depth": 2}


def made(name, *prefixes, rates=(0.9,)):
    """Results of each seed: a rate of top-1 for each prefix, or the continuous one."""
    return [
        [
            Result(
                name=name,
                kind="zero_shot",
                samples=20,
                classes=10,
                captions=10,
                usage={},
                figures={"continuous": {"top1": rate, "top5": 0.99}, "quantized": None, "codes_only": None},
                chance={"top1": 0.1, "top5": 0.5},
                prefixes=[
                    PrefixResult(
                        stages, codebooks, bits, 10.0, {"top1": rate - lost, "top5": 1.0}, {"top1": (0.2, 0.8)}
                    )
                    for stages, codebooks, bits, lost in prefixes
                ],
            )
        ]
        for rate in rates
    ]


@pytest.fixture
def points():
    deep = made("colours", (1, 2, 8.0, 0.5), (2, 1, 8.0, 0.25), (2, 2, 16.0, 0.0), rates=(0.75,))
    return measure({
        "deep": deep, "<b>": made("colours", (1, 1, 4.0, 0.0), rates=(0.4, 0.6)), "continuous": made("colours")
    })  # fmt: skip


def test_table_by_hand(points):
    *heads, last, rule = (lines := format_points(points).splitlines())[:4]
    rows, note = lines[4:-1], lines[-1]
    assert [each.strip() for each in heads] == ["colours,", "codes"]
    assert re.split(r"  +", last) == ["only, %", "ids", "bits/image", "bits/text", "top-1"]
    assert set(rule) == {"-", " "}
    assert [re.split(r"  +", row)[:5] for row in rows[:4]] == [
        ["deep", "1 of 2 stages", "8", "10", "25.0 (20.0–80.0)"],
        ["deep", "1 of 2 codebooks", "8", "10", "50.0 (20.0–80.0)"],
        ["deep", "all ids", "16", "10", "75.0 (20.0–80.0)"],
        ["<b>", "all ids", "4", "10", "50.0 (40.0–60.0)"],
    ]
    assert rows[4].startswith("continuous")
    assert re.split(r"  +", rows[4])[1:4] == ["no codes", "-", "-"]
    assert re.split(r"  +", rows[5]) == ["chance", "10.00"]
    assert note == "In brackets: 95 % intervals over the images of one model and lowest and highest of several seeds"


def test_rows_and_page_have_every_point(points):
    rows = list(csv.DictReader(points_csv(points).splitlines()))
    assert len(rows) == len(points) == 10
    assert {row["rates"] for row in rows if row["group"] == "<b>" and row["figure"] == "top1"} == {"0.4 0.6"}
    assert {row["bits_per_image"] for row in rows if row["group"] == "continuous"} == {""}
    page = points_page(points)
    legend = re.findall(r"<i></i>([^<]*)</li>", page)
    assert legend == ["chance", "deep", "deep, by codebooks", "&lt;b&gt;", "continuous (no codes)"]
    assert page.count("<svg") == 1  # top-5 is no main figure
    assert page == points_page(points)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs ``few-seed-0``, ``few-seed-3`` and ``plain``, without codes."""
    folder = tmp_path_factory.mktemp("frontier")
    caption_shards(folder / "shards", counts=(13,))
    evaluation = [{"kind": "retrieval", "name": "pairs", "data": {"kind": "shards", "path": str(folder / "shards")}}]
    for name, quantizer, seed in (("few-seed-0", RESIDUAL, 0), ("few-seed-3", RESIDUAL, 3), ("plain", IDENTITY, 0)):
        tree = run_tree(
            folder / "runs", folder / "shards", quantizer, run__name=name, run__seed=seed,
            optim__warmup_steps=0, train__steps=1, train__precision="fp32", evaluation=evaluation,
        )  # fmt: skip
        train(tree)
    return folder / "runs"


def test_the_command_compares_runs_seeds_and_prefixes(runs, tmp_path, capsys):
    models = [str(runs / name) for name in ("few-seed-0", "few-seed-3", "plain")]
    files = [str(tmp_path / name) for name in ("a.json", "a.csv", "a.html")]
    options = ["--device", "cpu", "--prefixes", "same", "--json", files[0], "--csv", files[1], "--plot", files[2]]
    assert main(["evaluate", *models, "evaluation[0].batch_size=5", *options]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path(files[0]).read_text())
    assert found["models"] == {"few": models[:2], "plain": models[2:]}
    assert [row["ids"] for row in found["points"] if row["figure"] == "i2t_r1"] == [
        "1 of 2 stages", "all ids", "no codes"
    ]  # fmt: skip
    assert re.search("few +1 of 2 stages", out)
    whole = {row["figure"]: row for row in found["points"] if row["ids"] == "all ids"}
    alone = []
    for name in models[:2]:
        assert main(["evaluate", name, "--device", "cpu", "--json", files[0]]) == 0
        alone.append(json.loads(Path(files[0]).read_text())[0]["figures"]["codes_only"]["i2t_r5"])
    assert whole["i2t_r5"]["rates"] == alone
    assert (whole["i2t_r5"]["low"], whole["i2t_r5"]["high"]) == (min(alone), max(alone))
    assert len(Path(files[1]).read_text().splitlines()) == 1 + len(found["points"])
    assert "<svg" in Path(files[2]).read_text()


def test_other_settings_are_another_group(runs, tmp_path, capsys):
    other = tmp_path / "few-seed-7"
    shutil.copytree(runs / "few-seed-3", other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.002"))
    assert text != (other / "config.yaml").read_text()
    assert main(["evaluate", str(runs / "few-seed-0"), str(other), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("all ids") == 2  # without --prefixes no others
    assert "stages" not in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["few-seed-0", "few-seed-0"], "more than once"),
        (["few-seed-0", "--plot", "a.html"], "--plot: got it for all ids of one model"),
        (["few-seed-0", "plain", "--codes", "ids"], "--codes: got it with several models"),
        (["few-seed-0", "--prefixes", "full", "--plot", "a.svg"], "--plot: got a.svg; expected a file"),
        (["few-seed-0", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told(runs, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(runs)
    assert main(["evaluate", *arguments, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert (out, told in err) == ("", True), err
