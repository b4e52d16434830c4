"""Runs that are trained, interrupted, continued and measured."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.data.making import caption_shards
from tests.models import FSQ, IDENTITY
from tests.training import run_tree
from vqclip.cli.frontier import main
from vqclip.errors import ConfigError
from vqclip.evaluation import Prefixes, RetrievalConfig, evaluate
from vqclip.frontier import frontier, train_seeds
from vqclip.train.loading import load_model
from vqclip.train.report import write_page
from vqclip.train.step import TrainStep

RESIDUAL = {"kind": "residual", "layer": FSQ | {"layout": "uniform"}, "depth": 2}


def write_config(place, name, quantizer=RESIDUAL):
    evaluation = [{"kind": "retrieval", "name": "pairs", "data": {"kind": "shards", "path": str(place / "shards")}}]
    tree = run_tree(
        place / "runs", place / "shards", quantizer,
        optim__warmup_steps=0, train__steps=2, train__precision="fp32", evaluation=evaluation,
    )  # fmt: skip
    (place / name).write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two configurations; the first is trained with two seeds."""
    folder = tmp_path_factory.mktemp("frontier")
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    caption_shards(folder / "shards", counts=(13,))
    write_config(folder, "residual.yaml")
    write_config(folder, "plain.yaml", IDENTITY)
    train_seeds([folder / "residual.yaml"], (0, 3))
    return folder


@pytest.fixture(autouse=True)
def cache(place, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)


@pytest.fixture
def command(capsys):
    def run(*arguments):
        return main([*map(str, arguments), "--device", "cpu"]), *capsys.readouterr()

    return run


def runs(place, *seeds):
    return [place / "runs" / f"residual-seed-{seed}" for seed in seeds]


def test_seeds_are_one_group_with_mean_and_range(place):
    found = frontier(runs(place, 0, 3))
    assert found.runs == {"residual": [str(run / "tokenizer") for run in runs(place, 0, 3)]}
    assert len(found.points) == 2 * 6
    each = []
    for run in runs(place, 0, 3):
        model = load_model(str(run)).model
        data = {"kind": "shards", "path": str(place / "shards")}
        each += evaluate(model, [RetrievalConfig(name="pairs", data=data)], prefixes=Prefixes.of(model))
    point = next(point for point in found.points if (point.figure, point.stages) == ("t2i_r5", 1))
    assert point.rates == [result.prefixes[0].figures["t2i_r5"] for result in each]
    assert (point.low, point.high) == (min(point.rates), max(point.rates))
    assert point.rate == pytest.approx(sum(point.rates) / 2)
    assert point.bits_per_image == each[0].prefixes[0].bits_per_image
    assert not point.main
    (first,) = {point.rate for point in frontier(runs(place, 0), prefixes=False).points if point.figure == "i2t_r1"}
    assert first == each[0].figures["codes_only"]["i2t_r1"]


def test_one_run_has_intervals_and_other_settings_are_another_group(place, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs(place, 3)[0], other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.002"))
    assert text != (other / "config.yaml").read_text()
    found = frontier([*runs(place, 0), other])
    assert list(found.runs) == ["residual", "other"]
    assert all(len(point.rates) == 1 and point.low <= point.rate <= point.high for point in found.points)
    assert any(point.low < point.high for point in found.points)


def test_tasks_of_one_name_must_be_equal(place, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs(place, 3)[0], other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("limit: null", "limit: 5"))
    with pytest.raises(ConfigError, match="evaluation 'pairs' has other settings in .*other than in .*seed-0"):
        frontier([*runs(place, 0), other])


def on_rank(folders):
    os.environ["VQCLIP_CACHE"] = str(Path(folders[0]).parents[1] / "cache")
    return [(point.stages, point.figure, point.rates) for point in frontier(folders, text="same").points]


def test_ranks_together_find_what_one_finds(ranks, place):
    folders = [str(run) for run in runs(place, 0)]
    alone = on_rank(folders)
    for found in ranks(2, on_rank, folders):
        assert found == [(stages, figure, pytest.approx(rates)) for stages, figure, rates in alone]


def test_an_interrupted_command_continues_and_finished_runs_are_not_run_again(place, command, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    steps, step = [], TrainStep.__call__

    def counting(self, batch, number):
        steps.append(number)
        if len(steps) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, number)

    summary = runs(place, 0)[0] / "summary.json"
    before = summary.stat().st_mtime_ns
    arguments = ("--config", "residual.yaml", "--config", "plain.yaml", "--seeds", "0", "--out", tmp_path / "out")
    with mock.patch.object(TrainStep, "__call__", counting):
        status, out, _ = command(*arguments)
        assert (status, out) == (0, "stopped; run the same command again to continue\n")
        assert "residual-seed-0 is finished" in caplog.text
        assert not (tmp_path / "out").exists()
        assert len(steps) == 1
        status, out, _ = command(*arguments)
        assert (status, len(steps)) == (0, 2)  # the second step of the run without codes
        status, again, _ = command(*arguments)
    assert (status, again, len(steps)) == (0, out, 2)
    assert summary.stat().st_mtime_ns == before  # nor evaluated by the training again
    assert re.search("plain +no codes", out)
    assert str(tmp_path / "out" / "frontier.svg") in out
    body = json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert list(body["runs"]) == ["residual", "plain"]
    assert {point["bits_per_image"] for point in body["points"] if point["group"] == "plain"} == {None}


def test_a_signal_at_the_end_of_a_run_begins_no_other(place, command, tmp_path):
    written = []

    def writing(*arguments):
        written.append(write_page(*arguments))
        os.kill(os.getpid(), signal.SIGTERM)

    arguments = ("--config", "residual.yaml", "--seeds", "0,1", f"run.folder={tmp_path}", "--out", tmp_path / "out")
    with mock.patch("vqclip.train.main.write_page", writing):  # after the evaluation: nothing is left to stop
        status, out, _ = command(*arguments)
    assert (status, out, len(written)) == (0, "stopped; run the same command again to continue\n", 1)
    assert (tmp_path / "residual-seed-0" / "summary.json").is_file()
    assert not (tmp_path / "residual-seed-1").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ([], 2, "got no run and no --config"),
        (["nowhere"], 2, "nowhere: no such folder, and so no evaluation"),
        (["runs"], 2, "runs: has no config.yaml of a run"),
        (["nowhere", "--tasks", "tasks.yaml"], 2, "no such run, checkpoint or tokenizer folder here"),
        (["--config", "none.yaml"], 2, "none.yaml"),
        (["--config", "residual.yaml", "--config", "plain.yaml", "optim.speed=3"], 2, "optim.speed"),
        (["--config", "residual.yaml", "run.seed=4"], 2, "seeds are --seeds"),
        (["--config", "residual.yaml", "--config", "residual.yaml"], 2, "two runs would have the folder"),
        (["--config", "residual.yaml", "--seeds", "0", "train.steps=3"], 2, "train.steps: 2 in its config.yaml, 3 now"),
        (["--config", "residual.yaml", "runs/residual-seed-0"], 2, "expected runs, or configurations to train"),
        (["runs/residual-seed-0", "--seeds", "0"], 2, "--seeds: got it without --config"),
        (["runs/residual-seed-0", "runs/residual-seed-0"], 2, "more than once"),
        (["runs/residual-seed-0", "--out", "residual.yaml"], 2, "--out: got the file residual.yaml"),
        (["runs/residual-seed-0", "evaluation[0].speed=3"], 2, "evaluation[0].speed"),
        (["runs/residual-seed-0", "train.steps=3"], 2, "got 'train.steps=3'; expected evaluation[0].key=value"),
        (["runs/residual-seed-0", "--tasks", "tasks.yaml", "evaluation[0].speed=3"], 2, "evaluation[0].speed"),
        (["zero-shott", "runs/residual-seed-0", "--data", "x"], 2, 'did you mean "zero-shot"?'),
        (["plain.yaml"], 2, "write --config plain.yaml"),
        (["--config", "residual.yaml", "plain.yaml"], 2, "write --config before each"),
        (["zero-shot", "runs/residual-seed-0"], 2, "--data: missing"),
    ],
)
def test_mistakes_are_told(command, place, arguments, status, told):
    (place / "tasks.yaml").write_text(
        json.dumps({"evaluation": json.loads((place / "plain.yaml").read_text())["evaluation"]})
    )
    found, out, err = command(*arguments)
    assert (found, out) == (status, "")
    assert told in err


@pytest.mark.parametrize("seeds", ["", "a", "0,,1", "1,1", "-1", "0 1"])
def test_malformed_seeds_are_refused(command, capsys, seeds):
    with pytest.raises(SystemExit):
        command("--config", "residual.yaml", f"--seeds={seeds}")
    assert "--seeds: got" in capsys.readouterr().err


def test_settings_of_the_report_make_no_other_run(place):
    overrides = ["report=null", "run.trackers=[]"]
    assert train_seeds(["residual.yaml"], (0,), overrides) == runs(place, 0)


def test_a_run_without_evaluation_needs_tasks(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs(place, 0)[0], run)
    with pytest.raises(ConfigError, match="has no evaluation; expected tasks"):
        frontier([run], overrides=["evaluation=[]"])


def test_a_plot_without_matplotlib_is_refused_before_any_work(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = command("nowhere", "--out", tmp_path / "out")
    assert (status, "needs matplotlib: pip install 'vqclip[frontier]'" in err) == (2, True)
