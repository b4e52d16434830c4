"""Stop anywhere, start again: the same samples, the same bits."""

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.data.making import caption_shards
from tests.models import BUSY_RESIDUAL
from tests.ranks import start_process
from tests.training import (
    StopAfter,
    all_equal,
    before_steps,
    differences,
    error_of,
    metrics,
    retrieval,
    run,
    run_tree,
    run_until,
    timeless,
    weights,
)
from vqclip import dist
from vqclip.checkpoint import OPTIMIZER_FILE
from vqclip.cli.main import main
from vqclip.config import load_config
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.evaluation import try_all
from vqclip.report.run_files import read_run
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.loop import train as train_loop
from vqclip.train.summary import render

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 24


def busy_tree(folder, shards, **changes):
    """A run in fp32 with much state that ends in the middle of an epoch and saves every five steps."""
    every = {"train__steps": STEPS, "train__checkpoint_every": 5, "train__keep_checkpoints": 9}
    return run_tree(folder, shards, BUSY_RESIDUAL, train__precision="fp32", **(every | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """A run that nothing interrupts: its folder, its configuration, the samples of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    tree = busy_tree(folder, shards)
    return folder, tree, run(tree, str(folder / "cache"))["sample_ids"]


def start(tree):
    """The training command as a process of its own group, as a person or a scheduler would start it."""
    return start_process(run_in_a_group, tree, os.environ["VQCLIP_CACHE"])


def run_in_a_group(tree, cache):
    os.setsid()
    torch.set_num_threads(1)
    run(tree, cache)


def wait_for(condition, process, limit_s=90.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert process.is_alive()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def assert_same_run(one, other, steps=STEPS):
    assert all_equal(weights(one, steps), weights(other, steps))
    saved = [each / "tiny" / "checkpoints" / f"step-{steps:08d}" for each in (one, other)]
    assert all_equal(*(load_file(each / OPTIMIZER_FILE) for each in saved))
    assert timeless(one) == timeless(other)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, shards, whole):
    """Also with another number of data workers."""
    folder, _, sample_ids = whole
    assert len(sample_ids) == STEPS
    process = start(busy_tree(tmp_path, shards, data__workers=1))
    wait_for((tmp_path / "tiny" / "checkpoints" / "step-00000010").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.join(30)
    assert not (tmp_path / "tiny" / "summary.json").exists()

    rest = run(busy_tree(tmp_path, shards))
    done = STEPS - len(rest["sample_ids"])
    assert 10 <= done < STEPS
    assert rest["sample_ids"] == sample_ids[done:]
    assert_same_run(folder, tmp_path)


def test_another_optimizer_and_schedule_go_on_bit_for_bit(tmp_path, shards):
    """Of muon; `test_optim.py` has the state of every kind."""
    settings = {"train__steps": 12, "train__ema": {"decay": 0.9}, "optim__layer_decay": 0.8, "data__workers": 0}
    settings |= {"optim__kind": "muon", "optim__schedule": "wsd", "optim__decay_share": 0.5}
    trees = [busy_tree(tmp_path / name, shards, **settings) for name in ("whole", "parts")]
    run(trees[0])
    run_until(8, trees[1])
    rest = run(trees[1])
    assert len(rest["sample_ids"]) == 12 - 5
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 12)
    rates = [line["lr"] for line in metrics(tmp_path / "parts")]
    assert rates[4] == rates[5] > rates[8] > rates[11]


OUTSIDE = {
    ".clock",  # speed of this process
    ".stop",  # signals it got
    ".watchdog",
    ".lock",
    ".step.network",  # process group and buffers of DDP; the model is that of `.step.model`
    ".step.weights",  # process groups of shards
    ".checkpointer",  # threads and buffers of saving
    ".records",
    ".data",
    *(".bar", ".batch", ".result"),  # set anew before they are read
}
"""Parts of the loop that hold nothing which a step depends on."""


def differences_after_a_resume(tree):
    """Attributes of the training loop, on this rank, that a resumed run has other than the run that saved."""
    loops, compared = [], []

    def recording(training, callbacks):
        loops.append(training)
        if training.done:
            sharded = training.step.weights.shapes  # FSDP's buffers have no memory between steps
            pair = [each.step.optimizer.state for each in loops] if sharded else loops
            compared.extend(differences(*pair, OUTSIDE))
        train_loop(training, callbacks)

    with mock.patch("vqclip.train.main.train", recording):
        for _ in range(2):
            run(tree)
    assert len(loops) == 2
    assert loops[1].step.guards._losses.isfinite().any()
    return compared


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_resumed_run_equals_the_one_that_saved_in_every_attribute(tmp_path, shards, ranks, parallel):
    """Nothing that later steps depend on lives outside of the checkpoint, on any rank; with a tower that ships."""
    changes = {"train__parallel": parallel, "guards": {"spikes": {"window": 10}}}
    shipped = load_config(TrainConfig, CONFIGS / "captions.yaml").model.image.tower
    changes |= {"train__steps": 9, "model__image__tower": shipped.model_dump(mode="json")}
    tree = busy_tree(tmp_path, shards, **changes)
    assert ranks(2, differences_after_a_resume, tree, init=False) == [[], []]


def test_a_stopped_run_saves_and_goes_on(tmp_path, shards, whole):
    """`tests/faults` has signals to whole jobs."""
    tree = busy_tree(tmp_path, shards, train__checkpoint_every=100)
    assert not run_with_one_signal(tree)["finished"]
    (saved,) = (tmp_path / "tiny" / "checkpoints").iterdir()
    marker = tmp_path / "tiny" / "stopped.json"
    facts = json.loads(marker.read_text())
    assert (facts["signal"], facts["checkpoint"]) == ("SIGTERM", f"checkpoints/{saved.name}")
    run(tree)
    assert not marker.exists()
    assert_same_run(whole[0], tmp_path)


def run_with_one_signal(tree):
    """Train; the last rank alone gets a signal."""

    def signal_myself(step, batch, number):
        if number == 4 and dist.rank() == dist.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with before_steps(signal_myself):
        return run(tree)


@pytest.mark.faults
def test_four_ranks_go_on_bit_for_bit(tmp_path, shards, ranks):
    """On three ranks or more the order of summing gradients matters, and DDP must not change it on the way."""
    whole, stopped = (busy_tree(tmp_path / name, shards) for name in ("whole", "stopped"))
    ranks(4, run, whole, init=False)
    parts = ranks(4, run_with_one_signal, stopped, init=False)
    done = len(parts[0]["sample_ids"])
    assert 4 < done < STEPS
    parts = ranks(4, run, stopped, init=False)
    assert len(parts[0]["sample_ids"]) == STEPS - done
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def train_in_own_folder(tree, folder):
    """Train in a folder of one name and another place on every rank, as on disks of their own; the final weights."""
    own, steps = folder / os.environ["RANK"], []
    own.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, before_steps(lambda step, *_: steps.append(step)):
        patch.chdir(own)
        run(tree)
    return {name: tensor.clone() for name, tensor in steps[-1].model.state_dict().items()}


def test_one_rank_reads_a_checkpoint_for_all(tmp_path, shards, ranks):
    """The copy on the disk of the other one is damaged."""
    tree = run_tree(Path("runs"), shards, BUSY_RESIDUAL, train__steps=4)
    ranks(2, train_in_own_folder, tree, tmp_path, init=False)
    shutil.copytree(tmp_path / "0", tmp_path / "1", dirs_exist_ok=True)
    damaged = tmp_path / "1/runs/tiny/checkpoints/step-00000004/model/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    tree["train"]["steps"], tree["run"]["resume_allow"] = 6, ["train.steps"]
    one, other = ranks(2, train_in_own_folder, tree, tmp_path, init=False)
    assert all_equal(one, other)


def test_other_processes_are_refused_where_towers_draw_by_rank(tmp_path, shards, ranks):
    """Stochastic depth is another for every rank: on two ranks it would be another trajectory."""
    drop_path = {"model__image__tower__args__drop_path_rate": 0.5}
    random = run_tree(tmp_path / "random", shards, train__steps=4, **drop_path)
    fixed = run_tree(tmp_path / "fixed", shards, train__steps=4)
    for tree in (random, fixed, random, fixed):
        assert ranks(1, error_of, tree, init=False) == [None]
    message = "processes (dropout is drawn by rank): 1 in the checkpoint, 2 now"
    assert all(message in error for error in ranks(2, error_of, random, init=False))
    assert ranks(2, error_of, fixed, init=False) == [None, None]


def test_what_may_differ_is_named_one_by_one(tmp_path, shards, caplog):
    tree = run_tree(tmp_path, shards, train__steps=4)
    train(tree)
    tree["train"] |= {"steps": 6, "batch_size": 10}
    tree["optim"]["lr"] = 2e-3
    with pytest.raises(CheckpointError) as error:
        train(tree)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["optim.lr", "train.batch_size", "train.steps"]
    tree["run"]["resume_allow"] = ["optim", "train.steps"]
    with pytest.raises(CheckpointError) as error:
        train(tree)
    assert str(error.value).splitlines()[1:-1] == ["  train.batch_size: 12 in the checkpoint, 10 now"]
    tree["run"]["resume_allow"].append("train.batch")
    with pytest.raises(ConfigError, match=r"^run.resume_allow: got 'train.batch'; expected names .*train.batch_size"):
        train(tree)
    tree["run"]["resume_allow"][-1] = "train.batch_size"
    with caplog.at_level("WARNING"):
        assert train(tree).finished
    assert "allowed to differ: train.batch_size: 12 in the checkpoint, 10 now" in caplog.text
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def rate_evaluations(monkeypatch, rate, fails=0):
    """Let evaluation n = 1, 2, ... of a run have this rate, and one of them fail; return what they measured."""
    measured = []

    def rated(*args, **kwargs):
        (result,) = (outcome := try_all(*args, **kwargs)).results
        measured.append(dict(result.figures["codes_only"]))
        result.figures["codes_only"]["i2t_r1"] = rate(len(measured))
        return dataclasses.replace(outcome, failure=DataError("gone")) if len(measured) == fails else outcome

    monkeypatch.setattr("vqclip.train.callbacks.builtin.try_all", rated)
    return measured


def kept(tmp_path):
    return [int(path.name.removeprefix("step-")) for path in sorted((tmp_path / "tiny" / "checkpoints").iterdir())]


def test_some_checkpoints_are_kept_for_good(tmp_path, shards):
    changes = {"train__checkpoint_every": 1, "train__keep_checkpoints": 2, "train__keep_every": 3}
    train(run_tree(tmp_path, shards, train__steps=9, **changes))
    assert kept(tmp_path) == [3, 6, 8, 9]


def test_the_best_checkpoint_is_kept_also_over_a_resume(tmp_path, shards, monkeypatch):
    rates, begun = [0.1, 0.6, 0.5, 0.6, 0.2, 0.7, 0.3, 0.3], []
    rate_evaluations(monkeypatch, lambda _: rates[begun[-1]])
    tree = best_tree(tmp_path, shards, train__steps=5, train__keep_checkpoints=1)
    with before_steps(lambda step, batch, number: begun.append(number)):
        summary = train(tree).summary
    assert kept(tmp_path) == [2, 5]
    assert summary.best == {"step": 2, "figure": FIGURE, "value": 0.6}
    folder = tmp_path / "tiny"
    known = folder / "best.json"
    assert json.loads(known.read_text()) == summary.best | {"checkpoint": "checkpoints/step-00000002"}
    (folder / "metrics.jsonl").unlink()
    known.write_text('{"step": 5}')
    assert train(tree).summary.best == summary.best  # it is in the checkpoint
    shutil.move(folder / "checkpoints" / "step-00000002", tmp_path)
    assert train(tree).summary.best["step"] == 5  # whose checkpoint exists
    shutil.move(tmp_path / "step-00000002", folder / "checkpoints")
    tree["train"]["steps"], tree["run"]["resume_allow"] = 8, ["train.steps"]
    with before_steps(lambda step, batch, number: begun.append(number)):
        train(tree)
    assert kept(tmp_path) == [6, 8]
    assert json.loads(known.read_text())["step"] == 6


FIGURE = "eval/pairs/codes_only/i2t_r1"


def best_tree(folder, shards, **changes):
    """A run that evaluates and saves after every step, and keeps the best."""
    every = {"train__keep_best": FIGURE, "train__evaluate_every": 1, "train__checkpoint_every": 1}
    return run_tree(folder, shards, **({"evaluation": retrieval(shards)} | every | changes))


def test_the_best_step_is_exported_and_measured(tmp_path, shards, monkeypatch, caplog, refused):
    """The learning rate spoils the later steps, so that the best one is not the last."""
    changes = {"train__export": "best", "train__steps": 4, "train__precision": "fp32"}
    tree = best_tree(tmp_path, shards, **changes)
    evaluated = rate_evaluations(monkeypatch, lambda number: 1 / (1 + abs(number - 2)))
    with caplog.at_level("INFO"):
        summary = train(tree).summary
    start = "step 2: pairs (codes only): image to text R@1 100.0"
    (line,) = [each for each in caplog.messages if each.startswith(start)]
    assert "(chance 3." in line
    folder = tmp_path / "tiny"
    stored = json.loads((folder / "summary.json").read_text())
    assert (summary.step, stored["step"], stored["best"]["step"]) == (2, 2, 2)
    assert stored["results"][0]["figures"]["codes_only"] == evaluated[1]
    assert f"{FIGURE} was best after step 2: 100.0%; exported and measured here: step 2" in render(summary)
    exported, best = folder / "tokenizer", folder / "checkpoints" / "step-00000002" / "model"
    assert all_equal(load_file(exported / "model.safetensors"), load_file(best / "model.safetensors"))
    assert "step 2" in (exported / "README.md").read_text()

    assert main(["export-tokenizer", str(folder), "--best"]) == 0
    assert main(["export-tokenizer", str(folder), "--out", str(tmp_path / "newest")]) == 0
    assert all_equal(*(load_file(each / "model.safetensors") for each in (folder / "tokenizer-step-2", exported)))
    assert all_equal(load_file(tmp_path / "newest" / "model.safetensors"), weights(tmp_path, 4))
    assert f"- {FIGURE}: 100.0%" in (folder / "tokenizer-step-2" / "README.md").read_text()
    for out, reason in (
        (folder, "would be replaced, and contains "),
        (folder / "checkpoints" / "step-00000002", "contains manifest.json"),
        (folder / "checkpoints" / "step-00000099", "is among the checkpoints"),
    ):
        assert reason in refused(main(["export-tokenizer", str(folder), "--out", str(out)]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("precious")
    told = refused(main(["export-tokenizer", str(folder), "--out", str(tmp_path / "mine")]))
    assert "contains README.md; expected a new folder" in told
    assert (tmp_path / "mine" / "README.md").read_text() == "precious"
    told = refused(main(["export-tokenizer", str(folder), "--step", "1"]))
    assert "no checkpoint of step 1; expected one of 2, 3, 4" in told
    told = refused(main(["export-tokenizer", str(tmp_path / "newest")]))
    assert "newest/checkpoints: no checkpoints; expected the folder of a run" in told
    damaged = best / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = (exported / "model.safetensors").read_bytes()
    assert str(damaged) in refused(main(["export-tokenizer", str(folder), "--step", "2", "--out", str(exported)]))
    assert (exported / "model.safetensors").read_bytes() == before
    caplog.clear()
    assert train(tree).step == 4  # of the finished run, whose best step is damaged
    assert "the best checkpoint cannot be used, so step 4 stays" in caplog.text
    for step in ("1e400", "1.7", '"2"'):
        (folder / "best.json").write_text(f'{{"step": {step}}}')
        told = refused(main(["export-tokenizer", str(folder), "--best"]))
        assert "best.json: cannot be read (step: got" in told


def test_patience_ends_a_run_after_the_same_step_after_a_resume(tmp_path, shards):
    """With a tiny learning rate every evaluation is as good as the first one."""
    changes = {"train__patience": 3, "train__steps": 9, "optim__lr": 1e-12, "train__precision": "fp32"}
    whole, parted = (best_tree(tmp_path / name, shards, **changes) for name in ("whole", "parted"))
    assert run(whole)["finished"]
    assert not train(parted, [StopAfter(2)]).finished
    assert run(parted)["finished"]
    for folder in (tmp_path / "whole", tmp_path / "parted"):
        assert json.loads((folder / "tiny" / "summary.json").read_text())["ended_after"] == 4
        assert [line["step"] for line in metrics(folder) if FIGURE in line] == [1, 2, 3, 4]
        assert read_run(folder / "tiny").is_finished
    assert all_equal(weights(tmp_path / "whole", 4), weights(tmp_path / "parted", 4))
    assert run(parted) == {"sample_ids": [], "finished": True}


def test_an_evaluation_that_fails_leaves_the_last_step_exported(tmp_path, shards, monkeypatch):
    tree = best_tree(tmp_path, shards, train__export="best", train__steps=4, train__precision="fp32")
    rate_evaluations(monkeypatch, lambda number: 1 / number, fails=4)
    with pytest.raises(DataError, match="gone"):
        train(tree)
    stored = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert (stored["step"], stored["best"]["step"]) == (4, 1)
    exported = load_file(tmp_path / "tiny" / "tokenizer" / "model.safetensors")
    assert all_equal(exported, weights(tmp_path, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__keep_best": "eval/pairs/codes_only/top1"}, "train.keep_best: got .*; expected one of eval/pairs/con"),
        ({"train__keep_best": None, "train__export": "best"}, "got export 'best' and keep_best null"),
        ({"train__keep_best": None, "train__patience": 2}, "got patience 2 and keep_best null"),
        ({"evaluation": []}, f"train.keep_best: got '{FIGURE}'; expected null, as evaluation is empty"),
        ({"model__text__quantizer": {"kind": "identity", "dim": 8}}, "expected one of .*quantized/t2i_r10$"),
    ],
)
def test_a_best_that_cannot_be_is_refused_at_the_start(tmp_path, changes, message):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(best_tree(tmp_path, tmp_path, **changes)))
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, path)


def test_a_folder_with_anything_to_resume_from_is_refused_on_request(tmp_path, shards):
    """A save that was killed while it replaced a checkpoint leaves one that `auto` resumes from."""
    (tmp_path / "tiny" / "checkpoints" / ".replaced-step-00000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run.resume: got 'never', but .*checkpoints contains checkpoints"):
        train(run_tree(tmp_path, shards, run__resume="never"))


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        ("optim__lr", 2e-3, "optim.lr: 0.001 in the checkpoint, 0.002 now"),
        ("optim__betas", [0.9, 0.95], r"optim.betas\[1\]: absent in the checkpoint, 0.95 now"),
        ("train__steps", 5, r"of a run of 4 steps, and this one asks for 5. .*\n  'run.resume_allow=\[train.steps\]'"),
        ("data__transform", {"flip": 0.5}, r"transform\.flip: .* in the checkpoint, .* now"),
        ("model__embed_dim", 8, "model.embed_dim: 16 in the checkpoint, 8 now"),
    ],
)
def test_what_changes_the_trajectory_is_refused(finished, key, value, difference):
    with pytest.raises(CheckpointError, match=difference):
        train(run_tree(*finished, **({"train__steps": 4} | {key: value})))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("finished")
    train(run_tree(folder, shards, train__steps=4))
    return folder, shards


def test_what_leaves_the_trajectory_alone_may_change(finished):
    changes = {
        "data__workers": 1, "data__prefetch": 1, "train__report_every": 7, "train__checkpoint_every": 3,
        "train__activation_checkpointing": True, "run__timeout_s": 50.0,
    }  # fmt: skip
    assert train(run_tree(*finished, train__steps=4, **changes)).finished


def test_other_data_are_refused(finished, tmp_path):
    other = caption_shards(tmp_path / "other", counts=(15, 15), first=3)
    with pytest.raises(CheckpointError, match=r"data\.sha256"):
        train(run_tree(finished[0], other, train__steps=4))
