"""Pairs that are no negatives of each other, and label smoothing."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from tests.losses.test_tiled import KINDS, pairs, tile_bytes, value_and_gradients
from vqclip import dist
from vqclip.errors import ConfigError, ShapeError
from vqclip.losses import ContrastiveConfig, ContrastiveLoss, pair_keys
from vqclip.losses.features import Implementation

IMPLEMENTATIONS = get_args(Implementation)
KEYS = torch.tensor([0, 1, 2, 1, 3, 0, 1, 4, 5, 6, 7])


def softmax_without(image, text, numbers, keys):
    """Every row and column with its own pair and the pairs of other keys alone."""
    logits = numbers[0] * image @ text.T
    losses = []
    for scores in (logits, logits.T):
        for k, row in enumerate(scores):
            others = torch.cat([row[k, None], row[keys != keys[k]]])
            losses.append(others.logsumexp(0) - row[k])
    return torch.stack(losses).mean()


def sigmoid_without(image, text, numbers, keys):
    logits = numbers[0] * image @ text.T + numbers[1]
    asked = keys[:, None] != keys
    return (F.softplus(logits[asked]).sum() + F.softplus(-logits.diagonal()).sum()) / len(keys)


BY_HAND = {"contrastive": softmax_without, "sigmoid": sigmoid_without}


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
    ("sizes", "tile"),
    [([11], None), ([11], (200, 0)), ([11], (200, 400)), ([6, 5], None), ([6, 5], (200, 400)), ([4, 0, 7], (200, 0))],
    ids=str,
)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_one_key_are_no_negatives(ranks, kind, impl, sizes, tile):
    _, numbers = KINDS[kind]
    by_hand = BY_HAND[kind]
    value, image, text, *others = value_and_gradients(
        lambda image, text, *numbers: by_hand(image, text, numbers, KEYS), *pairs(11), numbers
    )
    results = ranks(len(sizes), on_a_rank, kind, impl, sizes, tile)
    for each in results:
        torch.testing.assert_close([each[0], *each[3:]], [value, *others], rtol=1e-9, atol=1e-12)
    for k, whole in ((1, image), (2, text)):
        torch.testing.assert_close(torch.cat([r[k] for r in results]), len(results) * whole, rtol=1e-9, atol=1e-12)


def smoothed_on_a_rank(impl, sizes):
    mine = [t.split(sizes)[dist.rank()] for t in pairs(11)]
    return value_and_gradients(ContrastiveLoss(impl, label_smoothing=0.2), *mine, (14.0,))


@pytest.mark.parametrize("sizes", [[11], [6, 5], [4, 0, 7]], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_label_smoothing_is_that_of_torch(ranks, impl, sizes):
    def by_torch(image, text, scale):
        logits, targets = scale * image @ text.T, torch.arange(11)
        return sum(F.cross_entropy(scores, targets, label_smoothing=0.2) for scores in (logits, logits.T)) / 2

    value, image, text, scale = value_and_gradients(by_torch, *pairs(11), (14.0,))
    results = ranks(len(sizes), smoothed_on_a_rank, impl, sizes)
    for each in results:
        torch.testing.assert_close([each[0], each[3]], [value, scale], rtol=1e-9, atol=1e-12)
    for k, whole in ((1, image), (2, text)):
        torch.testing.assert_close(torch.cat([r[k] for r in results]), len(results) * whole, rtol=1e-9, atol=1e-12)


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
