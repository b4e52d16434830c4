"""Layer-wise rates, overrides, moving averages, a bottleneck that closes and a tower that thaws, all in one run."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file

from tests.models import BUSY_VQ, FSQ, VQ
from tests.train.test_resume import assert_same_run, differences_after_a_resume
from tests.training import (
    all_equal,
    identity_of,
    largest_difference,
    metrics,
    retrieval,
    run,
    run_compiled,
    run_tree,
    weights,
)

STEPS = 12
LEARNED_VQ = VQ | {"learning": "gradient"}


def fine_tuning(folder, shards, quantizer=BUSY_VQ, **changes):
    """A run that saves in the ramp of the bottleneck, after 5 steps, and before its text tower trains, in step 6."""
    tree = run_tree(folder, shards, quantizer, train__steps=STEPS, train__checkpoint_every=5, **changes)
    tree["optim"] |= {
        "layer_decay": {"image": 0.7, "text": 0.8},
        "overrides": [{"pattern": "*.pool.*", "lr_ratio": 2.0}, {"pattern": "image.tower.*", "weight_decay": 0.01}],
    }
    tree["train"] |= {
        "keep_checkpoints": 9,
        "ema": {"decay": 0.9},
        "bottleneck": {"open_steps": 2, "close_steps": 6},
    }
    tree["model"]["text"]["tower"]["train"] = {"from_step": 6}
    return tree


def averages(folder, step=STEPS):
    return load_file(folder / "tiny" / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


@pytest.mark.parametrize(
    "quantizer",
    [pytest.param(BUSY_VQ, marks=pytest.mark.slow, id="moving codes"), pytest.param(LEARNED_VQ, id="learned codes")],
)
def test_one_and_three_processes_train_the_same_model(ranks, tmp_path, shards, quantizer):
    for world_size in (1, 3):
        tree = fine_tuning(tmp_path / str(world_size), shards, quantizer)
        ranks(world_size, run, tree, str(tmp_path / "cache"), init=False)
    lines, model, averaged = metrics(tmp_path / "1"), weights(tmp_path / "1", STEPS), averages(tmp_path / "1")
    assert any(name.startswith("ema/text.tower") for name in averaged)
    for line, theirs in zip(lines, metrics(tmp_path / "3"), strict=True):
        for name in (name for name in line if name.startswith(("loss/", "grad_norm", "bottleneck/", "lr"))):
            assert theirs[name] == pytest.approx(line[name], rel=1e-6), (line["step"], name)
    assert largest_difference(model, weights(tmp_path / "3", STEPS)) < 1e-6
    assert largest_difference(averaged, averages(tmp_path / "3")) < 1e-6


def forget(folder, after):
    """Leave the run as if it had been killed before its next checkpoint."""
    for path in (folder / "tiny" / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > after:
            shutil.rmtree(path)


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_killed_in_the_ramp_goes_on_bit_for_bit(ranks, tmp_path, shards, processes):
    tree = fine_tuning(tmp_path / "killed", shards, train__precision="fp32")
    cache = str(tmp_path / "cache")
    ranks(processes, run, tree, cache, init=False)
    shutil.copytree(tmp_path / "killed", tmp_path / "whole")
    for after in (5, 10):
        forget(tmp_path / "killed", after)
        parts = ranks(processes, run, tree, cache, init=False)
        assert len(parts[0]["sample_ids"]) == STEPS - after
        assert_same_run(tmp_path / "whole", tmp_path / "killed", STEPS)
        assert all_equal(averages(tmp_path / "whole"), averages(tmp_path / "killed"))
        exported = [load_file(tmp_path / name / "tiny/tokenizer/model.safetensors") for name in ("whole", "killed")]
        assert all_equal(*exported)


def test_a_resumed_run_equals_the_one_that_saved_in_every_attribute(ranks, tmp_path, shards):
    tree = fine_tuning(tmp_path, shards, train__precision="fp32")
    tree["model"]["text"]["tower"]["train"] = "all"  # otherwise the optimizer's state, equal but for its order, differs
    assert ranks(2, differences_after_a_resume, tree, str(tmp_path / "cache"), init=False) == [[], []]


def test_every_setting_is_part_of_the_identity(tmp_path, shards):
    tree = fine_tuning(tmp_path, shards)
    base = identity_of(tree)
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


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_run_has_a_graph_for_the_ramp_and_one_for_the_rest(tmp_path, shards, ranks, world_size):
    """Evaluations in between, with other weights in the same parameters, add none."""
    cache = str(tmp_path / "cache")
    trees = [
        fine_tuning(tmp_path / name, shards, FSQ, train__compile=name == "compiled") for name in ("eager", "compiled")
    ]
    for tree in trees:
        tree["model"]["text"]["tower"]["train"] = "all"
        tree["train"]["evaluate_every"] = 3
        tree["evaluation"] = retrieval(shards)
    ranks(world_size, run, trees[0], cache, init=False)
    for graphs, breaks in ranks(world_size, run_compiled, trees[1], cache, "aot_eager", init=False, timeout=500.0):
        assert (graphs, breaks) == (2, 0)
    assert largest_difference(averages(tmp_path / "eager"), averages(tmp_path / "compiled")) < 1e-6
