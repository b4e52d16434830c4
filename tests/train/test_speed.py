"""Speed and memory in the metrics of a run."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.nn.functional as F

from tests.models import FSQ
from tests.ranks import for_each
from tests.training import TIMES, metrics, run, run_tree
from vqclip import dist
from vqclip.dist._torch_versions import TIMES_SHARDS
from vqclip.train.step import TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask


def test_a_run_reports_the_flops_of_its_model(tmp_path, shards, monkeypatch):
    """Twice the multiplications of matrix products, times three; here those of linear layers and of the patches."""
    linear, run_task, products = F.linear, ContrastiveTask.run, []

    def counting(self, network, local, step):
        if network is not self.student or products:
            return run_task(self, network, local, step)
        with monkeypatch.context() as patch:

            def recording(x, weight, bias=None):
                products.append(2 * x.numel() * len(weight) / len(local))
                return linear(x, weight, bias)

            patch.setattr(F, "linear", recording)
            return run_task(self, network, local, step)

    monkeypatch.setattr(ContrastiveTask, "run", counting)
    tree = run_tree(tmp_path, shards, FSQ, train__steps=5, run__peak_tflops=0.5)
    run(tree, str(tmp_path / "cache"))
    first, *lines = metrics(tmp_path)
    assert not set(TIMES) & first.keys()  # the first step is not timed
    for line in lines:
        flops = 1e12 * line["tflops_per_second"] / line["images_per_second"] / 3
        assert 1.05 < flops / sum(products) < 1.4  # the patches, attention
        assert line["mfu"] == pytest.approx(line["tflops_per_second"] / 0.5)
        assert 0.1 < line["memory_gib"] < 100
        assert 4 + 2 < line["tokens_per_second"] / line["images_per_second"] < 4 + 12  # of an image and of a caption
        assert line["exchange_wait"] == 0


LATE_S = 0.1


def train_beside_a_late_rank(tree, cache):
    """Train; rank 1 begins each backward late, so that rank 0 waits for it."""
    backward = TrainStep._backward

    def late(self, *args):
        if dist.rank() == 1:
            time.sleep(LATE_S)
        backward(self, *args)

    with mock.patch.object(TrainStep, "_backward", late):
        run(tree, cache)


def test_a_run_reports_the_time_in_which_it_waits_for_others(tmp_path, shards, ranks):
    common = {"train__steps": 5, "train__precision": "fp32"}
    cases = {"ddp": {}, "microbatches": {"train__micro_batches": 2}}
    cases |= {"fsdp": {"train__parallel": "fsdp"}} if TIMES_SHARDS else {}
    trees = {name: run_tree(tmp_path / name, shards, FSQ, **common | changes) for name, changes in cases.items()}
    cache = str(tmp_path / "cache")
    ranks(2, for_each, train_beside_a_late_rank, [(tree, cache) for tree in trees.values()], init=False)
    for name, tree in trees.items():
        for line in metrics(tmp_path / name)[1:]:
            step_s = tree["train"]["batch_size"] / line["images_per_second"]
            assert 0.9 * LATE_S < line["exchange_wait"] * step_s < step_s, name
