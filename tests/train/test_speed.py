"""Speed and memory in the metrics of a run."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.data.making import caption_shards
from tests.models import BUSY_RESIDUAL, FSQ
from tests.training import TIMES, all_equal, metrics, run, run_tree, weights
from vqclip.train.speed import SpeedMeter
from vqclip.train.tasks.contrastive import ContrastiveTask


def test_a_run_reports_the_flops_of_its_model(tmp_path, monkeypatch):
    """Twice the multiplications of matrix products, times three; here those of linear layers and of the patches."""
    shards, products = caption_shards(tmp_path / "shards", counts=(17, 13)), []
    linear, run_task = F.linear, ContrastiveTask.run

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


def test_counting_changes_no_bit(tmp_path, monkeypatch):
    shards = caption_shards(tmp_path / "shards", counts=(17, 13))
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(SpeedMeter, "count", lambda self, step, batch: setattr(self, "_flops", 1.0))
        tree = run_tree(tmp_path / name, shards, BUSY_RESIDUAL, train__steps=5, train__micro_batches=2)
        run(tree, str(tmp_path / "cache"))
    assert all_equal(weights(tmp_path / "with", 5), weights(tmp_path / "without", 5))
