"""What every loss keeps. A new one is a line in LOSSES."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from tests.ranks import RankError, for_each
from vqclip import dist
from vqclip.config import Config
from vqclip.errors import ConfigError, ShapeError
from vqclip.losses import ContrastiveConfig, LossConfig, SigmoidConfig
from vqclip.losses.features import Implementation


def softmax_by_hand(image, text, scale, bias):
    """−log of the softmax probability of the partner, over rows and over columns, pair by pair."""
    logits = [[scale * (i @ t) for t in text] for i in image]
    total = 0.0
    for k in range(len(logits)):
        row = sum(math.exp(s - logits[k][k]) for s in logits[k])
        column = sum(math.exp(s[k] - logits[k][k]) for s in logits)
        total += (math.log(row) + math.log(column)) / 2
    return total / len(logits)


def sigmoid_by_hand(image, text, scale, bias):
    """−log of the probability of the right answer, over all pairs, divided by the number of images."""
    total = 0.0
    for k, i in enumerate(image):
        for j, t in enumerate(text):
            logit = scale * (i @ t) + bias
            total += math.log1p(math.exp(-logit if k == j else logit))
    return total / len(image)


class Case(NamedTuple):
    config: Config
    by_hand: Callable[..., float]
    peer: str  # the class in open_clip.loss that computes the same in one process
    scale: float
    bias: float | None


IMPLEMENTATIONS = get_args(Implementation)

LOSSES = {
    f"{name}, {impl}": Case(config(impl=impl), *others)
    for name, config, *others in (
        ("contrastive", ContrastiveConfig, softmax_by_hand, "ClipLoss", 14.0, None),
        ("sigmoid", SigmoidConfig, sigmoid_by_hand, "SigLipLoss", 10.0, -8.0),
    )
    for impl in IMPLEMENTATIONS
}

SPLITS = [(12,), (6, 6), (12, 9), (5, 0), (4, 4, 4), (7, 4, 9), (0, 3, 2), (3, 3, 3, 3), (2, 5, 0, 4)]


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def features(count, dtype=torch.float64, seed=0):
    """Image and text features of `count` pairs that are more alike than chance."""
    generator = torch.Generator().manual_seed(seed)
    image, noise = torch.randn(2, count, 5, dtype=torch.float64, generator=generator)
    return F.normalize(image, dim=1).to(dtype), F.normalize(image + noise, dim=1).to(dtype)


def leaves(case, dtype=torch.float64):
    """Scale, and bias if there is one, as parameters."""
    return [torch.tensor(v, dtype=dtype, requires_grad=True) for v in (case.scale, case.bias) if v is not None]


def value_and_gradients(loss_fn, image, text, numbers):
    image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
    loss = loss_fn(image, text, *numbers)
    loss.backward()
    return loss.detach(), image.grad, text.grad, [number.grad for number in numbers]


def test_equals_the_formula_pair_by_pair(case):
    image, text = features(9)
    loss = case.config.build()(image, text, *leaves(case))
    assert loss.item() == pytest.approx(case.by_hand(image, text, case.scale, case.bias), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_open_clip_in_one_process(case, dtype):
    peer = getattr(pytest.importorskip("open_clip.loss"), case.peer)()  # not above: the ranks need no open_clip
    pair = features(16, dtype)
    ours = value_and_gradients(case.config.build(), *pair, leaves(case, dtype))
    theirs = value_and_gradients(peer, *pair, leaves(case, dtype))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    torch.testing.assert_close(ours[3], theirs[3], **tolerance)


def on_a_rank(case_name, image, text, sizes):
    case = LOSSES[case_name]
    mine = [t.split(list(sizes))[dist.rank()] for t in (image, text)]
    asking = value_and_gradients(case.config.build(), *mine, leaves(case))
    knowing = value_and_gradients(functools.partial(case.config.build(), sizes=sizes), *mine, leaves(case))
    assert all(torch.equal(*pair) for pair in zip(asking[:3], knowing[:3], strict=True))
    return knowing


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(each, marks=pytest.mark.slow if each in ((6, 6), (12, 9), (4, 4, 4), (7, 4, 9)) else ())
        for each in SPLITS
    ],
    ids=str,
)
def test_loss_and_gradients_on_any_ranks_equal_one_process(ranks, sizes):
    image, text = features(sum(sizes))
    found = ranks(len(sizes), for_each, on_a_rank, [(name, image, text, sizes) for name in LOSSES])
    for name, results in zip(LOSSES, zip(*found, strict=True), strict=True):
        loss, image_grad, text_grad, number_grads = on_a_rank(name, image, text, [sum(sizes)])
        for each in results:
            torch.testing.assert_close(each[0], loss, rtol=1e-9, atol=0)
            # A scalar that every rank uses has the whole gradient on every rank, which is also DDP's average of it.
            torch.testing.assert_close(each[3], number_grads, rtol=1e-9, atol=1e-12)
        # Features get W times theirs (see vqclip.dist).
        for k, whole in ((1, image_grad), (2, text_grad)):
            torch.testing.assert_close(torch.cat([r[k] for r in results]), len(sizes) * whole, rtol=1e-9, atol=1e-12)


class Towers(nn.Module):
    """A model as small as can be: two towers, and the loss's numbers as parameters."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Linear(5, 4, bias=False, dtype=torch.float64) for _ in range(2))
        self.numbers = nn.ParameterList(leaves(case))

    def forward(self, image, text):
        both = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        return *both, *(number * 1 for number in self.numbers)


def train_three_steps(case_name, image, text, sizes):
    case = LOSSES[case_name]
    loss_fn = case.config.build()
    model = dist.wrap_ddp(Towers(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    image, text = (t.split(list(sizes))[dist.rank()] for t in (image, text))
    losses = []
    for _ in range(3):
        loss = loss_fn(*model(image, text))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in dist.unwrap_ddp(model).named_parameters()}


@pytest.mark.parametrize("sizes", [(12, 9), (7, 4, 9), (5, 0, 3, 4)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_training_under_ddp_equals_one_process(ranks, name, sizes):
    image, text = features(sum(sizes))
    losses, weights = train_three_steps(name, image, text, [sum(sizes)])
    assert losses[2] < losses[0]
    for got, trained in ranks(len(sizes), train_three_steps, name, image, text, sizes):
        assert got == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(trained, weights, rtol=1e-9, atol=1e-12)


def test_computes_in_full_precision_under_autocast(case):
    image, text = features(8, torch.float32)
    loss_fn = case.config.build()

    def under_autocast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(*inputs)

    plain = value_and_gradients(loss_fn, image, text, leaves(case, torch.float32))
    under = value_and_gradients(under_autocast, image, text, leaves(case, torch.float32))
    assert under[0].dtype == torch.float32
    for a, b in zip(plain[:3], under[:3], strict=True):
        assert torch.equal(a, b)


def test_half_precision_features_are_widened_first(case):
    image, text = (t.bfloat16() for t in features(8))
    loss, image_grad, *_ = value_and_gradients(case.config.build(), image, text, leaves(case, torch.float32))
    assert loss.dtype == torch.float32
    assert image_grad.dtype == torch.bfloat16
    assert loss == case.config.build()(image.float(), text.float(), *leaves(case, torch.float32))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 100.0, 1e4])
@pytest.mark.parametrize("kind", ["equal pairs", "opposite pairs", "one point"])
def test_stays_finite_at_the_extremes(case, scale, kind):
    image, _ = features(6, torch.float32)
    image = image[:1].expand_as(image) if kind == "one point" else image
    text = -image if kind == "opposite pairs" else image
    numbers = leaves(case, torch.float32)
    numbers[0] = torch.tensor(scale, requires_grad=True)
    loss, *gradients, number_grads = value_and_gradients(case.config.build(), image, text, numbers)
    assert loss >= 0
    assert all(torch.isfinite(t).all() for t in [loss, *gradients, *number_grads])


def test_the_order_of_pairs_does_not_matter(case):
    image, text = features(7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    loss_fn, numbers = case.config.build(), leaves(case)
    torch.testing.assert_close(
        loss_fn(image, text, *numbers), loss_fn(image[order], text[order], *numbers), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("shapes", [((4, 5), (3, 5)), ((4, 5), (4, 6)), ((4,), (4,))], ids=str)
def test_features_that_do_not_pair_up_are_refused(case, shapes):
    image, text = (torch.randn(shape) for shape in shapes)
    with pytest.raises(ShapeError, match=r"got image \(4.*expected \(B, E\)"):
        case.config.build()(image, text, *leaves(case, torch.float32))


def test_a_bias_too_many_or_too_few_is_refused(case):
    scale = torch.tensor(10.0)
    wrong = scale if case.bias is None else None
    with pytest.raises(ConfigError, match=r"model\.temperature\.bias"):
        case.config.build()(*features(4), scale, wrong)


def unlike_widths(case_name):
    case = LOSSES[case_name]
    case.config.build()(*(t[:, : 5 - dist.rank()] for t in features(4)), *leaves(case))


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_with_unlike_features_are_told_apart(ranks, name):
    with pytest.raises(RankError, match=r"ranks \[1\] have different rows"):
        ranks(2, unlike_widths, name, timeout=20.0)


def without_gradients(case_name, image, text, sizes):
    with torch.no_grad():
        mine = [t.split(list(sizes))[dist.rank()] for t in (image, text)]
        return LOSSES[case_name].config.build()(*mine, *leaves(LOSSES[case_name]))


@pytest.mark.parametrize("name", LOSSES)
def test_without_gradients_the_value_is_the_same(ranks, name):
    image, text = features(5)
    loss = without_gradients(name, image, text, [5])
    for value in ranks(2, without_gradients, name, image, text, [3, 2]):
        torch.testing.assert_close(value, loss, rtol=1e-12, atol=0)


def test_the_configuration_finds_it_by_kind(case):
    parsed = TypeAdapter(LossConfig).validate_python(case.config.model_dump())
    assert parsed == case.config
    loss = parsed.build()
    assert loss.name == parsed.kind
    assert parsed.needs_bias == (case.bias is not None)
    assert not list(loss.parameters())
