"""GPUs compute what CPUs compute: `make test-gpu`, on a machine with one GPU or several.

`VQCLIP_TEST_DEVICE=cpu` runs the tests of one process without a GPU, which shows that the tests themselves work.
"""

import functools
import json
import os
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch

from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, LFQ
from tests.train.test_pixels import pixel_tree
from tests.training import StopAfter, largest_difference, metrics, run, run_tree, weights
from vqclip import load_tokenizer
from vqclip.train import run as train
from vqclip.train.speed import Clock
from vqclip.train.tasks.kinds import load_task_config

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("VQCLIP_TEST_DEVICE", "cuda")
STEPS = 12
WORLDS = [count for count in (2, 4, 8) if count <= torch.cuda.device_count()]
QUANTIZERS = {"fsq": FSQ, "lfq": LFQ | {"entropy_temperature": 1.0}, "vq": BUSY_VQ, "residual": BUSY_RESIDUAL}
TOLERANCES = {"fsq": 1e-9, "lfq": 1e-9, "vq": 1e-6, "residual": 1e-6}
"""Codebooks are float32 numbers, which the two devices round differently now and then. At LFQ's default temperature of
0.01, a difference of 1e-15 grows to 1e-7 in these steps, also between two runs on a CPU."""
MLP = {"kind": "mlp", "dropout": 0.3, "input_dropout": 0.1}
DROPOUT = {"model__image__project_in": MLP, "model__text__project_in": MLP, "model__image__tower__patch_dropout": 0.5}


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.fail("torch sees no GPU; expected one, or VQCLIP_TEST_DEVICE=cpu to check the tests themselves")


def tree(folder, shards, quantizer=FSQ, device=DEVICE, **changes):
    settings = {"run__device": device, "train__steps": STEPS, "train__ema": {"decay": 0.9}}
    return run_tree(folder, shards, quantizer, **settings | changes)


def require_same(folder, other, tolerance):
    assert largest_difference(weights(folder, STEPS), weights(other, STEPS)) < tolerance
    for line, expected in zip(metrics(folder), metrics(other), strict=True):
        assert line["loss/total"] == pytest.approx(expected["loss/total"], rel=tolerance), line["step"]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_gpu_trains_the_same_model_as_a_cpu(tmp_path, shards, quantizer, micro_batches):
    for device in ("cpu", DEVICE):
        settings = DROPOUT | {"train__micro_batches": micro_batches, "optim__clip_grad_norm": 0.5}
        run(tree(tmp_path / f"on {device}", shards, QUANTIZERS[quantizer], device, **settings), str(tmp_path / "cache"))
    require_same(tmp_path / f"on {DEVICE}", tmp_path / "on cpu", TOLERANCES[quantizer])


@pytest.mark.parametrize("detail", [None, {"stages": 2, "quantizer": FSQ}], ids=["decoder", "detail"])
def test_a_gpu_trains_the_same_decoder_as_a_cpu(tmp_path, shards, detail):
    cache = str(tmp_path / "cache")
    run(tree(tmp_path / "clip", shards), cache)
    for device in ("cpu", DEVICE):
        folder, tokenizer = tmp_path / f"on {device}", tmp_path / "clip" / "tiny" / "tokenizer"
        settings = pixel_tree(folder, shards, tokenizer, detail=detail)
        settings["run"]["device"], settings["train"]["steps"] = device, STEPS
        run(settings, cache)
    require_same(tmp_path / f"on {DEVICE}", tmp_path / "on cpu", 1e-9)


@pytest.mark.timeout(900)  # compiling for a CPU takes minutes
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_precision_trains(tmp_path, shards, precision, compiled):
    settings = DROPOUT | {"train__precision": precision, "train__compile": compiled}
    assert run(tree(tmp_path, shards, BUSY_RESIDUAL, **settings), str(tmp_path / "cache"))["finished"]


def test_a_step_whose_gradient_overflows_in_fp16_is_skipped(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**40))
    run(tree(tmp_path, shards, LFQ, train__precision="fp16", train__steps=40), str(tmp_path / "cache"))
    last = metrics(tmp_path)[-1]
    assert last["fp16/scale"] == 2.0 ** (40 - last["fp16/skipped_steps"])
    assert 10 < last["fp16/skipped_steps"] < 30


def test_a_run_resumes_on_a_gpu_after_a_cpu_and_back(tmp_path, shards, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    run(tree(tmp_path / "whole", shards, BUSY_VQ), str(tmp_path / "cache"))
    for device, stop in ((DEVICE, 4), ("cpu", 8), (DEVICE, STEPS)):
        train(load_task_config(tree(tmp_path / "parts", shards, BUSY_VQ, device)), callbacks=[StopAfter(stop)])
    require_same(tmp_path / "parts", tmp_path / "whole", 1e-9)


def test_a_step_waits_for_the_gpu_at_most_once(tmp_path, shards):
    """Of the steps whose metrics are not reported, as PyTorch itself counts."""
    counts, time_waits = [], Clock.time_waits

    def counted(clock, batches):
        for batch in time_waits(clock, batches):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                yield batch
            counts.append(sum("synchroniz" in str(each.message) for each in found))

    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with mock.patch.object(Clock, "time_waits", counted):
            settings = {"train__steps": 24, "train__report_every": 24, "train__precision": "bf16"}
            run(tree(tmp_path, shards, BUSY_RESIDUAL, **settings), str(tmp_path / "cache"))
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert len(counts) == 24
    assert max(counts[14:-1]) <= 1, counts  # the steps before initialise the codebooks of one stage after the other


def test_ids_of_a_gpu_are_those_of_a_cpu(tmp_path, shards, monkeypatch):
    """But for ids near a border, of which one in 1,000 may differ here."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    run(tree(tmp_path, shards), str(tmp_path / "cache"))
    images = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", DEVICE):
        tokenizer = load_tokenizer(tmp_path / "tiny" / "tokenizer", modality="image").to(device)
        found.append(tokenizer.encode(images.to(device)).cpu())
        decoded = tokenizer.decode(found[0].to(device)).cpu()
        torch.testing.assert_close(decoded, load_tokenizer(tmp_path / "tiny" / "tokenizer", "image").decode(found[0]))
    assert (found[0] == found[1]).double().mean() >= 0.999


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [1, *WORLDS])
def test_processes_of_torchrun_train_the_same_model_as_one_without(tmp_path, shards, count, parallel):
    run(tree(tmp_path / "one", shards, BUSY_RESIDUAL), str(tmp_path / "cache"))
    settings = tree(tmp_path / "more", shards, BUSY_RESIDUAL, train__parallel=parallel)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "vqclip.train", "--config", str(tmp_path / "config.json")]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"VQCLIP_CACHE": str(tmp_path / "cache")})
    require_same(tmp_path / "more", tmp_path / "one", 1e-9)


@pytest.mark.parametrize("count", [1, *WORLDS])
def test_the_benchmark_runs(count):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["benchmarks/gpu.py", "--tiny", "--rounds", "1", "--steps", "2"]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    assert "| vqclip, fsq |" in done.stdout
    assert "Least time of all" in done.stdout
