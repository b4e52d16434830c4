"""Small runs of the real training loop for tests: the tiny model on a few drawn shards."""

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.models import FSQ, change, tiny_model
from vqclip import dist
from vqclip.errors import VqclipError
from vqclip.losses import ContrastiveConfig
from vqclip.model import CLIP
from vqclip.runlog.metrics import read_metrics
from vqclip.train import Callback
from vqclip.train import run as train
from vqclip.train.distillation import Distillation
from vqclip.train.optim import OptimConfig, Schedule
from vqclip.train.step import ComputeConfig, TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask
from vqclip.train.tasks.kinds import load_task_config

STEPS = 20
TIMES = ("images_per_second", "tokens_per_second", "data_wait", "exchange_wait", "tflops_per_second", "memory_gib")
"""Metrics that differ between equal runs."""


def run_tree(folder: Path, shards: Path, quantizer: dict[str, Any] = FSQ, **changes: Any) -> dict[str, Any]:
    """The configuration of a run in ``folder`` as a plain tree; ``changes`` as in `change`."""
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "folder": str(folder), "device": "cpu", "timeout_s": 60.0},
        "data": {"sources": [{"kind": "shards", "path": str(shards)}], "workers": 0},
        "model": tiny_model(quantizer, quantizer).model_dump(mode="json"),
        "loss": {"kind": "contrastive"},
        "optim": {"lr": 1e-3, "warmup_steps": 3},
        "train": {"steps": STEPS, "batch_size": 12, "report_every": 1, "checkpoint_every": 1000, "precision": "fp64"},
        "evaluation": [],
    }
    return change(tree, changes)


def retrieval(shards: Path, **changes: Any) -> list[dict[str, Any]]:
    """The configuration of one evaluation by retrieval, named ``pairs``."""
    return [{"kind": "retrieval", "name": "pairs", "data": {"kind": "shards", "path": str(shards)}, **changes}]


def identity_of(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings that define the trajectory of a run, of no particular samples."""
    config = load_task_config(tree)
    return config.run_identity(config.build_task(torch.device("cpu")), {})


def error_of(tree: dict[str, Any]) -> str | None:
    """Train; return the message of an error of ours that ends the run."""
    try:
        train(tree)
    except VqclipError as error:
        return str(error)
    return None


@contextlib.contextmanager
def before_steps(action: Callable[[TrainStep, Any, int], object]) -> Iterator[None]:
    """Call ``action(step, batch, number)`` before each training step within the block."""
    step = TrainStep.__call__

    def acting(self: TrainStep, batch: Any, number: int) -> Any:
        action(self, batch, number)
        return step(self, batch, number)

    with mock.patch.object(TrainStep, "__call__", acting):
        yield


def run(tree: dict[str, Any], cache: str = "") -> dict[str, Any]:
    """Train in this process (a rank, or alone) and tell what happened; without a cache folder, in that of the test."""
    os.environ["VQCLIP_CACHE"] = cache or os.environ["VQCLIP_CACHE"]
    config = load_task_config(tree)
    seen: list[list[int]] = []
    with before_steps(lambda step, batch, number: seen.append(batch.sample_ids.tolist())):
        result = train(config)
    return {"sample_ids": seen, "finished": result.finished}


def run_until(stop: int, tree: dict[str, Any], cache: str = "") -> None:
    """Die in step number ``stop``, without a last save."""

    def die(step: TrainStep, batch: Any, number: int) -> None:
        if number == stop:
            raise KeyboardInterrupt

    with before_steps(die), contextlib.suppress(KeyboardInterrupt):
        run(tree, cache)
        raise AssertionError("it has not died")


def run_compiled(tree: dict[str, Any], backend: str) -> tuple[int, int]:
    """Train as `run` does with a backend of `torch.compile`; return the numbers of graphs and of their breaks."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        run(tree)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def contrastive_step(
    model: CLIP, loss: nn.Module | None = None, distillation: Distillation | None = None, **compute: Any
) -> TrainStep:
    """The training step of a model, with a learning rate of 0.001 from the first of ten steps on."""
    optim = OptimConfig(lr=1e-3, warmup_steps=0)
    task = ContrastiveTask(model, loss or ContrastiveConfig().build(), distillation=distillation)
    return TrainStep(task, optim.build(model), Schedule(optim, 10), ComputeConfig(**compute), None, seed=3)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of the run in ``folder``."""
    return list(read_metrics(folder / "tiny" / "metrics.jsonl"))


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Those lines without what differs between equal runs."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(folder)]


def weights(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint of the run in ``folder``, with those of a pixel decoder."""
    model = folder / "tiny" / "checkpoints" / f"step-{step:08d}" / "model"
    files = [path for name in ("model", "pixels") if (path := model / f"{name}.safetensors").exists()]
    return {name: each for path in files for name, each in load_file(path).items()}


def averages(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    """The moving averages in a checkpoint of the run in ``folder``, by the names of the model's tensors."""
    found = load_file(folder / "tiny" / "checkpoints" / f"step-{step:08d}" / "state.safetensors")
    return {name.removeprefix("ema/"): tensor for name, tensor in found.items() if name.startswith("ema/")}


class StopAfter(Callback):
    """Asks for a stop after a step; several processes stop a step after they were asked."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, training: Any) -> None:
        if training.done == self.step - dist.is_distributed():
            training.request_stop("enough")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative difference (by norm) between the tensors of two models."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-12))
        for name in one
        if one[name].is_floating_point() and one[name].numel()
    )


def all_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two models hold the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def differences(one: Any, other: Any, ignored: Collection[str] = ()) -> list[str]:
    """Paths at which two objects differ: tensors by dtype, layout and bits, all else by its attributes, recursively.

    ``ignored`` are paths that are not followed.
    """
    found: list[str] = []
    seen: set[int] = set()

    def visit(a: Any, b: Any, path: str) -> None:
        if a is b or path in ignored or id(a) in seen:
            return
        if type(a) is not type(b):
            found.append(path)
        elif isinstance(a, Tensor):
            same = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            same &= a.numel() == 1 or a.stride() == b.stride()  # fused kernels iterate over memory
            if not (same and torch.equal(*(each.detach().flatten().view(torch.uint8) for each in (a, b)))):
                found.append(path)
        elif isinstance(a, Mapping) and all(isinstance(key, str) for key in (*a, *b)):
            seen.add(id(a))
            found.extend({f"{path}.{key}" for key in a.keys() ^ b.keys()} - set(ignored))
            for key in a.keys() & b.keys():
                visit(a[key], b[key], f"{path}.{key}")
        elif isinstance(a, (Mapping, list, tuple, deque)):  # hooks and parameters are keys of each object's own
            ours, theirs = (list(each.values() if isinstance(each, Mapping) else each) for each in (a, b))
            if len(ours) != len(theirs):
                found.append(path)
            for index, pair in enumerate(zip(ours, theirs, strict=False)):
                visit(*pair, f"{path}.{index}")
        elif hasattr(a, "__dict__") and not isinstance(a, (type, FunctionType, MethodType)):
            seen.add(id(a))
            visit(vars(a), vars(b), path)
        elif getattr(a, "__func__", a) != getattr(b, "__func__", b):
            found.append(path)

    visit(one, other, "")
    return found
