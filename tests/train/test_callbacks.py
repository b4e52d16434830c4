"""Callbacks: their order, those of users, and errors in them (`vqclip.train.callbacks`)."""

import logging
import time
from unittest import mock

import pytest

from tests.models import change
from tests.training import retrieval, run_tree
from vqclip import dist
from vqclip.evaluation import read_evaluation, stored_files
from vqclip.process.watchdog import Watchdog
from vqclip.tokenizer.folder import WEIGHTS_FILE
from vqclip.train import Callback
from vqclip.train import run as train
from vqclip.train.callbacks import builtin
from vqclip.train.speed import SpeedMeter
from vqclip.train.step import TrainStep


class Recorder(Callback):
    """Records the hooks, and what a run has written by then."""

    def __init__(self):
        self.hooks, self.seen = [], []

    def on_train_start(self, training):
        self.hooks.append(("start", training.done))

    def on_step_start(self, training):
        for part in (training.step.model, training.step.model.image.tower):
            assert part.training, "whatever the hook before has done"
        self.hooks.append(("step", training.batch.step))

    def on_step_end(self, training):
        self.hooks.append(("done", training.done))
        assert float(training.result.terms["total"]) > 0
        folder = training.config.run.path
        if not dist.is_main():
            return
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.seen.append([len(lines), *sorted(path.name[-1] for path in (folder / "checkpoints").glob("step-*"))])

        (training.step.model if training.done % 2 else training.step.model.image).eval()

    def on_train_end(self, training):
        self.hooks.append(("end", training.done))

    def on_error(self, training, error):
        self.hooks.append(("error", str(error)))


def test_a_callback_of_a_user_comes_after_reports_and_checkpoints(tmp_path, shards):
    every = {"train__checkpoint_every": 2, "train__save_in_background": False, "train__keep_checkpoints": 9}
    tree = run_tree(tmp_path, shards, train__steps=5, **every)
    recorder = Recorder()
    assert train(tree, callbacks=(each for each in [recorder])).step == 5
    steps = [(hook, number) for step in range(5) for hook, number in (("step", step), ("done", step + 1))]
    assert recorder.hooks == [("start", 0), *steps, ("end", 5)]
    assert recorder.seen == [[1], [2, "2"], [3, "2"], [4, "2", "4"], [5, "2", "4", "5"]]


def test_the_first_steps_after_a_change_of_the_model_have_the_long_limit(tmp_path, shards, monkeypatch):
    """As it may be compiled again."""
    patient = []
    monkeypatch.setattr(TrainStep, "move_to_step", lambda self, step: step == 3)
    monkeypatch.setattr(Watchdog, "expect_compilation", lambda self: patient.append(self._position.done))
    bottleneck = {"open_steps": 1, "close_steps": 1}
    train(run_tree(tmp_path, shards, train__steps=5, train__bottleneck=bottleneck))
    assert patient == [2, 3]


class FailsOnRankOne(Callback):
    def on_step_end(self, training):
        if training.done == 3 and dist.rank() == 1:
            raise ZeroDivisionError("mine")


def train_with_a_failing_callback(tree):
    begun, recorder = time.monotonic(), Recorder()
    try:
        train(tree, callbacks=[FailsOnRankOne(), recorder])
    except Exception as error:
        return type(error).__name__, str(error), recorder.hooks[-1], time.monotonic() - begun
    raise AssertionError("no error")


def test_an_error_in_a_callback_of_one_rank_ends_the_run_on_all(tmp_path, shards, ranks):
    tree = run_tree(tmp_path, shards, train__steps=8, run__timeout_s=30.0)
    waiting, failing = ranks(2, train_with_a_failing_callback, tree, init=False)
    assert failing[:3] == ("ZeroDivisionError", "mine", ("error", "mine"))
    assert waiting[0] == "DistributedError"
    assert "the first error in the output of the other ranks is the cause" in waiting[1]
    assert waiting[3] < 30
    log = (tmp_path / "tiny" / "train.rank1.log").read_text()
    assert "callback FailsOnRankOne failed in on_step_end, 3 steps done" in log
    assert "ZeroDivisionError: mine" in log


# ---- The report of a run.


@pytest.fixture
def tree(tmp_path, shards):
    changes = {"train__steps": 4, "train__evaluate_every": 2, "optim__warmup_steps": 0}
    return run_tree(tmp_path, shards, evaluation=retrieval(shards), **changes)


class ReadReport(Callback):
    def __init__(self):
        self.found, self.pages = [], []

    def on_step_end(self, training):
        self.found.append([read_evaluation(path).step for path in stored_files(training.config.run.path)])
        page = training.config.run.path / "report.html"
        self.pages.append(page.exists() and "step 2 of 4" in page.read_text())


def test_every_evaluation_writes_its_report(tree, tmp_path):
    seen = ReadReport()
    result = train(tree, [seen])
    assert seen.found == [[], [2], [2], [2]]
    assert seen.pages == [False, True, True, True]
    (path,) = stored_files(tmp_path / "tiny")
    found = read_evaluation(path)
    assert (found.step, found.result) == (4, result.results[0])
    assert found.result.details.examples[0].cards
    page = (tmp_path / "tiny" / "report.html").read_text()
    assert "step 4 of 4" in page
    assert "M trained weights; " in page
    assert ": 4 tokens × 64 codes = 24 bits a sample" in page
    assert "finished" in page
    assert "report.html" in str(result)


def test_what_watches_a_run_changes_no_bit(tree, tmp_path, monkeypatch):
    """A report, a tracker, a callback, and the count of FLOPs."""
    train(change(tree, {"run__name": "with", "run__trackers": ["tensorboard"], "report": {}}), [ReadReport()])
    monkeypatch.setattr(SpeedMeter, "count", lambda self, step, batch: setattr(self, "_flops", 1.0))
    train(change(tree, {"run__name": "without", "run__trackers": [], "report": None}))
    one, other = (tmp_path / name / "tokenizer" / WEIGHTS_FILE for name in ("with", "without"))
    assert one.read_bytes() == other.read_bytes()
    assert (tmp_path / "with" / "tensorboard").is_dir()


def test_null_writes_no_page_and_no_details(tree, tmp_path):
    result = train({**tree, "report": None})
    (path,) = stored_files(tmp_path / "tiny")
    assert read_evaluation(path).result == result.results[0]
    assert result.results[0].details is None
    assert not (tmp_path / "tiny" / "report.html").exists()


def test_a_page_that_cannot_be_made_ends_no_run(tree, caplog, monkeypatch):
    monkeypatch.setattr(builtin, "write_report", mock.Mock(side_effect=ZeroDivisionError("by design")))
    with caplog.at_level(logging.WARNING):
        assert train(tree).finished
    (first, *_) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("report.html: ")]
    assert first.endswith("after step 2; the run continues without it: ZeroDivisionError: by design")
