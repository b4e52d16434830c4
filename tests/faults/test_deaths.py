"""Ranks and data workers that die: torchrun starts the job again, and it ends as if nothing had happened."""

from __future__ import annotations

import json

import pytest

from tests.data.making import caption_shards, write_tar
from tests.faults.jobs import job
from tests.training import all_equal, metrics, run, run_tree, weights
from vqclip.checkpoint.optimizer import read_optimizer

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

STEPS = 30


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """29 good samples and a bad one."""
    folder = caption_shards(tmp_path_factory.mktemp("shards"), counts=(16, 13))
    write_tar(folder / "00002.tar", {"000000099.jpg": b"\xff\xd8\xff no picture", "000000099.txt": b"x"})
    return folder


def tree_in(folder, shards, **changes):
    every = {"train__steps": STEPS, "train__precision": "fp32", "train__checkpoint_every": 5, "data__workers": 1}
    tree = run_tree(folder, shards, run__timeout_s=600.0, **(every | changes))
    tree["data"]["max_bad_fraction"] = 0.2
    return tree


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, ranks):
    """Two ranks that nothing kills: the folder of their run."""
    folder = tmp_path_factory.mktemp("whole")
    ranks(2, run, tree_in(folder, shards), str(folder / "cache"), init=False, timeout=300.0)
    return folder


@pytest.mark.parametrize(
    ("rank", "step"), [(1, 13), (0, 13), (0, 2)], ids=["rank 1", "rank 0", "before any checkpoint"]
)
def test_a_killed_rank_is_restarted_and_the_result_is_the_same(tmp_path, shards, whole, rank, step):
    tree = tree_in(tmp_path, shards)
    fault = {"do": "kill_myself", "rank": rank, "step": step}
    with job(tmp_path / "job", tree, fault, "--max-restarts", "1") as running:
        status, _ = running.end(240)
    assert status == 0, running.output
    assert "exitcode: -9" in running.output
    assert ("resumed from" in running.output) == (step > 5)
    assert_same(whole, tmp_path)


def assert_same(whole, folder):
    """Weights and optimizer bit for bit, and every record once."""
    assert all_equal(weights(whole, STEPS), weights(folder, STEPS))
    states = [read_optimizer(each / "tiny" / "checkpoints" / f"step-{STEPS:08d}").tensors for each in (whole, folder)]
    assert all_equal(*states)
    speeds = ("images_per_second", "data_wait")
    one, other = (
        [{name: value for name, value in line.items() if name not in speeds} for line in metrics(each)]
        for each in (whole, folder)
    )
    assert one == other
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    bad = [(each / "tiny" / "bad_samples.jsonl").read_text() for each in (whole, folder)]
    assert bad[0] == bad[1]
    assert len(bad[1].splitlines()) >= STEPS * 12 // 30 - 1
    summaries = [json.loads((each / "tiny" / "summary.json").read_text()) for each in (whole, folder)]
    for name in ("coverage", "replaced", "samples"):
        assert summaries[0][name] == summaries[1][name]
    assert not (folder / "tiny" / "stopped.json").exists()


def test_a_killed_rank_ends_the_job_within_the_timeout_without_restarts(tmp_path, shards):
    """No rank waits for the timeout, which would be an hour: what is lost is noticed."""
    tree = tree_in(tmp_path, shards)
    tree["run"] |= {"timeout_s": 3600.0, "step_timeout_s": 3600.0}
    with job(tmp_path / "job", tree, {"do": "kill_myself", "rank": 1, "step": 13}) as running:
        running.wait_for_mark("step-13-1")
        status, took = running.end()
    assert status == 1
    assert took < 30
    assert "failed on rank 0: " in running.output
    assert "Another rank has most likely died" in running.output
    assert "another rank is lost" in (running.run / "stacks" / "rank-0.txt").read_text()


def test_a_killed_data_worker_is_explained_and_hangs_no_rank(tmp_path, shards):
    tree = tree_in(tmp_path, shards)
    tree["run"] |= {"timeout_s": 3600.0, "step_timeout_s": 3600.0}
    with job(tmp_path / "job", tree, {"do": "kill_a_worker", "rank": 1, "step": 13}) as running:
        running.wait_for_mark("step-13-1")
        status, took = running.end()
    assert status == 1
    assert took < 60
    assert "rank 1: a data worker died" in running.output
    assert "Was it killed for memory? Fewer data.workers" in running.output
