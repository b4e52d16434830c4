"""A job of two ranks that is asked to stop: one common checkpoint within 30 s, a marker, and it goes on exactly."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, children, job
from tests.training import all_equal, retrieval, run, run_tree, timeless, weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

STEPS = 24
WITHIN_S = 30.0


def tree_in(folder, shards, **changes):
    pairs = retrieval(shards, batch_size=3)
    every = {"train__steps": STEPS, "train__precision": "fp32", "train__evaluate_every": 12, "evaluation": pairs}
    # A busy machine may take minutes over a first batch.
    return run_tree(folder, shards, **({"data__workers": 1, "run__timeout_s": 600.0} | every | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, ranks):
    """Two ranks that nothing stops: the folder of their run."""
    folder = tmp_path_factory.mktemp("whole")
    ranks(2, run, tree_in(folder, shards), str(folder / "cache"), init=False, timeout=300.0)
    return folder


def to_torchrun(running: Job, number: signal.Signals) -> None:
    running.process.send_signal(number)


def to_all(running: Job, number: signal.Signals) -> None:
    """As a scheduler does that signals every process of a step."""
    for pid in running.ranks():
        os.killpg(pid, number)
    running.process.send_signal(number)


def to_rank_1(running: Job, number: signal.Signals) -> None:
    os.kill(running.ranks()[1], number)


FORWARDING = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")


SENT = {
    "SIGTERM": (signal.SIGTERM, to_torchrun, (), "", 1),
    "SIGINT": (signal.SIGINT, to_torchrun, (), "", 1),
    "SIGHUP": (signal.SIGHUP, to_torchrun, (), "", 1),
    "SIGHUP to all": (signal.SIGHUP, to_all, (), "", 1),
    "SIGUSR1 forwarded": (signal.SIGUSR1, to_torchrun, FORWARDING, "", 1),
    "SIGUSR1 to all, ignored by torchrun": (signal.SIGUSR1, to_all, (), "trap '' USR1", 0),
    "SIGTERM to one rank": (signal.SIGTERM, to_rank_1, ("--max-restarts", "1"), "", 0),
}
"""Signal, who gets it, options of torchrun, and its status: 1 where it was signalled itself; the marker tells."""


@pytest.mark.parametrize("sent", SENT)
def test_a_stopped_job_saves_one_common_step_and_goes_on(tmp_path, shards, ranks, whole, sent):
    number, send, options, shell, status = SENT[sent]
    tree = tree_in(tmp_path, shards)
    with job(tmp_path / "job", tree, {"each_step_s": 0.3}, *options, shell=shell) as running:
        running.wait_for_mark("step-4-1")
        send(running, number)
        running.wait_for_stop(WITHIN_S)
        got, _ = running.end()
    assert got == status, running.output
    facts = stopped_at(running)
    assert (facts["steps"], facts["signal"]) == (STEPS, number.name)
    assert 4 <= facts["step"] < STEPS
    # Both ranks did this step, and neither began the next.
    for rank in (0, 1):
        assert running.steps(rank) == list(range(facts["step"]))
    goes_on(ranks, tmp_path, tree, whole, facts["step"])


def stopped_at(running):
    """The marker, which is right about the newest checkpoint, if there is one."""
    facts = json.loads((running.run / "stopped.json").read_text())
    saved = sorted(path.name for path in (running.run / "checkpoints").glob("step-*"))
    assert facts["checkpoint"] == (f"checkpoints/{saved[-1]}" if saved else None)
    assert saved[-1:] == ([f"step-{facts['step']:08d}"] if facts["step"] else [])
    assert not (running.run / "summary.json").exists()
    return facts


def goes_on(ranks, folder, tree, whole, done):
    """Two ranks come to the end of a run that nothing stopped: weights, metrics, and only the steps left."""
    parts = ranks(2, run, tree, str(folder / "cache"), init=False, timeout=300.0)
    assert [len(part["sample_ids"]) for part in parts] == [STEPS - done] * 2
    assert not (folder / "tiny" / "stopped.json").exists()
    assert (folder / "tiny" / "summary.json").exists()
    assert all_equal(weights(whole, STEPS), weights(folder, STEPS))
    assert timeless(folder) == timeless(whole)


BUSY = {
    "starting": ("indexing-1", {"each_shard_s": 3.0}, [0]),
    "in a step": ("step-4-1", {"each_step_s": 0.3}, range(4, STEPS)),
    "in an evaluation": ("evaluation-0", {"each_evaluation_batch_s": 5.0}, [12]),
    "while saving": ("saving-0", {"saving_s": 4.0}, range(9, 14)),
}
"""A mark that says so, the delays that make it take long, and the steps after which the job may stop."""


@pytest.mark.parametrize("killed", [False, True], ids=["SIGTERM", "torchrun is killed"])
@pytest.mark.parametrize("busy", BUSY)
def test_a_busy_job_stops_in_order(tmp_path, shards, ranks, whole, busy, killed):
    """Within seconds; also where torchrun alone is killed, and what it served, its store, is gone with it."""
    mark, fault, steps = BUSY[busy]
    tree = tree_in(tmp_path, shards, train__checkpoint_every=9)
    with job(tmp_path / "job", tree, fault) as running:
        running.wait_for_mark(mark)
        left = running.ranks()
        left += [child for pid in left for child in children(pid)]
        running.process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        running.wait_for_stop(WITHIN_S)
        running.end()
        end = time.monotonic() + 10
        while alive := [pid for pid in left if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < end, f"{alive} of {left} are still there\n{running.output}"
            time.sleep(0.02)
    assert ("torchrun is gone" in running.output) == killed
    assert "stopped after step" in running.output
    facts = stopped_at(running)
    assert facts["signal"] == "SIGTERM" or killed
    assert facts["step"] in steps
    goes_on(ranks, tmp_path, tree, whole, facts["step"])


def test_a_signal_finds_one_rank_waiting_for_the_other(tmp_path, shards, ranks, whole):
    """Rank 1 takes ten seconds over a step; the signal reaches rank 0 alone, in the collective."""
    tree = tree_in(tmp_path, shards)
    fault = {"do": "take_ten_seconds", "rank": 1, "step": 4}
    with job(tmp_path / "job", tree, fault) as running:
        running.wait_for_mark("step-4-1")
        os.kill(running.ranks()[0], signal.SIGTERM)
        running.wait_for_stop(WITHIN_S)
        status, _ = running.end()
    assert status == 0, running.output
    assert stopped_at(running)["step"] in (5, 6)
    goes_on(ranks, tmp_path, tree, whole, stopped_at(running)["step"])
