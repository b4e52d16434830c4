"""Each step of metrics.jsonl reaches each tracker once, whenever the process is killed."""

import itertools
import logging
import shutil
from contextlib import closing

import pytest

from tests.runlog.trackers import reading
from vqclip.errors import ConfigError
from vqclip.runlog.metrics import JsonLines
from vqclip.runlog.trackers import Feed, RunFacts, TensorBoardConfig, Tracker

# TensorBoard's thread fails after the test that deletes its folder.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def facts(folder):
    return RunFacts("run", folder, {"optim": {"lr": 0.1}}, "optim: {lr: 0.1}\n")


class Memory(Tracker):
    """A tracker whose disk is a list; it may be killed at any call."""

    def __init__(self, disk, keeps):
        self.disk, self.appends_only, self.calls = disk, keeps, []

    def start(self, facts, resumed):
        if self.appends_only:
            return max((step for step, _ in self.disk), default=-1)
        self.disk[:] = [(step, row) for step, row in self.disk if step < resumed]
        return resumed - 1

    def log(self, step, scalars, histograms):
        self.disk.append((step, dict(scalars)))

    def text(self, step, name, text):
        self.calls.append((step, name, text))

    def close(self):
        self.calls.append("close")


class Killed(Exception):
    pass


def live(folder, disks, start, moment):
    """Train from a step; reports every 2, checkpoints every 3, evaluations every 4 of 13 steps; killed at a moment.

    Returns:
        The step of the newest checkpoint; -1 at the end.
    """
    clock, saved, steps = itertools.count(), start, 13

    def tick():
        if next(clock) == moment:
            raise Killed

    try:
        log = JsonLines(folder / "metrics.jsonl", start_step=start)
        feed = Feed({str(keeps): Memory(disk, keeps) for keeps, disk in disks.items()}, facts(folder), log.path, start)

        def record(step, values):
            written = log.write(step, values)
            tick()
            feed.write(step, written) if written else None
            tick()

        def evaluate(step):
            record(step, {"eval/a": step / 7})

        if start and start % 4 == 0 and "eval/a" not in log.recorded:
            evaluate(start)
        for step in range(start + 1, steps + 1):
            if step % 2 == 0 or step == steps:
                record(step, {"loss/total": 1 / step, "lr": float(step)})
            if step % 3 == 0 or step == steps:
                log.flush()
                feed.flush(step)
                tick()
                saved = step
            if step % 4 == 0:
                evaluate(step)
        evaluate(steps)
        feed.close(finished=True)
        return -1
    except Killed:
        return saved


@pytest.mark.parametrize("back", [0, 3], ids=["newest checkpoint", "the one before"])
def test_no_step_is_lost_or_sent_twice_whenever_it_is_killed(tmp_path, back):
    for number, moments in enumerate(itertools.product(range(0, 26, 2), range(1, 14, 3))):
        folder, disks, start = tmp_path / str(number), {False: [], True: []}, 0
        for moment in (*moments, None):
            start = live(folder, disks, start, moment)
            if start == -1:
                break
            start = max(start - back, 0) if start < 13 else start
        assert start == -1
        whole = reading.expected(folder)
        assert sorted(whole) == [2, 4, 6, 8, 10, 12, 13]
        for disk in disks.values():
            assert [step for step, _ in disk] == sorted(whole), moments
            assert dict(disk) == whole, moments


def test_an_unfinished_run_leaves_its_last_step_open_for_trackers_that_only_append(tmp_path):
    disks = {False: [], True: []}
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        trackers = {str(keeps): Memory(disk, keeps) for keeps, disk in disks.items()}
        feed = Feed(trackers, facts(tmp_path), log.path, 0)
        feed.write(1, log.write(1, {"lr": 1.0}))
        feed.close(finished=False)
        feed.close(finished=False)
        assert disks == {False: [(1, {"train/lr": 1.0})], True: []}
        assert {kind: each.calls for kind, each in trackers.items()} == {"False": ["close"], "True": ["close"]}
        feed = Feed({"True": Memory(disks[True], True)}, facts(tmp_path), log.path, 1)
        feed.write(1, log.write(1, {"eval/a": 0.5}))
        feed.close(finished=True)
    assert disks[True] == [(1, {"train/lr": 1.0, "eval/a": 0.5})]


class Failing(Memory):
    def log(self, step, scalars, histograms):
        raise OSError("https://user:hunter2@host: disk full")


def test_a_tracker_that_fails_is_a_warning_in_words(tmp_path, caplog):
    good, bad = Memory([], False), Failing([], False)
    feed = Feed({"good": good, "bad": bad}, facts(tmp_path), tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        feed.write(step, {"lr": 1.0})
    feed.text(3, "warning", "https://user:hunter2@host")
    feed.close(finished=True)
    (message,) = caplog.messages
    assert message.startswith("bad failed (log: OSError: https://")
    assert "the run continues without it; metrics.jsonl has everything" in message
    assert "hunter2" not in message
    assert [step for step, _ in good.disk] == [1, 2, 3]
    assert good.calls[-1] == "close"
    assert "hunter2" not in str(good.calls)


def test_a_folder_that_is_deleted_ends_no_run(tmp_path, caplog):
    feed = Feed({"tensorboard": TensorBoardConfig().build()}, facts(tmp_path), tmp_path / "metrics.jsonl", 0)
    for step in range(1, 40):
        feed.write(step, {"lr": 1.0})
        feed.flush(step)
        if step == 20:
            shutil.rmtree(tmp_path / "tensorboard")
    feed.close(finished=True)
    assert caplog.text.count("tensorboard failed (flush: FileNotFoundError") == 1


class Refusing(Memory):
    def start(self, facts, resumed):
        raise ValueError("no login")


def test_a_tracker_that_cannot_start_ends_a_new_run_but_not_a_resumed_one(tmp_path, caplog):
    other = Memory([], False)
    with pytest.raises(ConfigError, match=r"run\.trackers: bad cannot start: ValueError: no login\. Correct"):
        Feed({"other": other, "bad": Refusing([], False)}, facts(tmp_path), tmp_path / "metrics.jsonl", 0)
    assert other.calls == ["close"]
    with caplog.at_level(logging.WARNING):
        feed = Feed({"bad": Refusing([], False)}, facts(tmp_path), tmp_path / "metrics.jsonl", 5)
    feed.close(finished=True)
    assert caplog.messages[0].startswith("bad cannot start: ValueError: no login: the run continues without it")


def test_a_damaged_line_of_the_file_ends_no_resume(tmp_path, caplog):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        for step in (1, 2, 3):
            log.write(step, {"lr": step / 7})
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + b"\xff\x00 damaged\n" + lines[2])
    disk = []
    feed = Feed({"memory": Memory(disk, True)}, facts(tmp_path), log.path, 3)
    feed.write(4, {"lr": 1.0})
    feed.close(finished=True)
    assert [step for step, _ in disk] == [1, 3, 4]
    assert "metrics.jsonl:2: not a line of metrics" in caplog.text
