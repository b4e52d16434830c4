"""Checkpoints are written while the training goes on, and hold what they would hold if it waited."""

import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.models import BUSY_RESIDUAL
from tests.training import all_equal, before_steps, run_tree
from vqclip import checkpoint
from vqclip.errors import CheckpointError, NonFiniteError
from vqclip.tokenizer.folder import WEIGHTS_FILE
from vqclip.tokenizer.saving import write_weights
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.checkpointer import Checkpointer

EVERY = 3
STEPS = 7


@pytest.fixture
def config(tmp_path, shards, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))

    def make(name: str, **changes):
        every = {"train__steps": STEPS, "train__checkpoint_every": EVERY, "train__keep_checkpoints": 9}
        return TrainConfig.model_validate(run_tree(tmp_path / name, shards, BUSY_RESIDUAL, **(every | changes)))

    return make


@pytest.fixture
def steps_run():
    """Numbers of the steps that have been run so far."""
    numbers: list[int] = []
    with before_steps(lambda step, batch, number: numbers.append(number)):
        yield numbers


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def held_back(monkeypatch, steps_run):
    """Let no checkpoint be written before somebody waits for it; tells how many steps had been run by then."""
    asked = threading.Event()
    save, wait = checkpoint.save, Checkpointer.wait
    found = {}

    def late(folder, step, *rest):
        assert asked.wait(60)
        asked.clear()
        found[step] = len(steps_run)
        return save(folder, step, *rest)

    def waiting(self):
        if self._writing is not None:
            asked.set()
        return wait(self)

    monkeypatch.setattr(checkpoint, "save", late)
    monkeypatch.setattr(Checkpointer, "wait", waiting)
    return found


def test_what_is_saved_does_not_follow_the_training(config, monkeypatch, steps_run):
    train(waiting := config("waiting", train__save_in_background=False))
    steps_run.clear()
    found = held_back(monkeypatch, steps_run)
    train(going_on := config("going on"))
    assert found == {3: 6, 6: 7, 7: 7}  # each but the last was written when more steps had been run
    one, other = (files(each.run.path / "checkpoints") for each in (waiting, going_on))
    assert len(one) > 12
    assert one == other


def test_a_failed_write_ends_the_run_at_the_next_step(config, monkeypatch, steps_run):
    save = checkpoint.save
    failed = threading.Event()

    def full(folder, step, *rest):
        if step < 2 * EVERY:
            return save(folder, step, *rest)
        failed.set()
        raise CheckpointError("disk full")

    monkeypatch.setattr(checkpoint, "save", full)
    check = Checkpointer.raise_if_failed

    def patient(self):
        if failed.wait(0):
            while not self._writing[1].done():
                pass
        check(self)

    monkeypatch.setattr(Checkpointer, "raise_if_failed", patient)
    settings = config("full", train__steps=40)
    with pytest.raises(CheckpointError, match="disk full"):
        train(settings)
    assert len(steps_run) <= 2 * EVERY + 1
    assert checkpoint.latest(settings.run.path / "checkpoints").name == "step-00000003"


def test_an_error_in_the_training_leaves_the_last_checkpoint_whole(config, monkeypatch, steps_run):
    found = held_back(monkeypatch, steps_run)

    def fail(step, batch, number):
        if number == EVERY + 1:
            raise NonFiniteError("the loss is NaN")

    settings = config("failing")
    with before_steps(fail), pytest.raises(NonFiniteError):
        train(settings)
    assert found == {EVERY: EVERY + 1}
    assert checkpoint.latest(settings.run.path / "checkpoints").name == "step-00000003"


def test_tied_tensors_are_stored_apart(tmp_path):
    tensor = torch.arange(6.0)
    state = {"one": tensor, "other": tensor, "part": tensor[2:], "turned": tensor.reshape(2, 3).T}
    write_weights(tmp_path, state)
    assert all_equal(load_file(tmp_path / WEIGHTS_FILE), state)
