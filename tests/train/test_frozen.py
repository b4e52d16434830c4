"""Training steps of models whose towers are frozen, with the towers' features and without."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from tests.models import BUSY_RESIDUAL, FSQ, tiny_model
from tests.train.test_grad_cache import G, batch_number
from tests.training import contrastive_step
from vqclip.data import Batch
from vqclip.model import ModelConfig
from vqclip.train.tasks.contrastive import towers_draw

BOTH = ("image", "text")


def frozen_step(
    modalities=BOTH, quantizer=FSQ, precision="fp32", drop_path=0.0, micro_batches=1, compiled=False, reduce=None
):
    """A model with frozen towers, and its step."""
    torch.manual_seed(0)
    tree = tiny_model(quantizer, quantizer).model_dump(mode="json")
    tree["image"]["tower"]["args"] |= {"drop_path_rate": drop_path}
    for name in modalities:
        tree[name]["tower"]["train"] = "none"
        tree[name]["reduce"] = reduce
    model = ModelConfig.model_validate(tree).build().to(torch.float64 if precision == "fp64" else torch.float32)
    return model, contrastive_step(model, precision=precision, micro_batches=micro_batches, compile=compiled)


def with_features(batch: Batch, model, modalities) -> Batch:
    """The batch as it comes from the feature cache."""
    features = {}
    if "image" in modalities:
        features["image"] = model.image.tower_features(batch.images)
    if "text" in modalities:
        features["text"] = model.text.tower_features(batch.texts)
    images = batch.images[:, :, :0, :0] if "image" in modalities else batch.images
    return dataclasses.replace(batch, images=images, features=features)


def train(modalities, cached, sizes=(G,), count=3, **changes):
    """State of the model after some steps, and all losses."""
    model, step = frozen_step(modalities, **changes)
    losses = []
    for number in range(count):
        batch = batch_number(number, model, sizes)
        batch = with_features(batch, model, cached) if cached else batch
        losses.append(step(batch, number).terms["total"])
    return {name: value.clone() for name, value in model.state_dict().items()}, torch.stack(losses)


def assert_equal(one, other):
    assert torch.equal(one[1], other[1])
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("modalities", [BOTH, ("image",), ("text",)], ids="+".join)
def test_given_and_computed_features_train_the_same_bits(modalities, micro_batches):
    changes = {"micro_batches": micro_batches, "quantizer": BUSY_RESIDUAL}
    computed = train(modalities, (), **changes)
    assert_equal(train(modalities, modalities, **changes), computed)
    model, _ = frozen_step(modalities, **changes)
    before = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], computed[0][name])}
    assert not any(name.startswith(tuple(f"{m}.tower" for m in modalities)) for name in moved)
    assert {"image.project_in.1.weight", "text.project_in.1.weight"} <= moved


@pytest.mark.parametrize("kind", ["mean", "queries"])
def test_a_reduction_without_weights_is_a_part_of_the_features(kind):
    changes = {"reduce": {"kind": kind}, "quantizer": BUSY_RESIDUAL}
    computed = train(BOTH, (), **changes)
    assert_equal(train(BOTH, BOTH, **changes), computed)
    model, _ = frozen_step(**changes)
    batch = batch_number(0, model)
    for tokenizer, inputs in ((model.image, batch.images), (model.text, batch.texts)):
        features = tokenizer.tower_features(inputs)
        whole = tokenizer.tower(inputs)
        assert features.shape[1] == (1 if kind == "mean" else whole.shape[1])
        reduced = tokenizer.reduce(whole, tokenizer.mask(inputs))
        if kind == "mean":
            torch.testing.assert_close(features, reduced)
        given, computed = (tokenizer.features(inputs, each)[0] for each in (features, None))
        torch.testing.assert_close(given, computed)
        parts = torch.cat([tokenizer.tower_features(part) for part in inputs.split([1, len(inputs) - 1])])
        assert torch.equal(parts, features)


@pytest.mark.slow
@pytest.mark.parametrize("modalities", [BOTH, ("image",)], ids="+".join)
def test_compiled_steps_take_features(modalities):
    computed = train(modalities, (), compiled=True)
    assert_equal(train(modalities, modalities, compiled=True), computed)
    assert torch.allclose(computed[1], train(modalities, ())[1], rtol=1e-4)


def test_a_frozen_tower_runs_once_for_all_microbatches_and_draws_nothing():
    model, step = frozen_step(micro_batches=3, drop_path=0.5)
    assert not towers_draw(model)
    with mock.patch.object(model.image.tower, "forward", wraps=model.image.tower.forward) as forward:
        step(batch_number(0, model), 0)
    assert forward.call_count == 1
    assert towers_draw(frozen_step(modalities=("text",), drop_path=0.5)[0])
