"""A training step works on the columns that hold a caption's tokens; the others change nothing (ADR 13)."""

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, PRODUCT, tiny_model
from tests.ranks import for_each
from tests.test_world_size import ENTROPY_LFQ
from tests.training import contrastive_step, largest_difference
from vqclip import dist
from vqclip.data import Batch
from vqclip.losses import ContrastiveConfig
from vqclip.tokenizer import TextTokenizer
from vqclip.towers.text import TransformerTowerConfig

LENGTH = 24
SHORT = ["a red star", "x", "a red star", "a b c"]
LONG = ["one two three four five six seven eight", "a", "a red star", "a b c d e f g h i j k l m n o p q r s t u v"]


CASES = [(FSQ, True), (FSQ, False), (ENTROPY_LFQ, True), (BUSY_VQ, True), (BUSY_RESIDUAL, False)]


def built(quantizer=FSQ, causal=True, dtype=torch.float64, length=LENGTH):
    torch.manual_seed(0)
    changes = {"text__tower__context_length": length, "text__tower__causal": causal}
    return tiny_model(quantizer, quantizer, **changes).build().to(dtype)


def after_steps(sizes, quantizer, causal, all_columns=False, micro_batches=1):
    """Losses, the model's state, and how many columns the text tower of this rank saw in each step."""
    model = built(quantizer, causal)
    loss = ContrastiveConfig(positives="caption").build()
    step = contrastive_step(model, loss, precision="fp64", micro_batches=micro_batches)
    seen, losses = [], []
    model.text.tower.register_forward_pre_hook(lambda tower, inputs: seen.append(inputs[0].shape[1]))
    own = torch.arange(8).split(list(sizes))[dist.rank()]
    needed = mock.patch.object(TextTokenizer, "needed_tokens", return_value=LENGTH)
    with needed if all_columns else nullcontext():
        for number in range(3):
            images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.manual_seed(number))
            texts = model.text.preprocess(SHORT + LONG)
            labels = torch.full((len(own),), -1)
            result = step(Batch(number, 0, images[own], texts[own], own, labels, own, 8), number)
            losses.append(float(result.terms["total"]))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}, seen


def test_steps_are_those_with_all_columns(ranks):
    """Also where one rank has short captions and the other long ones: gradients, updates of codes, keys of captions.

    Micro-batches share one length, though the first half is short: tokens are drawn by sample.
    """
    whole = [after_steps((8,), *case, True) for case in CASES]
    for sizes, micro_batches, columns in (((8,), 1, [24]), ((8,), 2, [24]), ((4, 4), 1, [8, 24])):
        jobs = [(sizes, *case, False, micro_batches) for case in CASES]
        for found, expected in zip(ranks(len(sizes), for_each, after_steps, jobs), columns, strict=True):
            for (losses, state, seen), (all_losses, all_state, _) in zip(found, whole, strict=True):
                assert set(seen) == {expected}
                assert losses == pytest.approx(all_losses, rel=1e-11)
                assert largest_difference(state, all_state) < 1e-8  # Adam divides gradients near 0 by their size


def test_columns_needed():
    text = built().text
    for captions, expected in ((["x"], 8), (["a b c d e f"], 8), (["a b c d e f g"], 16), (LONG, 24), ([], 8)):
        assert text.needed_tokens(text.preprocess(captions)) == expected
    text = built(length=12).text  # no multiple of 8
    assert text.needed_tokens(text.preprocess(LONG)) == 12
    assert text.needed_tokens(torch.zeros(2, 12, dtype=torch.int64)) == 8


@pytest.mark.parametrize("columns", [8, 16, 24])
def test_stored_ids_give_the_training_embedding_of_the_same_columns_bit_for_bit(columns):
    text = built(PRODUCT, dtype=torch.float32).text
    tokens = text.preprocess(SHORT)[:, :columns]
    out = text(tokens)
    assert torch.equal(text.encode(tokens), out.ids)
    assert torch.equal(text.embed(out.ids), out.embedding)


def without_mask(build):
    def both(config):
        tower = build(config)
        tower.transformer.register_buffer("attn_mask", None)
        tower.transformer.use_pad_mask = False
        tower.sees_padding = True
        return tower

    return both


def test_a_tower_that_sees_padding_keeps_it(monkeypatch):
    monkeypatch.setattr(TransformerTowerConfig, "build", without_mask(TransformerTowerConfig.build))
    text = built().text
    tokens = text.preprocess(SHORT)
    assert text.tower.sees_padding
    assert text.needed_tokens(tokens) == LENGTH
    assert text(tokens).ids.shape == (4, LENGTH, 1)
    for use, inputs in ((text, tokens[:, :8]), (text.embed, text.encode(tokens)[:, :8])):
        with pytest.raises(Exception, match=rf"got shape .*expected \(B, {LENGTH}"):
            use(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_of_any_length_compile_to_few_graphs(monkeypatch, micro_batches):
    """One for any length and one for all positions, twice with micro-batches: with gradients and without."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = built(dtype=torch.float32)
    step = contrastive_step(model, compile=True, micro_batches=micro_batches)
    own, graphs = torch.arange(4), []
    for number, captions in enumerate(([SHORT[1]] * 4, LONG[:1] * 4, LONG, SHORT, LONG[:1] * 4)):
        texts = model.text.preprocess(captions)
        step(Batch(number, 0, torch.zeros(4, 3, 16, 16, dtype=torch.uint8), texts, own, own, own, 4), number)
        graphs.append(counters["stats"]["unique_graphs"] // micro_batches)
    assert graphs == [1, 1, 2, 2, 2]
