"""Layer-wise rates, overrides, moving averages, adapters, a bottleneck that closes, a tower that thaws: in one run."""

import shutil

import pytest
from safetensors.torch import load_file

from tests.models import BUSY_VQ, VQ
from tests.train.test_resume import assert_same_run
from tests.training import all_equal, averages, identity_of, largest_difference, metrics, run, run_tree, weights

STEPS = 12


def fine_tuning(folder, shards, quantizer=BUSY_VQ, **changes):
    """A run that saves in the ramp of the bottleneck, after 5 steps, and before its text tower trains, in step 6."""
    overrides = [{"pattern": "*.pool.*", "lr_ratio": 2.0}, {"pattern": "image.tower.*", "weight_decay": 0.01}]
    changes |= {"optim__layer_decay": {"image": 0.7, "text": 0.8}, "optim__overrides": overrides}
    changes |= {"train__steps": STEPS, "train__checkpoint_every": 5, "train__keep_checkpoints": 9}
    changes |= {"train__ema": {"decay": 0.9}, "train__bottleneck": {"open_steps": 2, "close_steps": 6}}
    changes |= {"model__image__tower__train": {"lora": {"rank": 2, "alpha": 8}}}
    return run_tree(folder, shards, quantizer, model__text__tower__train={"from_step": 6}, **changes)


def test_one_and_three_processes_train_the_same_model(ranks, tmp_path, shards):
    for world_size in (1, 3):
        tree = fine_tuning(tmp_path / str(world_size), shards, VQ | {"learning": "gradient"})
        ranks(world_size, run, tree, init=False)
    lines, model, averaged = metrics(tmp_path / "1"), weights(tmp_path / "1", STEPS), averages(tmp_path / "1", STEPS)
    assert any(name.startswith("text.tower") for name in averaged)
    assert any(".lora_B" in name for name in averaged)
    for line, theirs in zip(lines, metrics(tmp_path / "3"), strict=True):
        for name in (name for name in line if name.startswith(("loss/", "grad_norm", "bottleneck/", "lr"))):
            assert theirs[name] == pytest.approx(line[name], rel=1e-6), (line["step"], name)
    assert largest_difference(model, weights(tmp_path / "3", STEPS)) < 1e-6
    assert largest_difference(averaged, averages(tmp_path / "3", STEPS)) < 1e-6


def forget(folder, after):
    """Leave the run as if it had been killed before its next checkpoint."""
    for path in (folder / "tiny" / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > after:
            shutil.rmtree(path)


def test_a_run_killed_in_the_ramp_goes_on_bit_for_bit(ranks, tmp_path, shards):
    tree = fine_tuning(tmp_path / "killed", shards, train__precision="fp32")
    ranks(2, run, tree, init=False)
    shutil.copytree(tmp_path / "killed", tmp_path / "whole")
    for after in (5, 10):
        forget(tmp_path / "killed", after)
        parts = ranks(2, run, tree, init=False)
        assert len(parts[0]["sample_ids"]) == STEPS - after
        assert_same_run(tmp_path / "whole", tmp_path / "killed", STEPS)
        assert all_equal(*(averages(tmp_path / name, STEPS) for name in ("whole", "killed")))
        exported = [load_file(tmp_path / name / "tiny/tokenizer/model.safetensors") for name in ("whole", "killed")]
        assert all_equal(*exported)


def test_every_setting_is_part_of_the_identity(tmp_path, shards):
    tree = fine_tuning(tmp_path, shards)
    base = identity_of(tree)
    assert [*base["run"]] == ["seed"]
    assert {*base["train"]} == {"steps", "batch_size", "precision", "ema", "bottleneck"}
    for section, key, value in (
        ("optim", "layer_decay", 0.7),
        ("optim", "overrides", tree["optim"]["overrides"][:1]),
        ("optim", "overrides", []),
        ("train", "ema", {"decay": 0.8}),
        ("train", "ema", None),
        ("train", "bottleneck", {"open_steps": 2, "close_steps": 5}),
        ("train", "bottleneck", None),
        ("data", "order", "windowed"),
    ):
        assert identity_of(tree | {section: tree[section] | {key: value}}) != base
    both = tree["train"] | {"ema": tree["train"]["ema"] | {"evaluate": "both"}}
    assert identity_of(tree | {"train": both}) == base  # changes no weight
    assert identity_of(tree | {"loss": tree["loss"] | {"impl": "ring"}}) == base  # changes rounding alone
