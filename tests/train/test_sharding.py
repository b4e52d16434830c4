"""Weights in shards: the same training as with all weights on every rank, and checkpoints that fit either."""

import contextlib
import errno
import json
import os
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, tiny_model
from tests.ranks import for_each
from tests.train.test_run_store import Store
from tests.training import (
    StopAfter,
    all_equal,
    averages,
    largest_difference,
    metrics,
    retrieval,
    run,
    run_tree,
    weights,
)
from vqclip import dist
from vqclip.data.remote import files as remote_files
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io import parts
from vqclip.train import checkpointer, main
from vqclip.train import run as train
from vqclip.train.tasks.kinds import load_task_config

STEPS = 8


def tree(folder, shards, quantizer=FSQ, parallel="fsdp", **changes):
    settings = {"train__steps": STEPS, "train__ema": {"decay": 0.9}, "optim__clip_grad_norm": 0.5}
    return run_tree(folder, shards, quantizer, train__parallel=parallel, **(settings | changes))


def require_same(folder, other, steps, tolerance=1e-9):
    """Compare the metrics of all steps, and at the end weights, codebooks and moving averages."""
    for line, expected in zip(metrics(folder), metrics(other), strict=True):
        for name in (name for name in line if name.startswith(("loss/", "grad_norm", "temperature/", "image/"))):
            assert line[name] == pytest.approx(expected[name], rel=tolerance), (line["step"], name)
    assert largest_difference(weights(folder, steps), weights(other, steps)) < tolerance
    assert largest_difference(averages(folder, steps), averages(other, steps)) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("quantizer", [FSQ, BUSY_VQ, BUSY_RESIDUAL], ids=["fsq", "vq", "residual"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_train_the_same_model(ranks, tmp_path, shards, quantizer, world_size, precision):
    """To 1e-9 in fp64, and to 1e-3 in fp32, where 30 steps amplify rounding."""
    tolerance = 1e-9 if precision == "fp64" else 1e-3
    for micro_batches in (1, 3):
        settings = {"train__steps": 30, "train__micro_batches": micro_batches, "train__precision": precision}
        ways = {name: tmp_path / f"{name}{micro_batches}" for name in ("ddp", "fsdp", "one")}
        both = [(tree(ways[name], shards, quantizer, name, **settings),) for name in ("ddp", "fsdp")]
        ranks(world_size, for_each, run, both, init=False, timeout=300.0)
        ranks(1, run, tree(ways["one"], shards, quantizer, **settings), init=False)
        for name in ("ddp", "one"):
            require_same(ways["fsdp"], ways[name], 30, tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_of_shards_resume_anywhere(ranks, tmp_path, shards, optimizer):
    """DDP, shards on 4 ranks, one process, shards on 2 ranks: the trajectory of one run, in the middle of an epoch.

    With weights in channels-last order, as in the configurations that ship.
    """
    settings = {"model__image__tower": CONVOLUTIONAL | {"image_size": 32}}  # four tokens
    settings |= {"quantizer": BUSY_RESIDUAL, "train__micro_batches": 2, "optim__kind": optimizer}
    ranks(1, run, tree(tmp_path / "whole", shards, **settings), init=False)
    for world_size, parallel, stop in ((2, "ddp", 2), (4, "fsdp", 4), (1, "fsdp", 5), (2, "fsdp", STEPS)):
        part = tree(tmp_path / "parts", shards, parallel=parallel, **settings)
        ranks(world_size, run_until, part, stop, init=False)
    require_same(tmp_path / "parts", tmp_path / "whole", STEPS)


def run_until(settings, stop):
    train(load_task_config(settings), [StopAfter(stop)])


CONVOLUTIONAL = {"kind": "convolutional", "image_size": 16, "channels": [8, 8, 16, 16], "channels_per_group": 4}
VARIANTS = {
    "adapters": {"model__image__tower__train": {"lora": {"rank": 2}}},
    "last block": {"model__image__tower__train": {"last": 1}},
    "from a step on": {"model__text__tower__train": {"from_step": 2}},
    "frozen": {"model__text__tower__train": "none"},
    "checkpointed activations": {"train__activation_checkpointing": True, "train__micro_batches": 2},
    "every second block": {"train__activation_checkpointing": 2},
    "sigmoid loss": {"model__temperature": {"init": 10.0, "bias": -10.0}, "loss": {"kind": "sigmoid"}},
    "convolutions": {"model__image__tower": CONVOLUTIONAL},
    "bf16": {"train__precision": "bf16"},
    "lion": {"optim__kind": "lion"},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train_the_same_model(ranks, tmp_path, shards, variant):
    settings = {"train__steps": 4, "optim__warmup_steps": 1} | VARIANTS[variant]
    both = [(tree(tmp_path / kind, shards, parallel=kind, **settings),) for kind in ("ddp", "fsdp")]
    ranks(2, for_each, run, both, init=False)
    require_same(tmp_path / "fsdp", tmp_path / "ddp", 4, 1e-2 if variant == "bf16" else 1e-9)


@pytest.mark.slow
def test_shards_on_each_of_two_machines_train_the_same_model(ranks, tmp_path, shards):
    settings = {"train__steps": 4, "optim__warmup_steps": 1}
    ranks(4, run_on_two_machines, tree(tmp_path / "hsdp", shards, parallel="hsdp", **settings), init=False)
    ranks(1, run, tree(tmp_path / "one", shards, parallel="ddp", **settings), init=False)
    require_same(tmp_path / "hsdp", tmp_path / "one", 4)


def run_on_two_machines(settings):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    run(settings)


@pytest.mark.slow
def test_the_best_step_is_read_back_and_exported(ranks, tmp_path, shards):
    """By rows on 2 ranks, and by one process; with moving averages."""
    pairs = retrieval(shards)
    settings = {"train__keep_best": "eval/pairs/codes_only/i2t_r1", "train__evaluate_every": 2, "evaluation": pairs}
    settings |= {"train__steps": 6, "train__checkpoint_every": 2, "train__export": "best"}
    settings |= {"optim__lr": 1e-6}  # so that the first evaluation stays the best
    for name, world_size in (("two", 2), ("one", 1)):
        ranks(world_size, run, tree(tmp_path / name, shards, **settings), init=False)
    two, one = (tmp_path / name / "tiny" for name in ("two", "one"))
    assert json.loads((two / "summary.json").read_text())["step"] == 2
    exported = [load_file(folder / "tokenizer" / "model.safetensors") for folder in (two, one)]
    assert largest_difference(*exported) < 1e-9
    assert not all_equal(exported[0], load_file(two / "checkpoints" / "step-00000006" / "model" / "model.safetensors"))


def build_step(settings):
    config = load_task_config(settings)
    task = main.build_task(config, torch.device("cpu"))
    before = {name: each.detach().clone() for name, each in task.model.named_parameters()}
    return main.build_step(config, task), before


def evaluate_on_rank_zero_alone(settings):
    """Return this rank's numbers in towers, and whether rank 0 has all weights, or averages, within the block."""
    step, before = build_step(settings)
    step.ema.update(0, torch.tensor(False))
    for each in step.ema.averages.values():
        each += 1
    found = []
    for averaged in (False, True):
        with step.whole_task(averaged) as whole:
            if dist.is_main():
                found += [torch.equal(each, before[name] + averaged) for name, each in whole.model.named_parameters()]
                with torch.no_grad():
                    whole.evaluated.image(whole.model.image.tower.example())
                found.append(whole.evaluated.text.quantizer is step.model.text.quantizer)
    left = sum(each.numel() for each in step._whole.model.image.tower.parameters())
    mine = sum(step.weights.parameters[name].numel() for name in before if name.startswith("image.tower."))
    return mine, left, all(found)


def test_evaluations_gather_once_and_a_rank_may_run_alone(ranks, tmp_path, shards):
    one, other = ranks(2, evaluate_on_rank_zero_alone, tree(tmp_path, shards), timeout=60.0)
    assert one == (one[0], 0, True)
    assert other == (other[0], 0, True)
    whole = sum(each.numel() for each in tiny_model().build().image.tower.parameters())
    assert one[0] + other[0] == whole
    assert other[0] > 0.45 * whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "fsdp", "compile": True}, "parallel 'fsdp' and compile true"),
        ({"parallel": "fsdp", "precision": "fp16"}, "parallel 'fsdp' and precision fp16"),
        ({"parallel": "hsdp", "bucket_mb": 50}, "parallel 'hsdp' and bucket_mb 50; expected bucket_mb null, or ddp"),
    ],
)
def test_what_does_not_work_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_task_config(tree(tmp_path, tmp_path) | {"train": {"steps": 9} | changes})
    with pytest.raises(ConfigError, match=r"train\.parallel: got 'fsdp' with optim\.kind lamb, which steps a weight"):
        load_task_config(tree(tmp_path, tmp_path, optim__kind="lamb"))


def build_refused(settings):
    with pytest.raises(ConfigError) as error:
        build_step(settings)
    return str(error.value)


def test_what_cannot_be_in_shards_is_refused(ranks, tmp_path, shards):
    frozen = {"model__image__tower__train": "none", "model__text__tower__train": "none"}
    cases = [(tree(tmp_path, shards, **frozen),), (tree(tmp_path, shards, parallel="hsdp"),)]
    for found in ranks(2, for_each, build_refused, cases):
        assert "no weights of a tower train" in found[0]
        assert "expected several machines" in found[1]


# ---- Checkpoints that every rank writes: the files of one process, whole or absent.


SETTINGS = {"quantizer": BUSY_RESIDUAL, "train__steps": 4, "train__checkpoint_every": 2, "optim__warmup_steps": 1}


def files(place):
    places = sorted((place / "tiny" / "checkpoints").rglob("*"))
    return {str(path.relative_to(place)): path.read_bytes() for path in places if path.is_file()}


def run_counting(settings, stop, shared):
    """Run until a step, as if rank 0 alone saw the run's folder unless it is shared; return how many files it wrote."""
    with contextlib.ExitStack() as stack:
        if not shared:
            stack.enter_context(mock.patch.object(checkpointer, "is_shared", return_value=False))
        written = stack.enter_context(mock.patch.object(parts, "write", wraps=parts.write))
        run_until(settings, stop)
    return written.call_count


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_write_the_files_of_one(ranks, tmp_path, shards, world_size):
    """Byte for byte, where some ranks have no rows of small tensors, before and after a resume."""
    trees = {name: tree(tmp_path / name, shards, **SETTINGS) for name in ("all", "one")}
    for stop in (2, 4):
        cases = [(trees[name], stop, name == "all") for name in trees]
        assert ranks(world_size, for_each, run_counting, cases, init=False) == [[3, 3], *[[3, 0]] * (world_size - 1)]
        one, other = files(tmp_path / "all"), files(tmp_path / "one")
        assert len(one) == 6 * stop // 2
        assert one == other


def fail_to_write(settings, damage):
    """Train until rank 1's disk is full, or another process overwrites its rows; return the error."""
    original, calls = parts.write, []

    def write(path, own):
        calls.append(path)
        if len(calls) > 3 and dist.rank() == 1:
            if damage:
                original(path, own)
                os.truncate(path, path.stat().st_size // 2)
                return
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, own)

    with mock.patch.object(parts, "write", write), pytest.raises(CheckpointError) as error:
        run(settings)
    return str(error.value)


@pytest.mark.parametrize("damage", [False, True], ids=["full disk", "overwritten"])
def test_a_rank_that_cannot_write_ends_the_run_on_all(ranks, tmp_path, shards, damage):
    settings = tree(tmp_path, shards, **SETTINGS | {"train__save_in_background": False})
    first, second = ranks(2, fail_to_write, settings, damage, init=False)
    assert ("are not those that were written" if damage else "No space left") in second
    assert "failed on rank 1, whose message says why" in first or "are not those" in first
    found = files(tmp_path)
    assert {name.split("/")[2] for name in found} == {"step-00000002"}
    ranks(2, run, settings, init=False)
    assert "tiny/checkpoints/step-00000004/manifest.json" in files(tmp_path)


def look_at_folder(place, own):
    return checkpointer.is_shared(place / str(dist.rank()) if own else place)


def test_a_folder_of_each_machine_is_not_shared(ranks, tmp_path):
    assert ranks(2, for_each, look_at_folder, [(tmp_path, False), (tmp_path, True)]) == [[True, False]] * 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def run_at_url(settings, machines):
    """Run at a URL in two starts, each on new disks; return how many files this rank wrote, and what is there."""
    store = Store(skip_instance_cache=True)
    store.failing = {}
    store.store.clear()  # memory of the process, which an earlier case has filled
    own = os.environ["VQCLIP_CACHE"] + (os.environ["RANK"] if machines else "")
    stored = mock.patch.object(remote_files, "object_store", return_value=store)
    with stored, mock.patch.object(parts, "write", wraps=parts.write) as written:
        for stop, cache in ((2, own), (4, f"{own}-new")):
            os.environ["VQCLIP_CACHE"] = cache
            run_until(settings, stop)
    begin = "/bucket/runs/tiny/checkpoints/step-00000004/"
    found = {name.removeprefix(begin): file.getvalue() for name, file in store.store.items() if name.startswith(begin)}
    return written.call_count, found


@pytest.mark.slow
@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "two machines"])
def test_runs_at_urls_have_the_same_files(ranks, tmp_path, shards, machines):
    """Ranks of one machine write into its copy of the run; those of several send their rows to rank 0."""
    settings = SETTINGS | {"run__folder": "s3://bucket/runs"}
    here = tree(tmp_path, shards, **SETTINGS)
    ranks(2, run_until, here, 4, init=False)
    found = ranks(2, run_at_url, tree(tmp_path, shards, **settings), machines, init=False)
    assert [number for number, _ in found] == [6, 0 if machines else 6]
    begin = "tiny/checkpoints/step-00000004/"
    expected = {name.removeprefix(begin): each for name, each in files(tmp_path).items() if name.startswith(begin)}
    assert len(expected) == 6
    assert found[0][1] == expected
