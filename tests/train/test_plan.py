"""Plans of a step beside real steps of the same configurations."""

import json
import weakref

import pytest
import torch
import torch.distributed as c10d
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from tests.models import BUSY_VQ, FSQ, LFQ
from tests.ranks import for_each
from tests.training import run_tree
from vqclip import dist
from vqclip.cli.main import main as vqclip
from vqclip.config import to_yaml
from vqclip.data import Batch
from vqclip.data.batch import share_sizes
from vqclip.errors import ConfigError
from vqclip.train import main
from vqclip.train.plan import plan_step
from vqclip.train.tasks.kinds import load_task_config

STARTED_VQ = BUSY_VQ | {"kmeans": False}
SIZE = 62


def settings(quantizer=FSQ, **changes):
    common = {"train__steps": 9, "train__precision": "fp32", "train__batch_size": SIZE}
    return run_tree("runs", "none", quantizer, **common | changes)


CASES = {
    "ddp": settings(STARTED_VQ, train__ema={}),
    "microbatches": settings(train__micro_batches=4),
    "fsdp": settings(train__parallel="fsdp", train__activation_checkpointing=True),
    "ring": settings(LFQ, model__text__tower__train="none", loss__impl="ring"),
    "gather": settings(LFQ, train__precision="fp64", loss__impl="gather"),
    "sigmoid": settings(loss={"kind": "sigmoid"}, model__temperature={"init": 10.0, "bias": -10.0}),
    "recomputed": settings(train__activation_checkpointing=True, train__micro_batches=2),
}


class Watch(TorchDispatchMode):
    """Most bytes of tensors at once since `begin`, and bytes that collectives send in a ring of ranks."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak, self.sent = {}, 0, 0

    def begin(self):
        self.peak, self.sent = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # a DTensor calls the operator on its own tensor
        if func.namespace == "c10d":
            turns = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1}
            sizes = [sum(x.nbytes for x in tree_leaves(each) if isinstance(x, torch.Tensor)) for each in args[:2]]
            ranks = c10d.get_world_size()
            kind = func._schema.name.partition("::")[2]
            self.sent += sizes[0] if kind == "send" else max(sizes) * turns.get(kind, 0) * (ranks - 1) // ranks
        if func.namespace == "vqclip":
            with self:  # to see what the operator does
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if id(storage) not in self.sizes:
                    weakref.finalize(storage, self.sizes.pop, id(storage), None)
                self.sizes[id(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def measure(tree):
    """Return the peak of the second step of a run on this rank, and the bytes that it sends."""
    config = load_task_config(tree)
    with Watch() as watch:
        task = main.build_task(config, torch.device("cpu"))
        step = main.build_step(config, task)
        step._replay_checked = True
        sizes = share_sizes(SIZE, dist.world_size())
        own = torch.arange(SIZE).split(sizes)[dist.rank()]
        texts, _ = task.tokenize(["red star " * 50] * len(own))
        images = torch.randint(0, 256, (len(own), 3, 16, 16), dtype=torch.uint8)
        for number in range(2):
            watch.begin()
            step(Batch(number, 0, images, texts, own, own * 0 - 1, own, SIZE, sizes), number)
    return watch.peak, watch.sent


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_memory_and_exchanges_are_near_those_of_a_real_step(ranks, world_size):
    cases = {name: tree for name, tree in CASES.items() if world_size > 1 or name in ("ddp", "recomputed")}
    measured = ranks(world_size, for_each, measure, [(tree,) for tree in cases.values()])
    for name, tree, (peak, sent) in zip(cases, cases.values(), measured[0], strict=True):
        plan = plan_step(load_task_config(tree), world_size)
        assert plan.peak == pytest.approx(peak, rel=0.2), name
        assert sum(plan.exchanges.values()) == pytest.approx(sent, rel=0.005), name


def test_the_command_says_what_to_change(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load_task_config(settings(train__steps=200, train__bucket_mb=10.0))))
    given = ["plan", str(file), "--gpus", "4", "--reserve", "0"]
    assert vqclip([*given, "--memory", "0.013"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 samples a process. Memory of a process at the peak of a step:"
    assert any(line.startswith("  gradients ") and line.endswith("MB") for line in lines)
    changes = lines[lines.index("what to change; each line includes the changes above it:") + 2 :]
    assert changes[0].split()[:2] == ["train.parallel=fsdp", "train.bucket_mb=null"]
    assert lines[-3].startswith("then it fits")
    assert lines[-1].startswith("The data are not counted: data.sources[0]: ")
    assert vqclip([*given, "--memory", "80", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["fits"], shown["fits_with_changes"], shown["changes"]) == (True, True, [])
    assert shown["peak"] == sum(shown["memory"].values())
    assert vqclip([*given, "--memory", "80", "--reserve", "80"]) == 2
    assert "--memory: got 80, all of which --reserve 80 takes" in capsys.readouterr().err
    assert vqclip([*given, "--memory", "1e-6"]) == 1
    assert "no setting that was tried makes it fit" in capsys.readouterr().out


def test_half_precision_and_recomputing_take_less():
    sizes = {
        name: plan_step(load_task_config(settings(train__batch_size=512, **changes)), 1).peak
        for name, changes in {
            "fp32": {},
            "bf16": {"train__precision": "bf16"},
            "half": {"train__activation_checkpointing": 2},
            "all": {"train__activation_checkpointing": True},
        }.items()
    }
    assert sizes["all"] < sizes["half"] < sizes["fp32"]
    assert 0.5 * sizes["fp32"] < sizes["bf16"] < 0.95 * sizes["fp32"]


def test_what_cannot_be_planned_is_refused():
    for ranks, changes, message in (
        (4, {"train__batch_size": 3}, "train.batch_size: got 3, fewer than the 4 processes"),
        (4, {"train__parallel": "hsdp"}, "train.parallel: got hsdp, with 4 processes on a machine and 4 in all"),
        (12, {"train__parallel": "hsdp"}, "train.parallel: got hsdp, with 8 processes on a machine and 12 in all"),
        (4, {"distillation": [{"kind": "image_features", "teacher": {"kind": "initial"}}]}, "without distillation"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_step(load_task_config(settings(**changes)), ranks)
