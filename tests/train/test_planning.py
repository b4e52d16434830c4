"""Plans of a step beside real steps of the same configurations."""

from __future__ import annotations

import json
import random

import pytest
import torch

from tests.models import BUSY_VQ, FSQ, LFQ, tiny_model
from tests.ranks import for_each
from tests.train.test_waiting import stated_exchanges
from tests.training import run_tree
from vqclip import dist
from vqclip.cli.main import main as vqclip
from vqclip.config import to_yaml
from vqclip.data import Batch
from vqclip.data.batch import share_sizes
from vqclip.errors import ConfigError
from vqclip.train import main
from vqclip.train.planning import Machines, StepPlan, Trace, plan_step
from vqclip.train.tasks.kinds import load_task_config

STARTED_VQ = BUSY_VQ | {"kmeans": False}
STARTED_RESIDUAL = {"kind": "residual", "layer": STARTED_VQ, "depth": 3, "dropout": True}
SIZE = 61
"""Samples of a global batch, which no number of ranks or of microbatches divides."""


def settings(quantizer=FSQ, **changes):
    common = {"train__steps": 9, "train__precision": "fp32", "train__batch_size": SIZE}
    return run_tree("runs", "none", quantizer, **common | changes)


def frozen(modality, **changes):
    model = tiny_model(LFQ, LFQ).model_dump(mode="json")
    model[modality]["tower"]["train"] = "none"
    return {"model": model} | changes


CASES = {
    "microbatches": settings(STARTED_VQ, train__micro_batches=5, train__ema={}, train__bucket_mb=0.01),
    "fsdp": settings(STARTED_VQ, train__parallel="fsdp", train__activation_checkpointing=True, train__ema={}),
}
SLOW = {
    "frozen": settings(**frozen("text", train__precision="bf16", loss__impl="ring", loss__positives="caption")),
    "residual": settings(STARTED_RESIDUAL, train__micro_batches=3),
    "fp64": settings(LFQ, train__precision="fp64", loss__impl="gather"),
    "sigmoid": settings(loss={"kind": "sigmoid"}, model__temperature={"init": 10.0, "bias": -10.0}),
    "adapters": settings(model__image__tower__train={"lora": {"rank": 2}}, train__parallel="fsdp"),
    "microbatches in shards": settings(STARTED_VQ, train__parallel="fsdp", train__micro_batches=4),
    "recomputed": settings(train__activation_checkpointing=True, train__micro_batches=2),
}


def measure(tree):
    """Return the parts of the peak of a real step, its exchanges, and the number of trained weights, of this rank."""
    config = load_task_config(tree)
    with Trace() as trace:
        task = main.build_task(config, torch.device("cpu"))
        step = main.build_step(config, task)
        step._replay_checked = True
        trace.watch(step)
        for number in range(2):
            trace.begin()
            with trace.part("batch"):
                batch = make_batch(task, number)
            step(batch, number)
        trace.claim_state(step)
    return trace.peak(), trace.exchanges, sum(each.numel() for each in task.model.parameters() if each.requires_grad)


def make_batch(task, number):
    sizes = share_sizes(SIZE, dist.world_size())
    own = torch.arange(SIZE).split(sizes)[dist.rank()]
    images = torch.randint(0, 256, (len(own), 3, 16, 16), dtype=torch.uint8)
    words = random.Random(0).choices(("red", "star", "green"), k=99 * len(own))
    texts, _ = task.tokenize([" ".join(words[99 * row :][:99]) for row in range(len(own))])
    return Batch(number, 0, images, texts, own, own * 0 - 1, own, SIZE, sizes)


def compare(tree, found, ranks):
    config = load_task_config(tree)
    plan = plan_step(config, Machines(ranks))
    (parts, exchanges, trained), *_ = found
    # With shards, gloo copies the gradients that it scatters.
    tolerance = 0.15 if tree["train"].get("parallel") == "fsdp" else 0.01
    assert plan.peak == pytest.approx(sum(parts.values()), rel=tolerance)
    for part in ("weights", "optimizer", "moving averages"):
        assert plan.parts[part] == pytest.approx(parts[part], rel=0.01), part
    assert plan.exchanges == exchanges
    if tree["train"].get("bucket_mb") and ranks > 1:
        assert plan.exchanges["all_reduce (ddp)"].calls > 5
    assert ranks == 1 or exchanges["replicated_sum"].calls == 1
    if tree["train"].get("parallel") != "fsdp":
        assert ranks == 1 or plan.exchanges["all_reduce (ddp)"].size == config.dtype.itemsize * trained
    return plan


def test_memory_and_exchanges_are_those_of_a_real_step(ranks):
    measured = ranks(2, for_each, measure, [(tree,) for tree in CASES.values()])
    for name, tree, *found in zip(CASES, CASES.values(), *measured, strict=True):
        plan = compare(tree, found, 2)
        stated = {each: number for each, number in stated_exchanges(name).items() if number and each != "any_rank"}
        own = {each: sizes.calls for each, sizes in plan.exchanges.items() if not each.endswith(("(ddp)", "(fsdp)"))}
        assert own == stated


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_more_memory_and_exchanges_are_those_of_a_real_step(ranks, world_size):
    every = SLOW | (CASES if world_size == 4 else {})
    measured = ranks(world_size, for_each, measure, [(tree,) for tree in every.values()])
    for tree, *found in zip(every.values(), *measured, strict=True):
        compare(tree, found, world_size)


def test_the_command_says_what_to_change(tmp_path, capsys, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load_task_config(settings(train__steps=200, train__bucket_mb=10.0))))
    given = ["plan", str(file), "--gpus", "4", "--reserve", "0"]
    assert vqclip([*given, "--memory", "0.012"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 samples a process. Memory of a process at the peak of a step:"
    assert any(line.startswith("  all_reduce (ddp) ") for line in lines)
    changes = lines[lines.index("what to change; each line includes the changes above it:") + 2 :]
    assert changes[0].split()[:2] == ["train.parallel=fsdp", "train.bucket_mb=null"]
    assert changes[0].split()[3] == "MiB"
    assert lines[-1].startswith("then it fits")
    plan = StepPlan(16, {"weights": 7, "activations": 5}, {"reduce_": dist.Exchanged(1, 2, 3)})
    planned = []
    monkeypatch.setattr("vqclip.cli.plan.plan_step", lambda _, machines: planned.append(machines.memory) or plan)
    assert vqclip([*given, "run.device=cuda"]) == 0
    assert planned.pop() == 80 * 2**30  # as the help says
    capsys.readouterr()
    assert vqclip([*given, "--memory", "80", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["fits"], shown["peak"], shown["exchanges"]) == (
        True,
        12,
        {"reduce_": {"calls": 1, "size": 2, "sent": 3}},
    )
    assert vqclip([*given, "--memory", "80", "--reserve", "80"]) == 2
    assert "--memory: got 80 GiB, all of which --reserve takes" in capsys.readouterr().err
    monkeypatch.setattr("vqclip.train.planning.plan.plan_step", lambda *_: StepPlan(16, {"weights": 4}, {}))
    sharded = ("bucket_mb=null", "parallel=fsdp", "precision=bf16", "activation_checkpointing=1")
    changed = [f"train.{each}" for each in sharded]
    assert vqclip([*given, *changed, "--memory", "1e-8", "--json"]) == 1
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["overrides"] == ["train.activation_checkpointing=true"]


def test_what_cannot_be_planned_is_refused():
    for ranks, changes, message in (
        (4, {"train__batch_size": 3}, "train.batch_size: got 3, fewer than the 4 processes"),
        (4, {"train__parallel": "hsdp"}, "train.parallel: got hsdp, with 4 processes on a machine and 4 in all"),
        (12, {"train__parallel": "hsdp"}, "train.parallel: got hsdp, with 8 processes on a machine and 12 in all"),
        (
            4,
            {"distillation": [{"kind": "image_features", "teacher": {"kind": "initial"}}]},
            "distillation: got one, and a step",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_step(load_task_config(settings(**changes)), Machines(ranks))
