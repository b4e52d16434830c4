"""SIGKILL at random moments: no run is lost, and what comes out is what would have come out."""

from __future__ import annotations

import random
import time

import pytest

from tests.data.making import caption_shards
from tests.faults.jobs import global_batches, job
from tests.models import BUSY_RESIDUAL
from tests.test_resume import assert_same_run
from tests.training import largest_difference, run_tree, weights
from vqclip import checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

SAVES_KILLED = 40
STEPS_KILLED = 20


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(17, 13))


def tree_of(folder, shards, **changes):
    return run_tree(folder, shards, BUSY_RESIDUAL, **({"train__precision": "fp32"} | changes))


def test_a_run_killed_while_saving_can_always_go_on(tmp_path, shards):
    """One run that saves after every step, killed again and again while a checkpoint is being written.

    The moment of a kill is drawn from (0, number of the kill): up to 20 ms after the unfinished folder was seen.
    """
    tree = tree_of(tmp_path, shards, train__steps=100_000, train__checkpoint_every=1, train__keep_checkpoints=1)
    folder = tmp_path / "tiny" / "checkpoints"
    caught, last = 0, 0
    for number in range(SAVES_KILLED):
        with job(tmp_path / "job", tree, {}, processes=1) as running:
            # It goes on from where the last one was killed and saves again, so the run was usable.
            running.wait_for(lambda last=last: newest(folder) > last)
            last = newest(folder)
            running.wait_for(lambda: unfinished(folder), often_s=0)
            time.sleep(random.Random(f"0 {number}").uniform(0, 0.02))
            running.kill()
        caught += unfinished(folder)
        assert checkpoint.latest(folder) is not None
        assert newest(folder) >= last
    assert caught >= SAVES_KILLED // 4, f"only {caught} kills met an unfinished checkpoint: the test tests little"
    print(f"{SAVES_KILLED} kills, {caught} of them left an unfinished checkpoint; step {newest(folder)} is whole")


def newest(folder) -> int:
    return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)


def unfinished(folder) -> bool:
    return any(path.name.startswith(".") for path in folder.iterdir()) if folder.exists() else False


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_while_training_ends_as_if_it_had_not_been(tmp_path, shards, processes):
    """Twenty kills in all, ten on either number of processes; moments drawn from (1, processes, number of the kill)."""
    steps = 200
    changes = {"train__steps": steps, "train__checkpoint_every": 3, "data__workers": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, tree_of(whole, shards, **changes), processes)

    tree, folder = tree_of(killed, shards, **changes), killed / "tiny" / "checkpoints"
    resumed = []
    for number in range(STEPS_KILLED // 2):
        resumed.append(newest(folder))
        draw = random.Random(f"1 {processes} {number}")
        goal = resumed[-1] + draw.randint(1, 2 * steps // STEPS_KILLED)
        with job(killed / "job", tree, {}, processes=processes) as running:
            running.wait_for(lambda goal=goal, running=running: max(running.steps(0), default=0) >= goal)
            time.sleep(draw.uniform(0, 0.05))
            running.kill()
    finish(killed, tree, processes)

    assert len(set(resumed)) > STEPS_KILLED // 4  # most kills came after a new checkpoint
    one, other = (global_batches(folder / "job" / "records.jsonl") for folder in (whole, killed))
    assert sorted(one) == sorted(other) == list(range(steps))
    assert all(len(batches) == 1 for batches in other.values())
    assert one == other
    assert_same_run(whole, killed, steps)


def finish(folder, tree, processes, fault=None):
    with job(folder / "job", tree, fault or {}, processes=processes) as running:
        status, _ = running.end(400)
        assert status == 0, running.output


def test_the_number_of_processes_may_change_in_the_middle_of_an_epoch(tmp_path, shards):
    """2 → 1 → 4 → 2 processes, stopped by SIGTERM, against 2 all along: 30 samples in batches of 8."""
    steps = 40
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    changes = {"train__steps": steps, "train__precision": "fp64", "train__batch_size": 8}
    finish(whole, tree_of(whole, shards, **changes), 2)
    tree = tree_of(changed, shards, **changes)
    for processes, stop_at in ((2, 7), (1, 16), (4, 29), (2, None)):
        fault = {} if stop_at is None else {"do": "ask_to_stop", "rank": 0, "step": stop_at}
        finish(changed, tree, processes, fault)
        assert stop_at is None or newest(changed / "tiny" / "checkpoints") == stop_at + 1

    one, other = (global_batches(folder / "job" / "records.jsonl") for folder in (whole, changed))
    assert one == other
    assert sorted(one) == list(range(steps))
    assert all(len(batches) == 1 for batches in other.values())
    seen = [i for step in range(30) for batch in other[step] for i in batch]  # 240 samples: eight epochs of 30
    assert sorted(seen) == sorted(list(range(30)) * 8)
    difference = largest_difference(weights(whole, steps), weights(changed, steps))
    print(f"largest relative difference of a tensor: {difference:.2g}")
    assert difference < 1e-6
