"""Products of towers in fp8, emulated on a CPU: who computes in it, and when."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.models import tiny_model
from tests.training import run_tree
from vqclip.errors import ConfigError
from vqclip.train.float8 import Float8Layers
from vqclip.train.step import ComputeConfig
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
