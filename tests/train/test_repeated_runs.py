"""Runs from Python: several in one process, and in a thread."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest

from tests.data.making import caption_shards
from tests.training import metrics, run_tree
from vqclip.train import TrainConfig
from vqclip.train import run as train


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(17, 13))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))


def losses(folder):
    return [line["loss/total"] for line in metrics(folder) if "loss/total" in line]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sweep_runs_in_one_process_and_in_any_thread(tmp_path, shards, workers):
    """The second run has the bits of the first; a thread has no signal handlers, and needs none."""
    summaries = {}

    def run(name):
        tree = run_tree(
            tmp_path / name, shards, train__steps=4, data__workers=workers,
            evaluation=[{"kind": "retrieval", "name": "pairs", "data": {"kind": "shards", "path": str(shards)}}],
        )  # fmt: skip
        summaries[name] = train(TrainConfig.model_validate(tree))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    before = set(threading.enumerate())
    run("first")
    run("second")
    thread = threading.Thread(target=run, args=("thread",))
    thread.start()
    thread.join()
    assert {name: each.step for name, each in summaries.items()} == {"first": 4, "second": 4, "thread": 4}
    assert all(each.results[0].figures == summaries["first"].results[0].figures for each in summaries.values())
    assert losses(tmp_path / "first") == losses(tmp_path / "second") == losses(tmp_path / "thread")
    assert handlers == {number: signal.getsignal(number) for number in handlers}
    assert not [thread for thread in set(threading.enumerate()) - before if not thread.daemon]


TWICE = """
import json, sys
from vqclip.train import TrainConfig, run

for tree in json.load(open(sys.argv[1])):
    assert run(TrainConfig.model_validate(tree)).step == 4
"""


@pytest.mark.slow
def test_two_ranks_of_torchrun_run_twice(tmp_path, shards):
    trees = [run_tree(tmp_path / name, shards, train__steps=4) for name in ("first", "second")]
    (tmp_path / "trees.json").write_text(json.dumps(trees))
    (tmp_path / "twice.py").write_text(TWICE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, tmp_path / "twice.py", tmp_path / "trees.json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    assert len(losses(tmp_path / "first")) == 4
