"""Products of towers in fp8, emulated on a CPU: who computes in it, and when."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from tests.models import tiny_model
from tests.train.test_grad_cache import batch_number
from tests.training import run_tree
from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.losses import ContrastiveConfig
from vqclip.model import ModelConfig
from vqclip.train.float8 import Float8Layers
from vqclip.train.optim import OptimConfig
from vqclip.train.step import ComputeConfig, TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask
from vqclip.train.tasks.kinds import load_task_config

CPU = torch.device("cpu")


def test_towers_compute_in_fp8_within_the_block_alone():
    torch.manual_seed(0)
    model = tiny_model().build()
    images, tokens = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8), model.text.preprocess(["a", "b c"])
    names, weights = list(model.state_dict()), list(model.parameters())
    layers = Float8Layers([model.image.tower, model.text.tower], CPU, emulate=True)
    expected = model.image.tower(images)
    with layers.applied():
        assert list(model.state_dict()) == names
        assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
        features = model.image.tower(images)
        assert 1e-3 < (features - expected).norm() / expected.norm() < 0.2
        out = model(images, tokens)
        (out.image.embedding.square().sum() + out.text.embedding.sum()).backward()
    kinds = {name: type(each).__name__ for name, each in model.named_modules()}
    assert "Float8Linear" not in kinds.values()
    assert torch.equal(model.image.tower(images), expected)
    missing = [name for name, each in model.named_parameters() if each.grad is None]
    assert missing == ["logit_scale"]
    assert all(each.grad.isfinite().all() for each in weights if each.grad is not None)


def three_steps(**compute):
    """Run 3 steps of a model whose text tower trains from the third on, and evaluate it.

    Returns the weights, and the towers that ran with products in fp8 in each forward of the steps.
    """
    torch.manual_seed(0)
    tree = tiny_model().model_dump(mode="json")
    tree["text"]["tower"]["train"] = {"from_step": 2}
    model = ModelConfig.model_validate(tree).build()
    optim, task = OptimConfig(lr=1e-3, warmup_steps=0), ContrastiveTask(model, ContrastiveConfig().build())
    step = TrainStep(task, optim.build(model), optim.schedule(10), ComputeConfig(**compute), None, seed=3)
    in_fp8 = []
    hooks = [
        tower.register_forward_pre_hook(lambda each, _: in_fp8.append("Float8Linear" in map(kind, each.modules())))
        for tower in (model.image.tower, model.text.tower)
    ]
    for number in range(3):
        step.move_to_step(number)
        step(batch_number(number, model), number)
    for hook in hooks:
        hook.remove()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    twin = ModelConfig.model_validate(tree).build()
    twin.load_state_dict(weights)
    batch = batch_number(3, model)
    with step.whole_task() as whole, torch.no_grad():
        evaluated = whole.model.text.tower(batch.texts)
        assert torch.equal(evaluated, twin.text.tower(batch.texts))
    return weights, in_fp8


def kind(module):
    return type(module).__name__


def test_steps_compute_in_fp8_and_evaluations_do_not(monkeypatch):
    given = []
    monkeypatch.setattr(dist, "wrap_ddp", lambda module, bucket_mb: given.append(bucket_mb) or module)
    plain, nowhere = three_steps(bucket_mb=3.0)
    assert given == [3.0, 3.0]  # at the start, and once the tower trains
    monkeypatch.setattr("vqclip.train.step.Float8Layers", functools.partial(Float8Layers, emulate=True))
    (found, found_in), (again, _) = (three_steps(float8=True) for _ in range(2))
    assert nowhere == [False] * 6
    assert found_in == [False, True] * 2 + [True, True]  # a frozen tower, here that of texts, runs before the rest
    assert all(torch.equal(found[name], again[name]) for name in found)
    for tower in ("image.tower", "text.tower"):
        linear = [name for name, value in found.items() if name.startswith(tower) and value.ndim == 2]
        assert any(not torch.equal(found[name], plain[name]) for name in linear)
        assert all(torch.allclose(found[name], plain[name], atol=1e-2) for name in linear)


def test_devices_without_fp8_and_other_obstacles_are_refused(monkeypatch):
    towers = [tiny_model().build().text.tower]
    with pytest.raises(ConfigError, match=r"train.float8: got true on no GPU; expected .* 8\.9 or more"):
        Float8Layers(towers, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"got true on a GPU of compute capability 8\.0"):
        Float8Layers(towers, torch.device("cuda"))
    with pytest.raises(ConfigError, match="no tower that trains has a linear layer"):
        Float8Layers([], CPU, emulate=True)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"needs the package torchao .*'vqclip\[float8\]'"):
        Float8Layers(towers, CPU, emulate=True)
    for other in ({"parallel": "fsdp"}, {"precision": "fp64"}, {"precision": "fp16"}):
        with pytest.raises(ValueError, match="got float8 true with parallel"):
            ComputeConfig(**{"float8": True, "precision": "bf16"} | other)


def test_a_run_in_fp8_resumes_on_as_many_processes_and_microbatches():
    tree = run_tree("runs", "none", train__precision="bf16", train__float8=True, train__micro_batches=3)
    settings = load_task_config(tree).identity({}, towers_draw=False)
    assert settings["train.float8"] == {"processes": 1, "micro_batches": 3}
