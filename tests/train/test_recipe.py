"""Settings that follow from the number of samples."""

from __future__ import annotations

import os

import pytest

from tests.training import run_tree
from vqclip.train import run as train
from vqclip.train.recipe import head_settings
from vqclip.train.tasks.kinds import load_task_config


@pytest.mark.parametrize("samples", [2, 3, 30, 500, 3_120, 100_000, 10**9])
def test_settings_can_be_used(samples):
    settings = head_settings(samples)
    assert 2 <= settings["train.batch_size"] <= min(samples, 512)
    assert settings["train.steps"] >= 60
    assert settings["data.views"] in range(1, 9)
    assert head_settings(samples, batch=2)["train.steps"] >= settings["train.steps"]


def tree_with_recipe(folder, shards, **train):
    """A run whose batch size, steps and dropout are not set."""
    tree = run_tree(folder, shards) | {"recipe": "heads"}
    tree["model"]["image"]["project_in"] = {"kind": "mlp", "input_dropout": 0.25}
    tree["train"] = {"report_every": 1, **train}
    return tree


def test_changes_of_a_configuration_leave_the_rest_to_the_recipe(tmp_path, shards, cache):
    """A configuration as an object holds all defaults; what follows from the data is still what was not set."""
    config = load_task_config(tree_with_recipe(tmp_path, shards, steps=5))
    result = train(config, overrides=["optim.weight_decay=0.2"])
    assert result.config.train.batch_size == head_settings(30)["train.batch_size"]
    assert result.config.optim.weight_decay == 0.2


def test_what_is_not_set_follows_from_the_samples(tmp_path, shards, cache):
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


def _config_of_a_rank(tree, cache):
    os.environ["VQCLIP_CACHE"] = cache
    return train(tree).config.train.model_dump()


def test_all_ranks_have_the_same_settings(tmp_path, shards, cache, ranks):
    one, other = ranks(2, _config_of_a_rank, tree_with_recipe(tmp_path, shards, steps=5), cache, init=False)
    assert one == other
    assert one["batch_size"] == head_settings(30)["train.batch_size"]
