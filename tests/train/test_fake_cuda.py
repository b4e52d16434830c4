"""Whole training steps on fake CUDA tensors: without a GPU, no tensor is left on the CPU, and no step waits."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.fake_cuda import GPU, fake_cuda
from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, LFQ, tiny_model
from tests.train.test_grad_cache import LEARNED_VQ, batch_number
from tests.train.test_pixels import DETAIL, pixel_tree
from tests.train.test_reconstruction import DECODER, LOSSES
from tests.training import run_tree
from vqclip.dist._torch_versions import TORCH_VERSION
from vqclip.quantizers import VQ
from vqclip.train import step as train_step
from vqclip.train.callbacks.builtin import _read_metrics
from vqclip.train.guards import Guards
from vqclip.train.main import build_step, build_task
from vqclip.train.speed import SpeedMeter
from vqclip.train.tasks import pixels
from vqclip.train.tasks.kinds import load_task_config

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu run on a real GPU"),
    pytest.mark.skipif(TORCH_VERSION < (2, 11), reason="older versions ask the driver about fake tensors, too"),
]

PIXELS = {"decoder": DECODER, "losses": LOSSES}
"""With discriminators from step 1 on."""
TWO_STAGES = BUSY_RESIDUAL | {"depth": 2}
PIXELS_IN_BF16 = {"model__image__pixels": PIXELS, "train__precision": "bf16"}
CASES = {"VQ and residual, a pixel decoder, bf16": (BUSY_VQ, TWO_STAGES, PIXELS_IN_BF16)}
SCALED = {"model__temperature": {"init": 10.0, "bias": -10.0}}
SLOW = {
    f"{names}, {micro_batches} microbatches, {precision}": (
        *quantizers,
        {"train__precision": precision, "train__micro_batches": micro_batches, "steps": steps},
    )
    for names, quantizers in (
        ("FSQ and LFQ", (FSQ, LFQ)),
        ("VQ and residual", (BUSY_VQ, TWO_STAGES)),
        ("learned VQ", (LEARNED_VQ, LEARNED_VQ)),
    )
    for micro_batches, precision, steps in ((1, "fp32", 3), (1, "fp16", 6), (3, "bf16", 3))  # fp16 skips some
} | {
    "FSQ and LFQ, microbatches": (FSQ, LFQ, {"train__micro_batches": 3, "steps": 1}),
    "pixel decoder, microbatches": (FSQ, FSQ, {"model__image__pixels": PIXELS, "train__micro_batches": 3}),
    "recomputed activations": (FSQ, FSQ, {"train__activation_checkpointing": True}),
    "sigmoid loss": (FSQ, FSQ, {"loss": {"kind": "sigmoid"}, **SCALED}),
}


def make_config(image, text, steps=3, **changes):
    settings = {"train__steps": steps, "train__precision": "fp32", "train__ema": {"decay": 0.9}}
    settings |= {"optim__warmup_steps": 0, "model__image__tower__args__depth": 1, "model__text__quantizer": text}
    return load_task_config(run_tree("runs", "shards", image, **settings | changes))


def train(config, device, gpu=None):
    """Train on a device as `vqclip.train.run` does, and return the metrics of every step."""
    step = build_step(config, build_task(config, device))
    batches = [batch_number(number, step.task.model) for number in range(config.train.steps)]
    SpeedMeter(None).count(step, batches[0])
    found = []
    for batch in batches:
        is_settled = batch.step > 0 and all(each.started for each in step.task.quantizers().values())
        before = 0 if gpu is None else gpu.reads
        result = step(batch, batch.step)
        assert gpu is None or not is_settled or gpu.reads == before, "the step waited for the GPU"
        training = SimpleNamespace(step=step, result=result, config=config, done=batch.step + 1)
        found.append(_read_metrics(training)[0])
        resume_guards(step.guards)
    step.guards.settle()
    assert all(each.started for each in step.task.quantizers().values())
    return found


def resume_guards(guards):
    """Restore the state of guards from a checkpoint, which is read to the CPU."""
    tensors = {name: each.to("cpu", non_blocking=True) for name, each in guards.tensors().items()}
    guards.load_state_dict(guards.state_dict(), tensors)


@pytest.mark.parametrize("case", [*CASES, *[pytest.param(case, marks=pytest.mark.slow) for case in SLOW]])
def test_steps_run_on_a_gpu(case):
    image, text, changes = (CASES | SLOW)[case]
    config = make_config(image, text, **changes)
    expected = train(config, torch.device("cpu"))
    with fake_cuda() as gpu:
        found = train(config, GPU, gpu)
    tolerance = 1e-4 if config.train.precision == "fp32" else 0.2  # autocast leaves other operators out on a CPU
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        assert line["loss/total"] == pytest.approx(other["loss/total"], rel=tolerance)


@pytest.mark.slow
def test_a_decoder_of_a_frozen_tokenizer_trains_on_a_gpu(tmp_path, monkeypatch):
    model = tiny_model(FSQ, FSQ).build().eval()
    model.save_pretrained(tmp_path)
    settings = {"train__steps": 3, "train__precision": "bf16", "optim__warmup_steps": 0, "detail": DETAIL}
    config = load_task_config(pixel_tree("runs", "shards", tmp_path, **settings))
    # Files are read into memory, which fake tensors do not have.
    whole = pixels._load_frozen(str(tmp_path))
    monkeypatch.setattr(pixels, "_load_frozen", lambda _: whole)
    monkeypatch.setattr(pixels, "fingerprint", lambda _: "")
    with fake_cuda():
        step = build_step(config, build_task(config, GPU))
        for number in range(3):
            step(batch_number(number, model), number)
        step.guards.settle()
        for modality, inputs in (("image", batch_number(0, model).images), ("text", ["red", "a blue star"])):
            tokenizer = getattr(step.task.whole, modality)
            ids = tokenizer.encode(inputs)
            assert {each.device for each in (ids, tokenizer.decode(ids), tokenizer.embed(ids))} == {GPU}
        assert step.task.image.decode_pixels(step.task.image.encode_pixels(batch_number(0, model).images)).device == GPU


def to_host(tensor):
    return tensor.to("cpu", non_blocking=True)


PLANTED = {
    "step": (train_step, "clip_gradients", lambda clip: lambda *args: to_host(clip(*args))),
    "quantizer": (VQ, "_replace_dead", lambda replace: lambda self, *drawn: replace(self, *map(to_host, drawn))),
    "guards": (Guards, "judge_numbers", lambda judge: lambda self, numbers: judge(self, to_host(numbers))),
}


def test_a_tensor_left_on_the_cpu_is_found():
    refused = pytest.raises(RuntimeError, match="expected one device|the host waits")
    with fake_cuda():
        config = make_config(BUSY_VQ, FSQ)
        step = build_step(config, build_task(config, GPU))
        for number, (owner, name, plant) in enumerate(PLANTED.values()):
            with mock.patch.object(owner, name, plant(getattr(owner, name))), refused:
                step(batch_number(number, step.task.model), number)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tests_for_gpus_run_on_a_cpu():
    """So that a name that is gone is noticed; compiling takes minutes on a CPU, and the benchmark needs a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(
        [*command, "-k", "not compiled and not benchmark"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"VQCLIP_TEST_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-4000:]
