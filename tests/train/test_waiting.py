"""What makes the host wait in a step: reads of the device, and collectives."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from tests.counting import counting
from tests.data.making import caption_shards
from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ
from tests.ranks import for_each
from tests.training import run_tree
from vqclip.train import loop
from vqclip.train import run as train
from vqclip.train.tasks.kinds import load_task_config

LATER = 9
"""A step in which every codebook is initialised. Neither it nor the step before it is reported."""
HOST_ONLY = {"tokenizer/text.py:needed_tokens"}
"""Reads of the loader's batch, which is never on the device."""


def count_waits(tree, cache):
    """Train; return the reads and the collectives of the step ``LATER``, its callbacks included."""
    os.environ["VQCLIP_CACHE"] = cache
    found, run_step, call = [], loop._run_step, loop._call

    def counted(function, training, *args):
        with counting() as mode:
            result = function(*args)
        if training.batch.step == LATER:
            found.append(mode)
        return result

    def hook(callbacks, name, training, *args):
        inside = name.startswith("on_step")
        return (
            counted(call, training, callbacks, name, training, *args)
            if inside
            else call(callbacks, name, training, *args)
        )

    with (
        mock.patch.object(loop, "_run_step", lambda training: counted(run_step, training, training)),
        mock.patch.object(loop, "_call", hook),
    ):
        train(load_task_config(tree))
    reads = {place: number for mode in found for place, number in mode.reads.items() if place not in HOST_ONLY}
    return reads, {name: number for mode in found for name, number in mode.collectives.items()}


CASES = {
    "fsq": (FSQ, {}),
    "vq": (BUSY_VQ, {"train__ema": {}, "train__precision": "bf16"}),
    "residual": (BUSY_RESIDUAL | {"least": 3}, {"train__micro_batches": 3}),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_reads_the_device_once(tmp_path, ranks, world_size):
    shards = caption_shards(tmp_path / "shards", counts=(17, 13))
    common = {"train__steps": LATER + 3, "train__precision": "fp32", "train__report_every": LATER + 2}
    trees = [
        (run_tree(tmp_path / name, shards, quantizer, **common | changes), str(tmp_path / "cache"))
        for name, (quantizer, changes) in CASES.items()
    ]
    collectives = {"replicated_sum": 1, "all_gather": 2, "reduce_": 2, "reduce_scatter": 2}
    for found in ranks(world_size, for_each, count_waits, trees, init=False):
        for reads, calls in found:
            assert reads == {"train/step.py:_check": 1}
            assert calls == (collectives if world_size > 1 else {})
