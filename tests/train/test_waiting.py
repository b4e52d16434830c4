"""What makes the host wait in a step: reads of the device, and collectives."""

import re
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.counting import counting
from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ
from tests.ranks import for_each
from tests.training import TIMES, metrics, run, run_tree
from vqclip import dist
from vqclip.dist._torch_versions import TIMES_SHARDS
from vqclip.quantizers import VQ
from vqclip.train import run as train
from vqclip.train.speed import Clock
from vqclip.train.step import TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask
from vqclip.train.tasks.kinds import load_task_config

LATER = 9
"""A step in which every codebook is initialised. It is not reported, and the next one is."""
HOST_ONLY = {
    "tokenizer/encoder.py:needed_tokens",
    "dist/_control.py:end",
    "dist/_control.py:start_any_rank",
    "quantizers/vq.py:_refresh_draws",
    "quantizers/vq.py:_count_skipped",
    "dist/_control.py:gather_json",
    "train/guards.py:settle",
    "quantizers/stats.py:<dictcomp>",
    "quantizers/stats.py:__add__",
    "quantizers/stats.py:_draw_tokens",
    "nn/precision.py:constant",
}
"""Reads of what is never on the device: the loader's batch, messages of ranks, a copy that was made a step before, the
number of tokens to draw. CUDA does not wait where it copies 64 KB or less to the device, such as constants."""


def count_waits(tree):
    """Train; return the reads and the collectives of the step ``LATER`` and of the next one, from batch to batch."""
    found, make_clock = {}, Clock.time_waits

    def counted(clock, batches):
        for batch in make_clock(clock, batches):
            with counting() as mode:
                yield batch
            found[batch.step] = mode

    with mock.patch.object(Clock, "time_waits", counted):
        train(load_task_config(tree))
    modes = [found[step] for step in (LATER, LATER + 1)]
    reads = [{each: number for each, number in mode.reads.items() if each not in HOST_ONLY} for mode in modes]
    return [*reads, *(mode.collectives for mode in modes)]


def test_reported_tokens_that_are_not_finite_make_no_later_update_wait():
    quantizer = VQ(2, 8, kmeans=False)
    for number in range(4):
        stats = quantizer(torch.full((9, 2), 1.0 if number else torch.inf)).stats
        with counting() as mode:
            quantizer.update(stats)
        assert mode.reads["quantizers/vq.py:_count_skipped"] == (1, 2, 0, 0)[number]
    assert quantizer.skipped == 1


CASES = {
    "fsq": (FSQ, {}),
    "vq": (BUSY_VQ, {"train__ema": {}, "train__precision": "bf16"}),
    "residual": (BUSY_RESIDUAL | {"least": 3}, {"train__micro_batches": 3}),
    "fsdp": (BUSY_VQ, {"train__parallel": "fsdp"}),
}
REPORT = {"all_gather": 2, "reduce_": 1}
"""Further exchanges of a report: the counts of replaced samples, and those of codes."""


def stated_exchanges(parallel):
    """Exchanges of a step by the table in docs/memory.md."""
    text = (Path(__file__).parents[2] / "docs/memory.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\d) \| (\d) \|", text, re.MULTILINE)
    return {name: int(fsdp if parallel == "fsdp" else ddp) for name, ddp, fsdp in rows}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_waits_for_nothing_and_a_report_reads_the_device_once(tmp_path, shards, ranks, world_size):
    common = {"train__steps": LATER + 4, "train__precision": "fp32", "train__report_every": LATER + 2}
    cases = CASES.items()
    trees = [(run_tree(tmp_path / name, shards, quantizer, **common | more),) for name, (quantizer, more) in cases]
    for found in ranks(world_size, for_each, count_waits, trees, init=False):
        for name, (reads, reads_of_report, calls, calls_of_report) in zip(CASES, found, strict=True):
            assert reads == {}
            assert reads_of_report == {"train/callbacks/builtin.py:_read_metrics": 1}
            stated = Counter(stated_exchanges(name)) if world_size > 1 else Counter()
            assert len(stated) in (0, 7)
            more = Counter(REPORT) if world_size > 1 else Counter()
            assert calls == +stated
            assert calls_of_report == stated + more


# ---- Speed and memory in the metrics of a run.


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
    run(tree)
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


def train_beside_a_late_rank(tree):
    """Train; rank 1 begins each backward late, so that rank 0 waits for it."""
    backward = TrainStep._backward

    def late(self, *args):
        if dist.rank() == 1:
            time.sleep(LATE_S)
        backward(self, *args)

    with mock.patch.object(TrainStep, "_backward", late):
        run(tree)


def test_a_run_reports_the_time_in_which_it_waits_for_others(tmp_path, shards, ranks):
    common = {"train__steps": 5, "train__precision": "fp32"}
    cases = {"ddp": {}, "microbatches": {"train__micro_batches": 2}}
    cases |= {"fsdp": {"train__parallel": "fsdp"}} if TIMES_SHARDS else {}
    trees = {name: run_tree(tmp_path / name, shards, FSQ, **common | changes) for name, changes in cases.items()}
    ranks(2, for_each, train_beside_a_late_rank, [(tree,) for tree in trees.values()], init=False)
    for name, tree in trees.items():
        for line in metrics(tmp_path / name)[1:]:
            step_s = tree["train"]["batch_size"] / line["images_per_second"]
            assert 0.9 * LATE_S < line["exchange_wait"] * step_s < step_s, name
