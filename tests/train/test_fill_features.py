"""Feature caches that are filled before the run starts."""

import json
from unittest import mock

import pytest

from tests.commands import command
from tests.on_ray import small_ray
from tests.train.test_feature_cache import cache_of, run, shards, tree_of
from vqclip.train.feature_cache import FeatureJob

main = command("data")

__all__ = ["shards"]

ray = pytest.fixture(scope="module")(small_ray)


@pytest.fixture
def given(tmp_path, shards):
    """Arguments of the command, for a run that trains with the cache too."""
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), data__workers=0, run__device="cpu", train__steps=6)
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    return ["features", "--config", str(tmp_path / "config.yaml")], tree


def bytes_of(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def train_without_computing(tmp_path, tree):
    with mock.patch.object(FeatureJob, "run", side_effect=AssertionError("features are missing")):
        run(tree)


def test_a_run_finds_the_features(tmp_path, given):
    arguments, tree = given
    assert main(arguments) == 0
    assert not (tmp_path / "tiny").exists()  # no run was made
    train_without_computing(tmp_path, tree)


def test_a_run_without_a_cache_is_refused(tmp_path, given, capsys, refused):
    arguments, _ = given
    assert main([*arguments, "data.feature_cache=null"]) == 2
    assert "data.feature_cache: got null; expected a cache to fill" in capsys.readouterr().err
    assert "expected --engine ray" in refused(main([*arguments, "--ray-actors", "2"]))


@pytest.mark.slow
def test_ray_computes_the_same_bytes(tmp_path, given, ray, capfd):
    arguments, tree = given
    arguments += ["--engine", "ray", "--ray-actors", "2"]
    assert main(arguments) == 0
    assert "shards: 10 written, 0 already finished" in capfd.readouterr().out
    train_without_computing(tmp_path, tree)
    made = bytes_of(tmp_path / "features")
    (tmp_path / "features").rename(tmp_path / "elsewhere")
    assert main(arguments[:3]) == 0
    assert bytes_of(tmp_path / "features") == made
    victim = next((tmp_path / "features").glob("*/records/00003.json"))
    victim.unlink()
    assert main(arguments) == 0
    shown = capfd.readouterr()
    assert "shards: 1 written, 9 already finished" in shown.out
    assert "Traceback" not in shown.err
    assert bytes_of(tmp_path / "features") == made


@pytest.mark.slow
def test_mistakes_of_workers_end_in_one_line(tmp_path, given, ray, capfd):
    arguments = given[0] + ["--engine", "ray", "--ray-actors", "2"]
    assert main([*arguments, "data.sources[0].path=/nowhere/0.tar"]) == 1
    shown = capfd.readouterr().err
    assert "/nowhere/0.tar" in shown
    assert "Traceback" not in shown
