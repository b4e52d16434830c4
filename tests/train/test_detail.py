"""Detail codebooks in a run that trains a pixel decoder (`task: pixels`)."""

from __future__ import annotations

import pytest
import torch

from tests.models import BUSY_RESIDUAL, FSQ, tiny_model
from tests.pixels.test_decoder import CONFIGS
from tests.test_world_size import ENTROPY_LFQ
from tests.train.test_grad_cache import G, assert_alike, batch_number
from vqclip.pixels import DetailConfig, PixelsConfig, attach
from vqclip.pixels.losses import PixelLosses
from vqclip.pixels.losses.distances import L1Config
from vqclip.train.optim import OptimConfig
from vqclip.train.step import ComputeConfig, TrainStep
from vqclip.train.tasks.pixels import PixelTask

QUANTIZERS = {"fsq": FSQ, "residual of vq with dropout": BUSY_RESIDUAL, "lfq with entropy loss": ENTROPY_LFQ}


def train(quantizer, sizes=(G,), micro_batches=1, count=3):
    """Gradients of the last step, the state of decoder and detail after it, and its terms."""
    torch.manual_seed(0)
    whole = tiny_model(FSQ).build().eval().requires_grad_(False).double()
    detail = DetailConfig(quantizer=QUANTIZERS[quantizer], stages=2, channels=4, max_channels=8, channels_per_group=2)
    config = PixelsConfig(decoder=CONFIGS["convolutional"], image_size=16, detail=detail)
    decoder = config.build(whole.image.quantizer.dim, whole.image.num_tokens).double()
    attach(whole.image, decoder)
    task = PixelTask(whole, decoder, PixelLosses.build((L1Config(),), 16, seed=3).double())
    compute, optim = ComputeConfig(precision="fp64", micro_batches=micro_batches), OptimConfig(lr=1e-3, warmup_steps=0)
    step = TrainStep(task, optim.build(task.model), optim.schedule(10), compute, None, seed=3)
    for number in range(count):
        result = step(batch_number(number, whole, sizes), number)
    gradients = {name: weight.grad.clone() for name, weight in task.model.named_parameters() if weight.requires_grad}
    return gradients, {name: each.clone() for name, each in task.model.state_dict().items()}, result.terms


@pytest.fixture(scope="module")
def alone():
    return {name: train(name) for name in QUANTIZERS}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_codebooks_train(alone, name):
    gradients, state, terms = alone[name]
    assert all(gradient.any() for key, gradient in gradients.items() if ".detail.branch." in key)
    if name == "residual of vq with dropout":
        before = train(name, count=1)[1]
        assert all(not state[key].equal(before[key]) for key in state if key.endswith("layers.0.codebook"))
    assert ("detail/token_entropy" in terms) == (name == "lfq with entropy loss")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_microbatches_train_what_the_whole_batch_trains(alone, name):
    assert_alike(train(name, micro_batches=3), alone[name], 1e-9)


@pytest.mark.parametrize(
    ("name", "sizes", "micro_batches"),
    [
        ("residual of vq with dropout", (7, 0, 5), 2),
        pytest.param("fsq", (4, 4, 4), 1, marks=pytest.mark.slow),
        pytest.param("lfq with entropy loss", (7, 5), 1, marks=pytest.mark.slow),
    ],
)
def test_processes_train_what_one_trains(ranks, alone, name, sizes, micro_batches):
    for found in ranks(len(sizes), train, name, sizes, micro_batches):
        assert_alike(found, alone[name], 1e-9)
