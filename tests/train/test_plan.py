"""Plans of a step beside real steps of the same configurations."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as c10d
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from tests.models import BUSY_VQ, FSQ, LFQ, tiny_model
from tests.ranks import for_each
from tests.training import run_tree
from vqclip import dist
from vqclip.data import Batch
from vqclip.data.dealing import share_sizes
from vqclip.train import main
from vqclip.train.plan import plan_step
from vqclip.train.tasks.kinds import load_task_config

STARTED_VQ = BUSY_VQ | {"kmeans": False}
SIZE = 62


def settings(quantizer=FSQ, **changes):
    common = {"train__steps": 9, "train__precision": "fp32", "train__batch_size": SIZE}
    return run_tree("runs", "none", quantizer, **common | changes)


def frozen(modality, **changes):
    model = tiny_model(LFQ, LFQ).model_dump(mode="json")
    model[modality]["tower"]["train"] = "none"
    return {"model": model} | changes


CASES = {
    "ddp": settings(STARTED_VQ, train__ema={}),
    "microbatches": settings(train__micro_batches=4),
    "fsdp": settings(train__parallel="fsdp", train__activation_checkpointing=True),
    "ring": settings(**frozen("text", loss__impl="ring")),
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
        print(
            name, plan.peak / peak, sum(plan.exchanges.values()) / max(sent, 1), plan.parts, peak, plan.exchanges, sent
        )
