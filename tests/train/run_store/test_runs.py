"""Whole runs at a URL: stopped, continued elsewhere, moved there, ended by an error."""

from __future__ import annotations

import json

import pytest

from tests.data.making import caption_shards
from tests.training import all_equal, run_tree, weights
from vqclip.errors import CheckpointError, ConfigError
from vqclip.train import Callback, TrainConfig
from vqclip.train import run as train

pytestmark = pytest.mark.slow


class Ask(Callback):
    """Remember what is at the URL when the training begins."""

    def __init__(self, store):
        self.store = store

    def on_train_start(self, training):
        self.names = self.store.names()


class StopAt(Callback):
    """Ask for a stop after a step, or fail there."""

    def __init__(self, step, error=None):
        self.step, self.error = step, error

    def on_step_end(self, training):
        if training.done == self.step and self.error:
            raise self.error
        if training.done == self.step:
            training.request_stop("test")


@pytest.fixture
def tree_at(tmp_path):
    shards = caption_shards(tmp_path / "shards", counts=(17, 13))
    pairs = [{"kind": "retrieval", "name": "pairs", "data": {"kind": "shards", "path": str(shards)}}]
    best = {"train__keep_best": "eval/pairs/codes_only/i2t_r1", "train__evaluate_every": 2, "evaluation": pairs}

    def make(place, **changes):
        return run_tree(place, shards, **best | {"train__steps": 8, "train__checkpoint_every": 2} | changes)

    return make


def test_a_stopped_run_continues_elsewhere_with_its_best_step(tmp_path, store, monkeypatch, tree_at):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    slow = {"optim__lr": 1e-9}  # so that the first evaluation stays the best
    tree = tree_at("s3://bucket/runs", **slow)
    assert train(tree, [StopAt(5)]).stopped == "test"
    notes = json.loads(store.cat_file("/bucket/runs/tiny/stopped.json", timeout=1))
    assert (notes["step"], notes["checkpoint"]) == (5, "checkpoints/step-00000005")
    assert json.loads(store.cat_file("/bucket/runs/tiny/lease/00000001.json", timeout=1))["released"]

    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "b"))
    copy = TrainConfig.model_validate(tree).run.path
    ask = Ask(store)
    result = train(tree, [ask])
    assert "stopped.json" not in ask.names
    assert "stored at   s3://bucket/runs/tiny" in str(result)
    whole = train(tree_at(tmp_path / "whole", **slow))
    assert whole.summary.best["step"] == 2
    assert result.summary.best == whole.summary.best
    assert all_equal(weights(copy.parent, 8), weights(tmp_path / "whole", 8))
    best = f"checkpoints/step-{result.summary.best['step']:08d}/manifest.json"
    assert (copy / best).is_file()
    assert best in store.names()


def test_a_run_folder_that_was_copied_to_a_url(tmp_path, store, monkeypatch, tree_at):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    run = train(tree_at(tmp_path / "runs")).folder
    for path in run.rglob("*"):
        if path.is_file():
            store.pipe_file(f"/bucket/runs/tiny/{path.relative_to(run).as_posix()}", path.read_bytes(), timeout=1)
    tree = tree_at("s3://bucket/runs", train__steps=10, run__resume_allow=["train.steps"])
    assert train(tree).step == 10
    assert "resumed from step 8" in store.cat_file("/bucket/runs/tiny/train.log", timeout=1).decode()
    with pytest.raises(ConfigError, match="got 'never', but s3://bucket/runs/tiny/checkpoints contains checkpoints"):
        train(tree_at("s3://bucket/runs", run__resume="never"))


def test_what_an_error_leaves_is_uploaded(tmp_path, store, monkeypatch, tree_at):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    with pytest.raises(ValueError, match="mine"):
        train(tree_at("s3://bucket/runs"), [StopAt(3, ValueError("mine"))])
    assert "StopAt failed in on_step_end" in store.cat_file("/bucket/runs/tiny/train.log", timeout=1).decode()
    assert json.loads(store.cat_file("/bucket/runs/tiny/lease/00000001.json", timeout=1))["released"]


class FailUploads(Callback):
    """Refuse uploads after a step."""

    def __init__(self, store, step):
        self.store, self.step = store, step

    def on_step_end(self, training):
        if training.done == self.step:
            self.store.failing["put_file"] = [PermissionError("read only")] * 99


def test_the_only_checkpoint_that_is_kept_is_uploaded_by_the_next_job(tmp_path, store, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "a"))
    changes = {"train__steps": 6, "train__checkpoint_every": 2, "train__keep_checkpoints": 1}
    changes["train__save_in_background"] = False
    tree = run_tree("s3://bucket/runs", caption_shards(tmp_path / "shards", counts=(17, 13)), **changes)
    with pytest.raises(CheckpointError, match="step-00000004: the checkpoint could not be uploaded"):
        train(tree, [FailUploads(store, 3)])
    store.failing.clear()
    result = train(tree)
    assert result.step == 6
    assert "resumed from step 4" in (result.folder / "train.log").read_text()
