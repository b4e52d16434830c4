"""A rank that hangs or dies: the job ends in time, and every rank has written where it stood."""

import re

import pytest

from tests.faults.jobs import job
from tests.training import all_equal, retrieval, run, run_tree, weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

STEPS, STEP = 14, 8
LIMIT_S = 10.0
PATIENCE_S = 20.0


def tree_in(folder, shards, **changes):
    every = {"train__steps": STEPS, "train__precision": "fp32", "train__checkpoint_every": 5, "data__workers": 1}
    tree = run_tree(folder, shards, **(every | changes))
    tree["run"] |= {"timeout_s": 600.0, "step_timeout_s": LIMIT_S}
    return tree


def failed(folder, tree, fault, mark):
    """A job that ends with status 1: the job, its seconds from a mark on, and the stacks of its ranks."""
    with job(folder / "job", tree, fault) as running:
        running.wait_for_mark(mark)
        status, took = running.end()
    assert status == 1, running.output
    return running, took, *((running.run / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1))


@pytest.mark.parametrize(
    ("fault", "stack", "stands"),
    [
        ("loop_for_ever", "in loop_for_ever", "in no collective"),
        ("stand_still", "in stand_still", "in no collective"),
        ("enter_another_collective", "in enter_another_collective", r"in collective #\d+ \(ring_shift\)"),
        ("hold_the_interpreter", "in hold_the_interpreter", None),
        ("loader", "in in_worker", "waiting for the next batch; in no collective"),
    ],
)
def test_a_hung_rank_ends_the_job_in_time_with_stacks_of_every_rank(tmp_path, shards, fault, stack, stands):
    faults = {"do": fault, "rank": 1, "step": STEP}
    running, took, rank_0, rank_1 = failed(tmp_path, tree_in(tmp_path, shards), faults, f"step-{STEP}-0")
    assert took < LIMIT_S + 30
    assert stack in rank_1
    assert "in run_collective" in rank_0  # it waits
    assert re.search(r"rank 0 at collective #(\d+): no progress for 10 s \(run.step_timeout_s\): 8 steps done", rank_0)
    assert re.search(r"#\d+ \w+ \(.*\) started [\d.]+ s ago, not finished", rank_0)
    assert len(re.findall(r"#\d+ \w.* started [\d.]+ s ago, finished after [\d.]+ ms", rank_0)) > 20
    assert re.search(r"rank 0: no progress .* in collective #\d+ \(replicated_sum\) for", running.output)
    if stands is None:
        assert "rank 1: has written nothing itself" in running.output
        # On a busy machine torchrun's SIGTERM may come first; its handler lets the watchdog's thread run.
        assert rank_1.startswith(("Timeout (", "=== "))
    else:
        assert re.search(rf"rank 1: no progress .*{stands}", running.output)
        assert re.search(r"#\d+ \w.* started [\d.]+ s ago, finished after", rank_1)
    if fault != "enter_another_collective":  # whose number is that of the right one
        assert "the other ranks wait for rank 1" in running.output
    assert f"stacks and collectives: {running.run}/stacks/rank-*.txt" in running.output
    if stands is not None:
        assert re.search(r"exitcode +: 3 ", running.output)
    assert not (running.run / "stopped.json").exists()


def test_a_job_that_hangs_once_goes_on_by_itself(tmp_path, shards, ranks):
    ranks(2, run, tree_in(tmp_path / "whole", shards), str(tmp_path / "cache"), init=False, timeout=300.0)
    assert not (tmp_path / "whole" / "tiny" / "stacks").exists()  # nothing was written, so nothing is left
    hanging = tree_in(tmp_path / "hangs", shards)
    fault = {"do": "stand_still", "rank": 0, "step": STEP}
    with job(tmp_path / "hangs" / "job", hanging, fault, "--max-restarts", "1") as running:
        assert running.end(240)[0] == 0, running.output
    assert all_equal(weights(tmp_path / "whole", STEPS), weights(tmp_path / "hangs", STEPS))
    assert "in stand_still" in (running.run / "stacks" / "rank-0.txt").read_text()


@pytest.mark.parametrize("in_background", [True, False])
def test_a_long_save_is_not_taken_for_a_hang(tmp_path, shards, in_background):
    """It takes rank 0 longer than a step may, while the others wait in the next one."""
    changes = {"train__checkpoint_every": 2, "train__steps": 10, "train__save_in_background": in_background}
    tree = tree_in(tmp_path, shards, **changes)
    tree["run"] |= {"timeout_s": 60.0, "step_timeout_s": 4.0}
    with job(tmp_path / "job", tree, {"saving_s": 6.0}) as running:
        assert running.end(240)[0] == 0, running.output
    assert "no progress" not in running.output


def test_a_long_evaluation_is_not_taken_for_a_hang(tmp_path, shards):
    """It takes longer than a step may, and longer than the timeout, but shows that it goes on."""
    tree = tree_in(tmp_path, shards, train__evaluate_every=7, evaluation=retrieval(shards, batch_size=2))
    tree["run"] |= {"timeout_s": 15.0, "step_timeout_s": 4.0}
    with job(tmp_path / "job", tree, {"each_evaluation_batch_s": 1.0, "saving_s": 6.0}) as running:
        assert running.end(240)[0] == 0, running.output
    assert "no progress" not in running.output


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_that_never_ends_ends_the_job_in_time(tmp_path, shards, in_background):
    """Rank 0's disk is stuck: it waits for its writer in the next save, or at once; rank 1 waits for it in a step."""
    tree = tree_in(tmp_path, shards, train__checkpoint_every=3, train__save_in_background=in_background)
    tree["run"] |= {"timeout_s": PATIENCE_S, "step_timeout_s": LIMIT_S}
    running, took, rank_0, rank_1 = failed(tmp_path, tree, {"do": "stand_still", "in": "saving"}, "saving-0")
    assert took < 2 * PATIENCE_S + 30  # the limit of the save counts from the next one where it is in the background
    assert "in stand_still" in rank_0
    assert "in in_save" in rank_0
    assert re.search(r"rank 0: no progress for 20 s \(run.timeout_s\): \d+ steps done, saving", running.output)
    assert "in run_collective" in rank_1
    assert not list((running.run / "checkpoints").glob("step-*"))  # nothing half written counts


def test_a_rank_that_hangs_in_an_evaluation_ends_the_job_in_time(tmp_path, shards):
    pairs = retrieval(shards, batch_size=2)
    tree = tree_in(tmp_path, shards, train__evaluate_every=3, train__steps=9, evaluation=pairs)
    tree["run"] |= {"timeout_s": PATIENCE_S, "step_timeout_s": LIMIT_S}
    fault = {"do": "stand_still", "in": "evaluation", "rank": 1}
    running, took, rank_0, rank_1 = failed(tmp_path, tree, fault, "evaluation-1")
    assert took < PATIENCE_S + 30
    assert "in stand_still" in rank_1
    assert "in run_collective" in rank_0
    assert re.search(r"rank 1: no progress for 20 s \(run.timeout_s\): 3 steps done, evaluating", running.output)


# ---- ranks and data workers that die without a restart


LOST = {
    "kill_myself": ("failed on rank 0:", "Another rank has most likely died"),
    "kill_a_worker": ("rank 1: a data worker died", "Was it killed for memory? Fewer data.workers"),
}


@pytest.mark.parametrize("fault", LOST)
def test_a_killed_rank_or_worker_ends_the_job_within_the_timeout_without_restarts(tmp_path, shards, fault):
    """No rank waits for the timeout, which would be an hour: what is lost is noticed."""
    tree = tree_in(tmp_path, shards)
    tree["run"] |= {"timeout_s": 3600.0, "step_timeout_s": 3600.0}
    with job(tmp_path / "job", tree, {"do": fault, "rank": 1, "step": STEP}) as running:
        running.wait_for_mark(f"step-{STEP}-1")
        status, took = running.end()
    assert status == 1
    assert took < (60 if fault == "kill_a_worker" else 30)
    for text in LOST[fault]:
        assert text in running.output
    if fault == "kill_myself":
        assert "another rank is lost" in (running.run / "stacks" / "rank-0.txt").read_text()
