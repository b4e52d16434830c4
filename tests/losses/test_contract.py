"""What every loss keeps. A new one is a line in LOSSES."""

import functools
from collections.abc import Callable
from typing import NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F

from tests.losses.test_tiled import assert_equals_one_process, pairs, tile_bytes, value_and_gradients
from tests.ranks import for_each
from vqclip import dist
from vqclip.config import Config
from vqclip.dist._torch_versions import TORCH_VERSION
from vqclip.errors import ConfigError, DistributedError, ShapeError
from vqclip.losses import (
    ContrastiveConfig,
    ContrastiveLoss,
    DistillationLoss,
    Implementation,
    SigmoidConfig,
    pair_keys,
    weighted_total,
)


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


class Case(NamedTuple):
    config: Config
    without: Callable[..., torch.Tensor]  # with keys of pairs that are no negatives
    peer: str  # the class in open_clip.loss that computes the same in one process
    numbers: tuple[float, ...]  # scale, and bias if the loss has one


IMPLEMENTATIONS = get_args(Implementation)

LOSSES = {
    f"{name}, {impl}": Case(config(impl=impl, positives=None), *others)
    for name, config, *others in (
        ("contrastive", ContrastiveConfig, softmax_without, "ClipLoss", (14.0,)),
        ("sigmoid", SigmoidConfig, sigmoid_without, "SigLipLoss", (10.0, -8.0)),
    )
    for impl in IMPLEMENTATIONS
}

SLOW_SPLITS = [pytest.param(each, marks=pytest.mark.slow) for each in ((6, 6), (12, 9), (4, 4, 4), (7, 4, 9))]
KEYS = torch.tensor([0, 1, 2, 1, 3, 0, 1, 4, 5, 6, 7])


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def numbers_of(case, dtype=torch.float64):
    return [torch.tensor(number, dtype=dtype) for number in case.numbers]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_open_clip_in_one_process(case, dtype):
    peer = getattr(pytest.importorskip("open_clip.loss"), case.peer)()  # not above: the ranks need no open_clip
    both = (case.config.build(), peer)
    ours, theirs = (value_and_gradients(loss, *pairs(16, dtype=dtype), case.numbers) for loss in both)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(ours, theirs, **tolerance)


def on_a_rank(case_name, sizes):
    case, mine = LOSSES[case_name], [t.split(list(sizes))[dist.rank()] for t in pairs(sum(sizes))]
    loss = case.config.build()
    asking = value_and_gradients(loss, *mine, case.numbers)
    knowing = value_and_gradients(functools.partial(loss, sizes=sizes), *mine, case.numbers)
    assert all(torch.equal(*pair) for pair in zip(asking, knowing, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(loss(*mine, *numbers_of(case)), asking[0], rtol=1e-12, atol=0)
    with tile_bytes(500, 2):
        return asking, value_and_gradients(loss, *mine, case.numbers)


@pytest.mark.parametrize(
    "sizes", [(12,), (5, 0), (0, 3, 2), (3,) * 4, (2, 5, 0, 4), (5, 0, 6, 2), *SLOW_SPLITS], ids=str
)
def test_loss_and_gradients_on_any_ranks_equal_one_process(ranks, sizes):
    """In one tile and in many, with gradients and without."""
    found = ranks(len(sizes), for_each, on_a_rank, [(name, sizes) for name in LOSSES])
    for name, results in zip(LOSSES, zip(*found, strict=True), strict=True):
        whole, _ = on_a_rank(name, (sum(sizes),))
        for tiles in zip(*results, strict=True):
            assert_equals_one_process(tiles, whole)


def test_computes_in_full_precision_under_autocast(case):
    loss_fn = case.config.build()

    def under_autocast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(*inputs)

    inputs = (*pairs(8, dtype=torch.float32), case.numbers)
    plain, under = (value_and_gradients(loss, *inputs) for loss in (loss_fn, under_autocast))
    assert under[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))
    half = [features.requires_grad_() for features in pairs(8, dtype=torch.bfloat16)]  # widened first
    loss = loss_fn(*half, *numbers_of(case, torch.float32))
    loss.backward()
    assert (loss.dtype, half[0].grad.dtype) == (torch.float32, torch.bfloat16)
    assert loss == loss_fn(*(features.float() for features in half), *numbers_of(case, torch.float32))


@pytest.mark.parametrize("kind", ["equal pairs", "opposite pairs", "one point"])
def test_stays_finite_at_the_extremes(case, kind):
    image, _ = pairs(6, dtype=torch.float32)
    image = image[:1].expand_as(image) if kind == "one point" else image
    text = -image if kind == "opposite pairs" else image
    for scale in (0.0, 1e-3, 100.0, 1e4):
        found = value_and_gradients(case.config.build(), image, text, (scale, *case.numbers[1:]))
        assert found[0] >= 0
        assert all(torch.isfinite(each).all() for each in found)


def test_wrong_arguments_are_refused(case):
    loss, (scale, *bias), (image, text) = case.config.build(), numbers_of(case), pairs(4)
    for wrong in ((image, text[:3]), (image, text[:, :2]), (image[:, 0], text[:, 0])):
        with pytest.raises(ShapeError, match=r"got image \(4.*expected \(B, E\)"):
            loss(*wrong, scale, *bias)
    with pytest.raises(ConfigError, match=r"model\.temperature\.bias"):
        loss(image, text, scale, None if bias else scale)
    with pytest.raises(ShapeError, match=r"scale: got shape \(1,\), expected \(\): pass scale.squeeze\(\)"):
        loss(image, text, scale[None], *bias)
    with pytest.raises(ShapeError, match=r"keys: got \(2,\) of torch\.int64, expected \(4,\)"):
        loss(image, text, scale, *(bias or [None]), torch.arange(2))
    if case.config.impl != "gather":
        with pytest.raises(ShapeError, match="the global batch is empty"):
            loss(image[:0], text[:0], scale, *bias)
        with pytest.raises(ShapeError, match=r"sizes: got \[3\], and 4 pairs on rank 0 of 1"):
            loss(image, text, scale, *bias, sizes=[3])
    with pytest.raises(ConfigError, match="impl: got 'square', expected one of tiled, ring, gather"):
        type(loss)("square")
    with pytest.raises(ConfigError, match=r"loss\.positives: got 'caption', but no keys were passed"):
        ContrastiveLoss(positives="caption")(image, text, scale)
    with pytest.raises(ConfigError, match="positives: got 'captions', expected one of sample_id, caption"):
        ContrastiveLoss(positives="captions")
    with pytest.raises(ConfigError, match=r"got 1\.5, expected a number from 0 to 1"):
        ContrastiveLoss(label_smoothing=1.5)


def unlike_widths(case_name):
    case = LOSSES[case_name]
    with pytest.raises(DistributedError, match=rf"ranks \[{1 - dist.rank()}\] have different rows"):
        case.config.build()(*(t[:, : 5 - dist.rank()] for t in pairs(4)), *numbers_of(case))


def test_ranks_with_unlike_features_are_told_apart(ranks):
    ranks(2, for_each, unlike_widths, [(name,) for name in LOSSES], timeout=20.0)


def with_keys_on_a_rank(case_name, sizes, tile):
    case, mine = LOSSES[case_name], [t.split(sizes)[dist.rank()] for t in (*pairs(11), KEYS)]
    loss, bias = case.config.build(), [None] * (2 - len(case.numbers))
    with tile_bytes(*tile):
        return value_and_gradients(lambda *inputs: loss(*inputs, *bias, mine[2]), *mine[:2], case.numbers)


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [([11], [(10**6, 4), (200, 0), (200, 400)]), ([6, 5], [(10**6, 4), (200, 400)]), ([4, 0, 7], [(200, 0)])],
    ids=str,
)
def test_pairs_of_one_key_are_no_negatives(ranks, sizes, tiles):
    cases = [(name, sizes, tile) for name in LOSSES for tile in tiles]
    found = ranks(len(sizes), for_each, with_keys_on_a_rank, cases)
    for (name, *_), results in zip(cases, zip(*found, strict=True), strict=True):
        by_hand = functools.partial(LOSSES[name].without, keys=KEYS)
        assert_equals_one_process(results, value_and_gradients(by_hand, *pairs(11), LOSSES[name].numbers))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_keys_that_are_all_different_change_no_bit(case, smoothing):
    loss = case.config.model_copy(update={"label_smoothing": smoothing}).build()
    inputs = [*(t.float() for t in pairs(50)), case.numbers]
    without = value_and_gradients(loss, *inputs)
    found = value_and_gradients(functools.partial(loss, keys=torch.arange(50).flip(0)), *inputs)
    assert all(map(torch.equal, without, found))


def smoothed_on_a_rank(impl, sizes, keys):
    mine = [t.split(sizes)[dist.rank()] for t in pairs(11)]
    loss = ContrastiveLoss(impl, label_smoothing=0.2, positives=None if keys is None else "caption")
    mine_keys = None if keys is None else keys.split(sizes)[dist.rank()]
    return value_and_gradients(functools.partial(loss, keys=mine_keys), *mine, (14.0,))


@pytest.mark.parametrize("keys", [None, KEYS], ids=["all pairs", "positives"])
@pytest.mark.parametrize("sizes", [[11], [6, 5], [4, 0, 7]], ids=str)
def test_label_smoothing_is_that_of_torch(ranks, sizes, keys):
    """Of all texts of the batch, also of those that are left out of the sums."""

    def by_torch(image, text, scale):
        logits, targets = scale * image @ text.T, torch.arange(11)
        if keys is None:
            return sum(F.cross_entropy(scores, targets, label_smoothing=0.2) for scores in (logits, logits.T)) / 2
        left_out = (keys[:, None] == keys).fill_diagonal_(False)
        of_negatives = [logits.masked_fill(left_out, -torch.inf).logsumexp(dim) for dim in (0, 1)]
        wanted = 0.8 * torch.eye(11, dtype=logits.dtype) + 0.2 / 11
        return (sum(of_negatives).sum() / 2 - (wanted * logits).sum()) / 11

    expected = value_and_gradients(by_torch, *pairs(11), (14.0,))
    found = ranks(len(sizes), for_each, smoothed_on_a_rank, [(impl, sizes, keys) for impl in IMPLEMENTATIONS])
    for results in zip(*found, strict=True):
        assert_equals_one_process(results, expected)


def test_keys_of_samples_and_of_captions():
    ids, tokens = torch.tensor([7, 8, 7]), torch.tensor([[1, 2, 0], [1, 2, 0], [2, 1, 0]])
    assert pair_keys(None, ids, tokens) is None
    assert pair_keys("sample_id", ids, tokens) is ids
    keys = pair_keys("caption", ids, tokens)
    assert keys.dtype == torch.int64
    assert keys[0] == keys[1] != keys[2]
    short = torch.cartesian_prod(*[torch.arange(12)] * 4)
    assert len(pair_keys("caption", short[:, 0], short).unique()) == len(short)


def test_weighted_total():
    """A term without weight may be NaN; a weight on a device is not read, which on `meta` is an error."""
    values = {"a": 2.0, "b": 3.0, "c": torch.nan}
    terms = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    total = weighted_total(terms, {"a": 1.0, "b": 0.5, "c": 0.0})
    assert total.item() == 3.5
    total.backward()
    assert [term.grad for term in terms.values()] == [1.0, 0.5, None]
    value = torch.zeros((), device="meta")
    assert weighted_total({"a": value, "b": value}, {"a": 1.0, "b": value}).device == value.device
    mixed = {"a": torch.tensor(1.0), "b": torch.tensor(1e-12, dtype=torch.float64)}
    assert weighted_total(mixed, {"a": 1.0, "b": 1.0}).item() == 1.0 + 1e-12
    with pytest.raises(AssertionError, match="terms {'a'} and weights"):
        weighted_total({"a": torch.tensor(1.0)}, {})


# The distillation loss beside open_clip's, on any number of ranks.

TEACHER_SCALE = torch.tensor(20.0, dtype=torch.float64)


def teacher():
    return pairs(11, width=24, likeness=2.0, seed=5)


def distilled_on_a_rank(impl, sizes, tile):
    mine, theirs = ([t.split(sizes)[dist.rank()] for t in some] for some in (pairs(11), teacher()))
    loss = DistillationLoss(impl)
    with tile_bytes(tile, 0):
        return value_and_gradients(lambda *inputs: loss(*inputs, *theirs, TEACHER_SCALE), *mine, (14.0,))


def of_open_clip(image, text, scale):
    peer = pytest.importorskip("open_clip.loss").DistillClipLoss()
    return peer(image, text, scale, *teacher(), TEACHER_SCALE)[1]


SLOW_SIZES = [pytest.param(each, marks=pytest.mark.slow) for each in ([6, 5], [3, 2, 2, 4])]


@pytest.mark.parametrize("sizes", [[11], *SLOW_SIZES, [4, 0, 7]], ids=str)
def test_equals_open_clip_on_any_ranks(ranks, sizes):
    expected = value_and_gradients(of_open_clip, *pairs(11), (14.0,))
    found = ranks(len(sizes), for_each, distilled_on_a_rank, [(impl, sizes, 200) for impl in IMPLEMENTATIONS])
    for results in zip(*found, strict=True):
        assert_equals_one_process(results, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_gradients_and_compiled(impl):
    torch._dynamo.reset()
    loss, theirs = DistillationLoss(impl), teacher()

    def scaled(*inputs):
        return 3 * loss(*inputs, *theirs, TEACHER_SCALE)

    expected = value_and_gradients(scaled, *pairs(11), (14.0,))
    compiled = torch.compile(scaled, fullgraph=TORCH_VERSION >= (2, 12), backend="aot_eager")
    torch.testing.assert_close(value_and_gradients(compiled, *pairs(11), (14.0,)), expected, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(scaled(*pairs(11), torch.tensor(14.0)), expected[0], rtol=1e-12, atol=0)


def test_no_gradient_reaches_the_teacher_which_has_as_many_pairs():
    theirs = [features.requires_grad_() for features in teacher()]
    image, text = (features.requires_grad_() for features in pairs(11))
    DistillationLoss()(image, text, torch.tensor(14.0), *theirs, TEACHER_SCALE).backward()
    assert image.grad is not None
    assert all(features.grad is None for features in theirs)
    with pytest.raises(ShapeError, match="got 3 pairs from the student and 11 from the teacher"):
        DistillationLoss()(*pairs(3), torch.tensor(1.0), *teacher(), TEACHER_SCALE)
