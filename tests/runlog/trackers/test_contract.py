"""What every tracker does; a new one is a line in `TRACKERS`."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from tests.runlog.trackers import reading
from tests.runlog.trackers.test_feed import facts
from tests.training import run_tree
from vqclip.config import parse_config, to_yaml
from vqclip.errors import ConfigError
from vqclip.runlog.metrics import JsonLines
from vqclip.runlog.trackers import Feed, TrackerConfig, WandbConfig, view
from vqclip.train import TrainConfig

SECRET = "hunter2"
TRACKERS = {"tensorboard": (), "wandb": pytest.mark.slow}


def live(kind: str, folder: Path, start: int, end: int) -> None:
    """Train from a checkpoint to a step; nothing is closed before the last one, 10."""
    config = TypeAdapter(TrackerConfig).validate_python(kind)
    config.require()
    log = JsonLines(folder / "metrics.jsonl", start_step=start)
    feed = Feed({kind: config.build()}, facts(folder), log.path, start)
    codes = {f"image/{number}/usage": number / 7 for number in range(3)}
    values = {"loss/total": math.nan, "grad_norm": math.inf, "note": "x", "flag": True, "image/usage": 0.3} | codes
    for step in range(start + 1, end + 1):
        feed.write(step, log.write(step, {**values, "lr": step / (3 + start)}))
        if step == 4:
            log.flush()
            feed.flush(step)  # the checkpoint
            feed.write(step, log.write(step, {"eval/a/codes_only/top1": 0.5}))
            feed.text(step, "warning", "<b>the run</b>\n*diverges*")
    if end == 10:
        feed.close(finished=True)


def live_and_be_killed(kind: str, folder: Path, start: int, end: int) -> None:
    """The same in a process that ends as by SIGKILL."""
    name = live.__module__
    script = f"from pathlib import Path; from {name} import live; live({kind!r}, Path({str(folder)!r}), {start}, {end})"
    command = [sys.executable, "-c", f"{script}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    environment = os.environ | {"AWS_SECRET_ACCESS_KEY": SECRET}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (done.stdout, "failed" in done.stderr) == ("", False)


@pytest.mark.parametrize("checkpoint", [4, 0], ids=["a checkpoint", "none"])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks) for kind, marks in TRACKERS.items()])
def test_a_killed_run_is_as_a_whole_one(tmp_path, kind, checkpoint):
    run = live
    if kind != "tensorboard":
        pytest.importorskip(kind, reason=f"the extra {kind} is not installed")
        run = live_and_be_killed
    run(kind, tmp_path, 0, 8)
    time.sleep(1.1 if kind == "tensorboard" else 0)  # it orders files by the second
    run(kind, tmp_path, checkpoint, 10)
    whole = reading.expected(tmp_path)
    found = getattr(reading, kind)(tmp_path)
    for step, row in whole.items():
        assert math.isnan(row.pop("train/loss/total"))
        assert math.isnan(found[step].pop("train/loss/total", math.nan))
        assert row.pop("train/grad_norm") == found[step].pop("train/grad_norm", math.inf) == math.inf
    assert sorted(found) == list(range(1, 11))
    assert found == (reading.rounded(whole) if kind == "tensorboard" else whole)
    assert whole[4]["eval/a/codes_only/top1"] == 0.5
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_the_view_has_few_scalars_in_groups():
    row = {"step": 1, "loss/total": 1.0, "lr": 0.1, "grad_norm": 2.0, "data_wait": 0.5, "note": "x", "flag": True}
    row |= {"image/tokens": 9.0, "image/usage_if_uniform": 0.9, "image/usage": 0.2, "mine/own": 3.0}
    row |= {
        f"image/{number}/{name}": number / 4 for number in range(3) for name in ("usage", "perplexity", "bits_used")
    }
    row |= {f"eval/a/{mode}/top1": 0.5 for mode in ("continuous", "quantized", "codes_only")}
    scalars, histograms = view(row)
    assert scalars == {
        "train/loss/total": 1.0,
        "train/lr": 0.1,
        "train/grad_norm": 2.0,
        "speed/data_wait": 0.5,
        "image codes/usage": 0.2,
        "image codes/usage of the worst codebook": 0.0,
        "mine/own": 3.0,
        "eval/a/continuous/top1": 0.5,
        "eval/a/codes_only/top1": 0.5,
    }
    assert set(histograms) == {"image codes/usage by codebook", "image codes/bits_used by codebook"}
    assert histograms["image codes/usage by codebook"] == [0.0, 0.25, 0.5]
    assert "eval/a/quantized/top1" in view({**row, "eval/a/quantized/top1": 0.4})[0]
    assert view({"image/0/usage": math.nan, "image/1/usage": 0.1})[1] == {}


def config_of(tmp_path, trackers, **changes):
    tree = run_tree(tmp_path, tmp_path / "shards", **changes)
    tree["run"]["trackers"] = trackers
    return parse_config(TrainConfig, tree, (), "run.yaml")


def test_trackers_are_names_or_mappings(tmp_path):
    config = config_of(tmp_path, ["tensorboard", {"kind": "wandb", "project": "mine", "mode": "online"}])
    assert [each.kind for each in config.run.trackers] == ["tensorboard", "wandb"]
    assert config.run.trackers[1].project == "mine"
    assert yaml.safe_load(to_yaml(config))["run"]["trackers"][0] == {"kind": "tensorboard"}
    assert config_of(tmp_path, []).run.trackers == ()


def test_mistakes_are_named(tmp_path, monkeypatch):
    for trackers, message in (
        (["tensorbord"], r'run\.trackers\[0\]\.kind: got .tensorbord.*did you mean "tensorboard"'),
        (["wandb", {"kind": "wandb"}], r"run\.trackers: got wandb twice; expected each tracker once"),
        ([{"kind": "wandb", "projekt": "x"}], r'run\.trackers\[0\]\.projekt: unknown key; did you mean "project"'),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of(tmp_path, trackers)
    monkeypatch.setattr(WandbConfig, "package", "no_such_package")
    told = r"run\.trackers: wandb: the package .* pip install 'vqclip\[no_such_package\]'"
    with pytest.raises(ConfigError, match=told):
        WandbConfig().require()


def test_facts_have_the_settings_and_no_credentials(tmp_path):
    path = "https://user:hunter2@host/0.tar"
    config = config_of(tmp_path, ["tensorboard"], data__sources=[{"kind": "shards", "path": path}])
    found = config.facts()
    assert "hunter2" not in str(found)
    assert found.config["optim"]["lr"] == 1e-3
