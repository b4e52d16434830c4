"""Ranks and data workers that die without a restart: the job ends soon, and says why."""

from __future__ import annotations

import pytest

from tests.data.making import caption_shards
from tests.faults.jobs import job
from tests.training import run_tree

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

STEPS = 30


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(16, 13))


def tree_in(folder, shards, **changes):
    every = {"train__steps": STEPS, "train__precision": "fp32", "train__checkpoint_every": 5, "data__workers": 1}
    tree = run_tree(folder, shards, run__timeout_s=600.0, **(every | changes))
    return tree


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
