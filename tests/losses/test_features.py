"""Pairs that are no negatives of each other, and label smoothing."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from tests.losses.test_tiled import KINDS, assert_equals_one_process, pairs, tile_bytes, value_and_gradients
from tests.ranks import for_each
from vqclip import dist
from vqclip.errors import ConfigError, ShapeError
from vqclip.losses import ContrastiveConfig, ContrastiveLoss, pair_keys
from vqclip.losses.features import Implementation

IMPLEMENTATIONS = get_args(Implementation)
KEYS = torch.tensor([0, 1, 2, 1, 3, 0, 1, 4, 5, 6, 7])


def softmax_without(image, text, scale, keys):
    """Every row and column with its own pair and the pairs of other keys alone."""
    logits = scale * image @ text.T
    losses = []
    for scores in (logits, logits.T):
        for k, row in enumerate(scores):
            others = torch.cat([row[k, None], row[keys != keys[k]]])
            losses.append(others.logsumexp(0) - row[k])
    return torch.stack(losses).mean()


def sigmoid_without(image, text, scale, bias, keys):
    logits = scale * image @ text.T + bias
    asked = keys[:, None] != keys
    return (F.softplus(logits[asked]).sum() + F.softplus(-logits.diagonal()).sum()) / len(keys)


def on_a_rank(kind, impl, sizes, tile=None):
    if tile is not None:
        with tile_bytes(*tile):
            return on_a_rank(kind, impl, sizes)
    loss, numbers = KINDS[kind]
    rank = dist.rank()
    mine = [t.split(sizes)[rank] for t in pairs(11)]
    bias = [None] * (2 - len(numbers))
    return value_and_gradients(lambda *inputs: loss(impl)(*inputs, *bias, KEYS.split(sizes)[rank]), *mine, numbers)


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [([11], [None, (200, 0), (200, 400)]), ([6, 5], [None, (200, 400)]), ([4, 0, 7], [(200, 0)])],
    ids=str,
)
def test_pairs_of_one_key_are_no_negatives(ranks, sizes, tiles):
    cases = [(kind, impl, sizes, tile) for kind in KINDS for impl in IMPLEMENTATIONS for tile in tiles]
    found = ranks(len(sizes), for_each, on_a_rank, cases)
    for (kind, *_), results in zip(cases, zip(*found, strict=True), strict=True):
        by_hand = partial(softmax_without if kind == "contrastive" else sigmoid_without, keys=KEYS)
        assert_equals_one_process(results, value_and_gradients(by_hand, *pairs(11), KINDS[kind][1]))


def smoothed_on_a_rank(impl, sizes):
    mine = [t.split(sizes)[dist.rank()] for t in pairs(11)]
    return value_and_gradients(ContrastiveLoss(impl, label_smoothing=0.2), *mine, (14.0,))


@pytest.mark.parametrize("sizes", [[11], [6, 5], [4, 0, 7]], ids=str)
def test_label_smoothing_is_that_of_torch(ranks, sizes):
    def by_torch(image, text, scale):
        logits, targets = scale * image @ text.T, torch.arange(11)
        return sum(F.cross_entropy(scores, targets, label_smoothing=0.2) for scores in (logits, logits.T)) / 2

    expected = value_and_gradients(by_torch, *pairs(11), (14.0,))
    found = ranks(len(sizes), for_each, smoothed_on_a_rank, [(impl, sizes) for impl in IMPLEMENTATIONS])
    for results in zip(*found, strict=True):
        assert_equals_one_process(results, expected)


def test_keys_of_samples_and_of_captions():
    ids, tokens = torch.tensor([7, 8, 7]), torch.tensor([[1, 2, 0], [1, 2, 0], [2, 1, 0]])
    assert pair_keys(None, ids, tokens) is None
    assert pair_keys("sample_id", ids, tokens) is ids
    keys = pair_keys("caption", ids, tokens)
    assert keys.dtype == torch.int64
    assert keys[0] == keys[1] != keys[2]


def test_captions_of_few_tokens_have_keys_of_their_own():
    tokens = torch.cartesian_prod(*[torch.arange(12)] * 4)
    assert len(pair_keys("caption", tokens[:, 0], tokens).unique()) == len(tokens)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match=r"label_smoothing: got 0\.1 together with positives"):
        ContrastiveLoss(label_smoothing=0.1, positives="caption")
    with pytest.raises(ValidationError, match="positives"):
        ContrastiveConfig(label_smoothing=0.1, positives="caption")
    with pytest.raises(ConfigError, match=r"loss\.positives: got 'caption', but no keys were passed"):
        ContrastiveLoss(positives="caption")(*pairs(3), torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"got 1\.5, expected a number from 0 to 1"):
        ContrastiveLoss(label_smoothing=1.5)
    image, text = pairs(3)
    with pytest.raises(ShapeError, match=r"keys: got \(2,\) of torch\.int64, expected \(3,\)"):
        ContrastiveLoss()(image, text, torch.tensor(1.0), None, torch.arange(2))
