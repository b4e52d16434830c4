"""A pixel decoder that trains together with the tokenizers (`model.image.pixels`)."""

import functools
import math
import shutil

import pytest
import torch
from torch import nn

from tests.models import BUSY_RESIDUAL, FSQ, change, tiny_model
from tests.train import test_pixels
from tests.train.test_grad_cache import G, assert_alike, batch_number
from tests.train.test_pixels import DECODER
from tests.training import all_equal, run, run_tree, weights
from vqclip import load_tokenizer
from vqclip.checkpoint import load as load_checkpoint
from vqclip.errors import ConfigError, OtherRunError
from vqclip.losses import ContrastiveConfig
from vqclip.pixels.losses import PixelLosses
from vqclip.tokenizer.stored import fingerprint
from vqclip.train import TrainConfig
from vqclip.train.optim import OptimConfig, Schedule
from vqclip.train.step import ComputeConfig, TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask

ADVERSARIAL = test_pixels.ADVERSARIAL | {"start_step": 1, "lr_ratio": 2.0}
LOSSES = [{"kind": "l1"}, {"kind": "l2", "weight": 0.5}, ADVERSARIAL]


def model_tree(quantizer=FSQ, **pixels):
    decoder = pixels.pop("decoder", DECODER)
    section = {"decoder": decoder, **pixels} if decoder else None
    return change(tiny_model(quantizer, FSQ).model_dump(mode="json"), {"image__pixels": section})


def build_step(micro_batches=1, precision="fp64", clip_norm=0.1, quantizer=FSQ, compiled=False, **pixels):
    torch.manual_seed(0)
    model = type(tiny_model()).model_validate(model_tree(quantizer, **pixels)).build()
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model, config, losses = model.to(dtype), model.config.image.pixels, None
    if config is not None:
        losses = PixelLosses(config.losses, 16, seed=3).to(dtype)
    task = ContrastiveTask(model, ContrastiveConfig().build(), pixels=losses)
    compute = ComputeConfig(precision=precision, micro_batches=micro_batches, compile=compiled)
    optim = OptimConfig(lr=1e-2, warmup_steps=0)
    optimizer = optim.build(task.model, task.discriminators)
    return task, TrainStep(task, optimizer, Schedule(optim, 10), compute, clip_norm, seed=3)


def train(count=3, sizes=(G,), **settings):
    """Gradients of the last step, all weights after it, and its terms."""
    task, step = build_step(**settings)
    result = None
    for number in range(count):
        result = step(batch_number(number, task.model, sizes), number)
    modules = {"model": task.model} | ({"losses": task.discriminators} if task.discriminators else {})
    both = nn.ModuleDict(modules)
    gradients = {name: weight.grad.clone() for name, weight in both.named_parameters() if weight.grad is not None}
    state = {name: each.clone() for name, each in both.state_dict().items()}
    return gradients, state, result and result.terms


def of_tokenizers(state):
    return {name: each for name, each in state.items() if name.startswith("model.") and ".pixels." not in name}


def test_equals_a_plain_reference():
    """Gradients beside a few lines of torch, where the tower gets a part of the gradient and the decoder all of it."""
    task, step = build_step(clip_norm=None, losses=LOSSES[:2], weight=0.25)
    reference, _ = build_step(clip_norm=None, losses=LOSSES[:2], weight=0.25)
    model = reference.model
    batch = batch_number(0, model)
    result = step(batch, 0)
    image, text = model.image(batch.images), model.text(batch.texts)
    apart = model.image.pixels_of(image.vectors) - batch.images.double() / 255
    l1, l2 = apart.abs().mean(), apart.square().mean()
    loss = ContrastiveConfig(impl="gather", positives=None).build()
    contrastive = loss(image.embedding, text.embedding, model.temperature()[0])
    assert float(result.terms["pixels/l1"]) == pytest.approx(l1.item(), rel=1e-12)
    assert float(result.terms["total"]) == pytest.approx((contrastive + l1 + 0.5 * l2).item(), rel=1e-12)
    (contrastive + 0.25 * (l1 + 0.5 * l2)).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    for weight in model.image.pixels.parameters():
        weight.grad *= 4
    assert_alike([{name: weight.grad for name, weight in task.model.named_parameters()}], [expected], 1e-10)


def test_metrics_are_those_of_the_decoded_images():
    """Of one image in 4 here, and none before the first step."""
    task, step = build_step(clip_norm=None, one_in=4, start_step=1)
    before = step(batch_number(0, task.model), 0)
    assert "pixels/mse" not in task.metrics(before.stats, 0)
    images = batch_number(1, task.model).images[3::4]
    made = task.model.image.decode_pixels(task.model.image.encode(images))
    found = task.metrics(step(batch_number(1, task.model), 1).stats, 1)
    real = images.double() / 255
    assert found["pixels/mse"] == pytest.approx((made.clamp(0, 1) - real).square().mean().item(), rel=1e-6)
    assert found["pixels/psnr"] == pytest.approx(-10 * math.log10(found["pixels/mse"]))
    assert found["pixels/variance"] == pytest.approx((real - real.mean(dim=(0, 2, 3), keepdim=True)).square().mean())


def test_before_its_first_step_or_of_weight_0_a_run_is_one_without_a_decoder():
    """Also with weights that are clipped; from the first step on the tower learns from the pixels."""
    settings = {"precision": "fp32", "losses": LOSSES, "start_step": 2}
    alone, with_pixels = ({"decoder": False, "precision": "fp32"}, settings)
    gradients, state, terms = train(2, **alone)
    found, also, other_terms = train(2, **with_pixels)
    assert all_equal(found, gradients)
    assert all_equal(of_tokenizers(also), state)
    assert all_equal(other_terms, terms)
    assert all_equal(also, train(0, **with_pixels)[1] | state)
    _, later, terms = train(3, **with_pixels)
    assert {"pixels/l1", "pixels/adversarial", "pixels/adversarial/discriminator"} <= terms.keys()
    without = train(3, **alone)[1]
    assert not all_equal(of_tokenizers(later), without)
    gradients, also, _ = train(3, precision="fp32", losses=LOSSES, weight=0.0)
    assert all_equal(of_tokenizers(also), without)
    assert any(float(each.abs().max()) > 0 for name, each in gradients.items() if ".pixels." in name)


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    """In the second step the first of them has no image to decode."""
    decoder = DECODER | {"stages": 2}
    settings = {"count": 2, "losses": LOSSES, "one_in": 5, "quantizer": BUSY_RESIDUAL, "decoder": decoder}
    assert_alike(train(micro_batches=3, **settings), train(**settings), 1e-9)


def train_on_rank(sizes, settings):
    return train(sizes=sizes, losses=LOSSES, **settings)


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((7, 0, 5), {"micro_batches": 2, "one_in": 6, "start_step": 1}),
        pytest.param((7, 5), {}, marks=pytest.mark.slow),
        pytest.param((4, 4, 4), {"micro_batches": 3, "quantizer": BUSY_RESIDUAL}, marks=pytest.mark.slow),
    ],
)
def test_processes_train_what_one_trains(ranks, sizes, settings):
    expected = train(losses=LOSSES, **settings)
    for found in ranks(len(sizes), train_on_rank, sizes, settings):
        assert_alike(found, expected, 1e-9)


def test_gradients_are_clipped_in_one_order_on_every_rank():
    """A norm that is summed in another order differs in its last bit, and the weights of the ranks with it."""
    task, _ = build_step(losses=LOSSES)
    for group, module in zip(task.clipped_apart()[1:], (task.model.image.pixels, task.discriminators), strict=True):
        assert [*map(id, group)] == [*map(id, module.parameters())]


@pytest.mark.slow
def test_a_compiled_step_computes_the_same_and_is_compiled_once(monkeypatch):
    """Each step has its own number, and with one_in its own rows."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    settings = {"losses": LOSSES, "precision": "fp32", "one_in": 3, "start_step": 1}
    found, graphs = [], []
    task, step = build_step(compiled=True, **settings)
    for number in range(7):
        found.append(step(batch_number(number, task.model), number).terms["total"])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[3]
    assert found[-1].isclose(train(7, **settings)[2]["total"], rtol=1e-5)


def tree_of(folder, shards, **changes):
    changes = {"train__steps": 4, "train__batch_size": 11, "model": model_tree(losses=LOSSES)} | changes
    return run_tree(folder, shards, FSQ, **changes)


def test_a_run_resumes_bit_for_bit_and_exports_the_decoder(tmp_path, shards):
    changes = {"train__checkpoint_every": 2, "train__precision": "fp32", "train__ema": {"decay": 0.9}}
    run(tree_of(tmp_path / "whole", shards, **changes))
    tree = tree_of(tmp_path / "parts", shards, **changes)
    run(tree)
    shutil.rmtree(tmp_path / "parts" / "tiny" / "checkpoints" / "step-00000004")
    with pytest.raises(OtherRunError, match=r"pixels.*weight"):
        run(tree | {"model": model_tree(losses=LOSSES, weight=2.0)})
    assert len(run(tree)["sample_ids"]) == 2
    checkpoints = [tmp_path / name / "tiny" / "checkpoints" / "step-00000004" for name in ("whole", "parts")]
    tensors = [load_checkpoint(each).tensors() for each in checkpoints]
    assert {name.split("/")[0] for name in tensors[0]} >= {"ema", "discriminators"}
    assert not any("adversar" in name for name in tensors[0] if name.startswith("ema/"))
    assert all_equal(*tensors)
    assert all_equal(weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4))
    for file in ("model.safetensors", "pixels.safetensors"):
        one, other = (tmp_path / name / "tiny" / "tokenizer" / file for name in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()

    tokenizer = load_tokenizer(tmp_path / "whole" / "tiny" / "tokenizer", "image")
    averages = {name.removeprefix("ema/image.pixels."): each for name, each in tensors[0].items() if ".pixels." in name}
    assert all_equal(dict(tokenizer.pixels.named_parameters()), averages)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    ids, found = tokenizer.encode(images), fingerprint(tokenizer)
    assert tokenizer.decode_pixels(ids).shape == images.shape
    tokenizer.pixels = None
    assert fingerprint(tokenizer) == found


def refused(**changes):
    tree = run_tree("runs", "shards", FSQ, **changes)
    with pytest.raises(ValueError, match=r"image\.pixels|pixels:") as caught:
        TrainConfig.model_validate(tree).model.build()
    return str(caught.value)


def test_settings_that_do_not_fit_are_refused(tmp_path, shards):
    tree = tree_of(tmp_path, shards, model=model_tree(losses=[{"kind": "l1", "start_step": 1}]))
    with pytest.raises(ConfigError, match=r"model\.image\.pixels\.losses: got no term"):
        run(tree)
    assert "pixels" not in tiny_model().build().section()["image"]
    assert "start_step: got 20; expected at most 19" in refused(model=model_tree(start_step=20))
    assert "one_in: got 13; expected at most 12" in refused(model=model_tree(one_in=13))
    assert "image.pixels.weigth" in refused(model=model_tree(weigth=1))
    tree = change(model_tree(), {"image__reduce": {"kind": "queries", "count": 3, "heads": 2}})
    assert "square grid of tokens" in refused(model=tree)
    tree = change(model_tree(), {"image__tower__train": "none", "image__tower__pretrained": True})
    assert "expected modalities: [text] there" in refused(model=tree, data__feature_cache={}, data__views=1)
