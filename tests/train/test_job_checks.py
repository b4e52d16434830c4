"""Checks of the machines of a job: two ranks that act as two machines with run folders of their own."""

import shutil
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.ranks import for_each
from tests.training import run_tree
from vqclip import dist
from vqclip.errors import ConfigError, DataError
from vqclip.train import TrainConfig, job_checks
from vqclip.train import run as train
from vqclip.train.job_checks import compare_machines, require_space
from vqclip.train.recipe import head_settings
from vqclip.train.tasks.kinds import load_task_config


def compare(folder: str, case: str) -> str:
    """The error of one rank; ``case`` is what is different on rank 1."""
    rank = dist.rank()
    tree = run_tree(Path(folder) / case / str(rank), Path("/nowhere"))
    if rank == 1 and case == "settings":
        tree["optim"]["lr"] = 0.5
    if rank == 1 and case == "checkpoint":
        (Path(folder) / case / "1" / "tiny" / "checkpoints" / "step-00000007").mkdir(parents=True)
    versions = (lambda: "torch 1.0") if rank == 1 and case == "versions" else job_checks._versions
    machine = mock.patch.object(socket, "gethostname", return_value=f"node{rank}")
    try:
        with machine, mock.patch.object(job_checks, "_versions", versions):
            compare_machines(TrainConfig.model_validate(tree))
    except ConfigError as error:
        return str(error)
    return ""


def test_machines_that_differ_are_told_apart(tmp_path, ranks):
    cases = [(str(tmp_path), case) for case in ("folders", "settings", "checkpoint", "versions")]
    main, other = ranks(2, for_each, compare, cases)
    assert main == other
    folders, settings, checkpoint, versions = main
    assert folders == ""
    assert "optim.lr: 0.001 on rank 0, 0.5 on rank 1 on node1" in settings
    assert "run.folder" not in settings
    assert "rank 1 on node1 has a checkpoint of step 7 in" in checkpoint
    assert "rank 0 on node0, which reads and writes" in checkpoint
    assert "on rank 0, 'torch 1.0' on rank 1 on node1" in versions


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path, monkeypatch):
    step = mock.Mock(ema=None, optimizer=mock.Mock(param_groups=[]))
    step.model.parameters = lambda: []
    step.model.state_dict = lambda: {"weight": torch.zeros(1000, 1000)}
    require_space(tmp_path, step)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: mock.Mock(total=10**9, free=3 * 10**6))
    with pytest.raises(DataError, match="has room for 3 MB, and about 4 MB are needed; for one checkpoint"):
        require_space(tmp_path, step)


# ---- Settings that follow from the number of samples.


@pytest.mark.parametrize("samples", [2, 3, 30, 500, 3_120, 100_000, 10**9])
def test_settings_can_be_used(samples):
    settings = head_settings(samples)
    assert 2 <= settings["train.batch_size"] <= min(samples, 512)
    assert settings["train.steps"] >= 60
    assert settings["data.views"] in range(1, 9)
    assert head_settings(samples, batch=2)["train.steps"] >= settings["train.steps"]


def tree_with_recipe(folder, shards, **train):
    tree = run_tree(folder, shards) | {"recipe": "heads"}
    tree["model"]["image"]["project_in"] = {"kind": "mlp", "input_dropout": 0.25}
    tree["train"] = {"report_every": 1, **train}
    return tree


def test_changes_of_a_configuration_leave_the_rest_to_the_recipe(tmp_path, shards):
    """A configuration as an object holds all defaults; what follows from the data is still what was not set."""
    config = load_task_config(tree_with_recipe(tmp_path, shards, steps=5))
    found = train(config, overrides=["optim.weight_decay=0.2"]).config
    assert found.train.batch_size == head_settings(30)["train.batch_size"]
    assert found.optim.weight_decay == 0.2


def test_what_is_not_set_follows_from_the_samples_on_all_ranks(tmp_path, shards, ranks):
    tree = tree_with_recipe(tmp_path, shards, steps=5)
    for _ in range(2):  # the second run finds the first one's checkpoint and accepts it
        config = train(tree).config
        assert config.train.batch_size == head_settings(30)["train.batch_size"]
        assert config.train.steps == 5
        assert config.model.image.project_in.dropout == head_settings(30)["model.image.project_in.dropout"]
        assert config.model.image.project_in.input_dropout == 0.25
    file = tmp_path / "tiny" / "config.yaml"
    assert load_task_config(file) == config
    assert config.recipe is None, "the file has all settings; other data do not change them"
    for each in ranks(2, train, tree_with_recipe(tmp_path / "two", shards, steps=5), init=False):
        assert each.config.train == config.train
