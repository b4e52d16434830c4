from __future__ import annotations

import logging

import pytest

from tests.training import retrieval, run_tree
from vqclip.evaluation import read_evaluation, stored_files
from vqclip.tokenizer.folder import WEIGHTS_FILE
from vqclip.train import Callback, run
from vqclip.train.callbacks import builtin
from vqclip.train.speed import SpeedMeter


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
    result = run(tree, [seen])
    assert seen.found == [[], [2], [2], [2]]
    assert seen.pages == [False, True, True, True]
    (path,) = stored_files(tmp_path / "tiny")
    found = read_evaluation(path)
    assert (found.step, found.result) == (4, result.results[0])
    assert found.result.details.examples[0].misses
    page = (tmp_path / "tiny" / "report.html").read_text()
    assert "step 4 of 4" in page
    assert "finished" in page
    assert "report.html" in str(result)


def test_details_that_cannot_be_written_end_no_run(tree, tmp_path, caplog):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "report").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert run(tree).finished
    (first, second) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("report: ")]
    assert "cannot be written after step 2; the run continues without it: " in first
    assert str(tmp_path / "tiny" / "report") in second


def test_what_watches_a_run_changes_no_bit(tree, tmp_path, monkeypatch):
    """A report, a tracker, a callback, and the count of FLOPs."""
    weights = []
    cases = (("with", {}, ["tensorboard"], [ReadReport()]), ("without", None, [], []))
    for name, report_, trackers, callbacks in cases:
        if name == "without":
            monkeypatch.setattr(SpeedMeter, "count", lambda self, step, batch: setattr(self, "_flops", 1.0))
        run({**tree, "run": tree["run"] | {"name": name, "trackers": trackers}, "report": report_}, callbacks)
        weights.append((tmp_path / name / "tokenizer" / WEIGHTS_FILE).read_bytes())
    assert weights[0] == weights[1]
    assert (tmp_path / "with" / "tensorboard").is_dir()


def test_null_writes_none(tree, tmp_path):
    result = run({**tree, "report": None})
    assert result.results[0].details is None
    assert not (tmp_path / "tiny" / "report").exists()
    assert not (tmp_path / "tiny" / "report.html").exists()


def test_a_page_that_cannot_be_made_ends_no_run(tree, tmp_path, caplog, monkeypatch):
    def fail(run):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(builtin, "write_report", fail)
    with caplog.at_level(logging.WARNING):
        assert run(tree).finished
    (first, _) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("report.html: ")]
    assert first.endswith("after step 2; the run continues without it: ZeroDivisionError: by design")
