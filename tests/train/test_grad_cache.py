"""Micro-batches give the gradient, the codes and the metrics of the whole batch (`vqclip.train.grad_cache`)."""

import dataclasses
import functools
import itertools
import operator
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.losses.test_tiled import tile_bytes
from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, PRODUCT, tiny_model
from tests.quantizers.test_distributed import collectives
from tests.ranks import RankError
from tests.test_world_size import ENTROPY_LFQ
from tests.training import contrastive_step
from vqclip import dist
from vqclip.data import Batch
from vqclip.dist._torch_versions import REDUCE_SCATTER
from vqclip.errors import ReplayError
from vqclip.losses import ContrastiveConfig, SigmoidConfig, tiled
from vqclip.train.step import TrainStep
from vqclip.train.tasks.base import TaskOutput

G = 12
LEARNED_VQ = {"kind": "vq", "dim": 6, "codebook_size": 16, "learning": "gradient"}
QUANTIZERS = {
    "fsq": FSQ,
    "product of fsq": PRODUCT,
    "lfq with entropy loss": ENTROPY_LFQ,
    "vq, learned": LEARNED_VQ,
    "vq": BUSY_VQ,
    "residual of vq with dropout": BUSY_RESIDUAL,
}
BIASED = {"temperature": {"init": 10.0, "bias": -10.0}}
LOSSES = {"contrastive": (ContrastiveConfig, {}), "sigmoid": (SigmoidConfig, BIASED)}


def model_and_step(quantizer, loss="contrastive", precision="fp64", micro_batches=1, drop_path=0, impl="tiled", **more):
    torch.manual_seed(0)
    config, changes = LOSSES[loss]
    project_in = {"kind": "mlp", "hidden": 32, "dropout": 0.2}
    changes = changes | {"image__project_in": project_in, "text__project_in": project_in}
    changes |= {"image__tower__args__drop_path_rate": drop_path, "image__tower__patch_dropout": 0.25}
    model = tiny_model(quantizer, quantizer, **changes).build()
    model = model.to(torch.float64 if precision == "fp64" else torch.float32)
    loss = config(impl=impl).build()
    return model, contrastive_step(model, loss, precision=precision, micro_batches=micro_batches, **more)


def batch_number(number, model, sizes=(G,)):
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (G, 3, 16, 16), dtype=torch.uint8, generator=generator)
    words = ["red", "blue", "small", "large", "round", "old"] * 2
    texts = model.text.preprocess([f"a {word} {number}" for word in words])
    own = torch.arange(G).split(list(sizes))[dist.rank()]
    labels = torch.full((len(own),), -1)
    return Batch(number, 0, images[own], texts[own], own, labels, own, G)


def steps(quantizer, sizes=(G,), micro_batches=1, count=3, **changes):
    model, step = model_and_step(quantizer, micro_batches=micro_batches, **changes)
    for number in range(count):
        result = step(batch_number(number, model, sizes), number)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return gradients, {name: value.clone() for name, value in model.state_dict().items()}, result.terms


def assert_alike(found, expected, tolerance, floor=1e-3):
    """By norm, relative to each tensor's, or to that of all together times ``floor`` where that is larger."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        everything = sum(float(value.double().square().sum()) for value in theirs.values()) ** 0.5
        for name in theirs:
            a, b = mine[name].double(), theirs[name].double()
            assert (a - b).norm() <= tolerance * max(float(b.norm()), floor * everything), name


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, "contrastive") for name in QUANTIZERS), ("fsq", "sigmoid"), ("vq, learned", "sigmoid")]
)
def test_equals_the_whole_batch(name, loss):
    expected = steps(QUANTIZERS[name], loss=loss, count=2)
    assert_alike(steps(QUANTIZERS[name], loss=loss, count=2, micro_batches=4), expected, 1e-10)


@pytest.mark.parametrize(
    ("name", "sizes", "micro_batches"),
    [
        ("lfq with entropy loss", (7, 5), 4),
        pytest.param("vq, learned", (7, 5), 3, marks=pytest.mark.slow),
        pytest.param("residual of vq with dropout", (3, 3, 3, 3), 3, marks=pytest.mark.slow),
        ("residual of vq with dropout", (6, 0, 6), 2),
    ],
)
def test_equals_one_process_under_ddp(ranks, name, sizes, micro_batches):
    expected = steps(QUANTIZERS[name])
    for found in ranks(len(sizes), steps, QUANTIZERS[name], sizes, micro_batches):
        assert_alike(found, expected, 1e-9)


@pytest.mark.parametrize("name", ["lfq with entropy loss", "residual of vq with dropout"])
def test_in_bf16(name):
    """Of one step: after several, rounding has flipped a code somewhere. Measured: 2.1e-3 at most."""
    gradients, *_ = steps(QUANTIZERS[name], precision="bf16", count=1)
    found, *_ = steps(QUANTIZERS[name], precision="bf16", count=1, micro_batches=4)
    assert_alike([found], [gradients], 5e-3, floor=1.0)


def at_once(step, microbatches, number):
    """All micro-batches with all their graphs, and one backward: what the two passes stand for."""
    parts = [step._run_model(part, number, k) for k, part in enumerate(microbatches)]
    rows = {side: torch.cat([part.rows[side] for part in parts]) for side in ("image", "text")}
    stats = {side: functools.reduce(operator.add, [part.stats[side] for part in parts]) for side in parts[0].stats}
    return TaskOutput(rows, stats, step.task.shared())


def test_draws_of_the_towers_are_repeated(monkeypatch):
    """Stochastic depth draws by micro-batch, in both passes the same."""
    changes = {"micro_batches": 4, "drop_path": 0.5}
    found = steps(BUSY_RESIDUAL, **changes)
    monkeypatch.setattr(TrainStep, "_forward", at_once)
    monkeypatch.setattr(TrainStep, "_second_pass", lambda *args: None)
    expected = steps(BUSY_RESIDUAL, **changes)
    assert_alike(found, expected, 1e-10)
    without = steps(BUSY_RESIDUAL, micro_batches=4)
    assert (without[0]["logit_scale"] - expected[0]["logit_scale"]).abs() > 1e-6


class Restless(nn.Module):
    """Draws from a generator that is not torch's."""

    def __init__(self, module, how):
        super().__init__()
        self.module, self.how, self.generator = module, how, np.random.default_rng(0)

    def forward(self, x):
        return RESTLESS[self.how](self.module(x), self.generator)


RESTLESS = {
    "scaled": lambda x, generator: x * (1 + generator.random()),
    "dropout": lambda x, generator: x * torch.from_numpy(generator.random(tuple(x.shape)) > 0.1) / 0.9,
    "another with gradients": lambda x, generator: x * (1.5 if torch.is_grad_enabled() else 1.0),
    "no number with gradients": lambda x, generator: x * (float("nan") if torch.is_grad_enabled() else 1.0),
    "shuffled": lambda x, generator: x[torch.from_numpy(generator.permutation(len(x)))],
}


@pytest.mark.parametrize(
    ("precision", "how"), [*(("fp32", how) for how in RESTLESS), *(("bf16", how) for how in ("scaled", "dropout"))]
)
def test_what_does_not_repeat_itself_is_named(precision, how):
    model, step = model_and_step(FSQ, precision=precision, micro_batches=2)
    blocks = model.image.tower.backbone.model.blocks
    blocks[1].mlp = Restless(blocks[1].mlp, how)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(ReplayError, match=r"train\.micro_batches.*model\.image\.tower\..*\.blocks\.1\.mlp\."):
        step(batch_number(0, model), 0)
    assert all(value.equal(before[name]) for name, value in model.named_parameters())


def restless_on_one_rank():
    model, step = model_and_step(FSQ, micro_batches=2)
    if dist.rank() == 1:
        blocks = model.image.tower.backbone.model.blocks
        blocks[1].mlp = Restless(blocks[1].mlp, "scaled")
    step(batch_number(0, model, (6, 6)), 0)


def test_every_rank_stops_when_one_does_not_repeat(ranks):
    with pytest.raises(RankError) as failure:
        ranks(2, restless_on_one_rank, timeout=30.0)
    assert str(failure.value).count("ReplayError: train.micro_batches") == 2
    named = r"On rank 1: embeddings moved by .*, the first module with other outputs: model\.image\..*blocks\.1\.mlp"
    assert len(re.findall(named, str(failure.value))) == 2


def test_embeddings_of_both_passes_are_compared():
    """Also where no module is to be caught: what is kept of the first pass is not what the second gives."""
    model, step = model_and_step(FSQ, micro_batches=2)
    kept = step._forward

    def others(parts, number):
        out = kept(parts, number)
        turned = out.rows["image"].detach().roll(1, dims=1).requires_grad_()
        return dataclasses.replace(out, rows={**out.rows, "image": turned})

    step._forward = others
    with pytest.raises(ReplayError, match="On rank 0: embeddings moved by .*, the first module with .*: none"):
        step(batch_number(0, model), 0)


@pytest.mark.parametrize("frozen", ["logit_scale", "image.", "text.", "image.tower."])
def test_parts_of_the_model_may_be_frozen(frozen):
    results = []
    for micro_batches in (1, 3):
        model, step = model_and_step(ENTROPY_LFQ, micro_batches=micro_batches)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        step(batch_number(0, model), 0)
        results.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_alike(results[1:], results[:1], 1e-10)


QUICK = {("contrastive", "ring", (5, 3, 4), 2), ("contrastive", "gather", (7, 5), 4)}
QUICK |= {("sigmoid", "tiled", (7, 5), 4), ("sigmoid", "gather", (5, 3, 4), 2)}
SIZES = [(6, 6), (7, 5), (12, 0), (5, 3, 4), (7, 0, 5), (3, 3, 3, 3), (5, 1, 4, 2)]


@functools.cache
def one_process(loss):
    return steps(PRODUCT, loss=loss, impl="gather")


@pytest.mark.parametrize(
    ("loss", "impl", "sizes", "micro_batches"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(LOSSES, ["tiled", "ring", "gather"], SIZES, [1, 2, 4])
    ],
)
def test_every_loss_on_any_ranks_in_any_parts(ranks, loss, impl, sizes, micro_batches):
    expected = one_process(loss)
    job = functools.partial(steps, loss=loss, impl=impl)
    for found in ranks(len(sizes), job, PRODUCT, sizes, micro_batches):
        assert_alike(found, expected, 1e-9)


def collectives_of_a_step(micro_batches):
    model, step = model_and_step(BUSY_RESIDUAL, loss="sigmoid", micro_batches=micro_batches)
    step(batch_number(0, model, (6, 6)), 0)
    backward, calls_in_backward = torch.Tensor.backward, []

    def watched(tensor, *args, **kwargs):
        with collectives() as calls:
            backward(tensor, *args, **kwargs)
        calls_in_backward.extend(calls)

    with mock.patch.object(torch.Tensor, "backward", watched), collectives() as calls:
        step(batch_number(1, model, (6, 6)), 1)
    return calls, calls_in_backward


def test_collectives_run_once_a_step_and_none_in_backward_but_ddps_own(ranks):
    once, three_times = (ranks(2, collectives_of_a_step, micro_batches) for micro_batches in (1, 3))
    assert once == three_times
    for calls, in_backward in once:
        assert REDUCE_SCATTER in calls
        assert in_backward == []


class Squares(TorchDispatchMode):
    """Shapes of tensors with two dimensions of at least a size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.found += [shape for shape in shapes if sum(length >= self.size for length in shape) > 1]
        return out


@pytest.mark.parametrize(("impl", "squares"), [("tiled", False), ("ring", False), ("gather", True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_holds_no_square_of_logits(monkeypatch, loss, impl, squares):
    """Tensors of 97 × 97 and more; nothing else in the model has two dimensions of that size."""
    count, seen = 97, Squares(97)
    for name in ("_softmax", "_sigmoid"):  # no mode looks into an operator from outside
        inside = getattr(tiled, name)
        monkeypatch.setattr(tiled, name, lambda *args, _inside=inside: _within(seen, _inside, args))
    model, step = model_and_step(FSQ, loss=loss, precision="fp32", impl=impl)
    some = batch_number(0, model)
    rows = torch.arange(count) % G
    own = torch.arange(count)
    batch = Batch(0, 0, some.images[rows], some.texts[rows], own, own * 0 - 1, own, count)
    with tile_bytes(4 * 97 * 20, 0), seen:
        step(batch, 0)
    assert bool(seen.found) == squares


def _within(mode, function, args):
    with mode:
        return function(*args)
