"""What the implementations without a square of logits promise beyond the contract of all losses."""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.quantizers.test_distributed import collectives
from tests.ranks import for_each
from vqclip import dist
from vqclip.dist._torch_versions import REDUCE_SCATTER
from vqclip.errors import ConfigError, DistributedError
from vqclip.losses import ContrastiveLoss, SigmoidLoss, tiled

KINDS = {"contrastive": (ContrastiveLoss, (14.0,)), "sigmoid": (SigmoidLoss, (10.0, -8.0))}


def pairs(count, width=16, likeness=1.0, dtype=torch.float64, seed=0):
    """Image and text features of `count` pairs."""
    generator = torch.Generator().manual_seed(seed)
    image, noise = torch.randn(2, count, width, dtype=torch.float64, generator=generator)
    return F.normalize(image, dim=1).to(dtype), F.normalize(likeness * image + noise, dim=1).to(dtype)


def value_and_gradients(loss_fn, image, text, numbers):
    inputs = [t.detach().clone().requires_grad_() for t in (image, text)]
    inputs += [torch.tensor(number, dtype=image.dtype, requires_grad=True) for number in numbers]
    loss = loss_fn(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def tile_bytes(tile, kept):
    return mock.patch.multiple(tiled, TILE_BYTES=tile, KEPT_TILES=kept)


WITHOUT_SQUARE = list(tiled.EXCHANGES)


def assert_equals_one_process(results, expected):
    """Values and gradients of all ranks beside those of one process; see `vqclip.dist` for the factor."""
    value, image, text, *others = expected
    for each in results:
        torch.testing.assert_close([each[0], *each[3:]], [value, *others], rtol=1e-9, atol=1e-12)
    for k, whole in ((1, image), (2, text)):
        torch.testing.assert_close(torch.cat([r[k] for r in results]), len(results) * whole, rtol=1e-9, atol=1e-12)


def keys_on_rank_0(kind, impl):
    loss, numbers = KINDS[kind]
    bias = [None] * (2 - len(numbers))
    keys = torch.arange(5) if dist.rank() == 0 else None
    with pytest.raises(DistributedError, match="with keys, ranks|have different rows") as error:
        value_and_gradients(lambda *inputs: loss(impl)(*inputs, *bias, keys), *pairs(5), numbers)
    return str(error.value)


def test_keys_on_some_ranks_only_are_refused_at_once(ranks):
    cases = list(itertools.product(KINDS, WITHOUT_SQUARE))
    for zero, one in zip(*ranks(2, for_each, keys_on_rank_0, cases, timeout=20.0), strict=True):
        assert "rank 0 has rows (16,) of torch.float64, with keys, ranks [1] have different rows" in zero
        assert "rank 1 has rows (16,) of torch.float64, ranks [0] have different rows" in one


@pytest.mark.parametrize("impl", WITHOUT_SQUARE)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_other_kinds_are_refused(kind, impl):
    loss, numbers = KINDS[kind]
    image, text = pairs(5)
    numbers = [torch.tensor(number, dtype=torch.float64) for number in numbers]
    image.requires_grad_()
    with pytest.raises(ConfigError, match="expected impl='gather' for second derivatives"):
        torch.autograd.grad(loss(impl)(image, text, *numbers), image, create_graph=True)
    with pytest.raises(RuntimeError, match="jvp|forward|setup_context"):
        torch.func.jvp(lambda x: loss(impl)(x, text, *numbers), (image.detach(),), (image.detach(),))


@pytest.mark.parametrize("impl", WITHOUT_SQUARE)
@pytest.mark.parametrize(
    ("kind", "numbers", "likeness"),
    [
        ("contrastive", (30.0,), 1.2),
        ("contrastive", (30.0,), 1.6),
        ("contrastive", (40.0,), 2.0),
        ("sigmoid", (60.0, -30.0), 2.0),
        ("sigmoid", (80.0, -40.0), 1.6),
    ],
)
def test_a_nearly_converged_batch_keeps_its_digits(kind, numbers, likeness, impl):
    """Where every softmax is nearly 1, its difference from 1 has few digits left, unless pairs are kept apart.

    In fp64 the reference has enough of them for these losses, 6e-5 to 5e-9; in fp32 it is off by up to 0.8.
    """
    image, text = (features.float() for features in pairs(256, width=64, likeness=likeness))
    loss, _ = KINDS[kind]
    exact = value_and_gradients(loss("gather"), image.double(), text.double(), numbers)
    assert 1e-9 < exact[0] <= 0.01
    for a, b in zip(value_and_gradients(loss(impl), image, text, numbers), exact, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("width", [1, 5, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pair_of_any_width(kind, width):
    """What the ring carries is wider than the texts: it must begin where its type may."""
    image, text = pairs(1, width=width, dtype=torch.float32)
    loss, numbers = KINDS[kind]
    both = [value_and_gradients(loss(impl), image, text, numbers) for impl in ("ring", "gather")]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


def errors(found, exact):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("impl", WITHOUT_SQUARE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spread", "scale", "sign"),
    [(10.0, 14.0, 1), (10.0, 100.0, 1), (0.3, 100.0, 1), (0.05, 100.0, 1), (0.01, 100.0, 1), (0.01, 100.0, -1)],
)
def test_fp32_is_as_near_to_fp64_as_the_reference(kind, impl, spread, scale, sign):
    """Features in a cone (a small spread) have gradients that are small differences of large terms."""
    image, text = pairs(300, width=32)
    image, text = F.normalize(image[:1] + spread * image, dim=1), F.normalize(sign * image[:1] + spread * text, dim=1)
    loss, numbers = KINDS[kind]
    numbers = (scale, *numbers[1:])
    exact = value_and_gradients(loss("gather"), image.float().double(), text.float().double(), numbers)
    found = errors(value_and_gradients(loss(impl), image.float(), text.float(), numbers), exact)
    reference = errors(value_and_gradients(loss("gather"), image.float(), text.float(), numbers), exact)
    for mine, theirs in zip(found, reference, strict=True):
        assert mine <= max(5e-6 if spread > 0.01 else 2e-5, 4 * theirs)
    if spread > 1:
        assert max(found) <= 5e-6


def backward_of_a_step(kind, impl):
    loss, numbers = KINDS[kind]
    inputs = [t.split([5, 6])[dist.rank()].clone().requires_grad_() for t in pairs(11)]
    inputs += [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in numbers]
    with collectives() as forward:
        value = loss(impl)(*inputs)
    with collectives() as backward:
        value.backward()
    return forward, backward


def test_backward_holds_no_collective(ranks):
    told_by = {"tiled": REDUCE_SCATTER, "ring": "batch_isend_irecv"}
    cases = list(itertools.product(KINDS, told_by))
    for found in ranks(2, for_each, backward_of_a_step, cases):
        for (_, impl), (forward, backward) in zip(cases, found, strict=True):
            assert told_by[impl] in forward
            assert backward == []


@pytest.mark.parametrize("impl", WITHOUT_SQUARE)
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph(kind, impl):
    torch._dynamo.reset()
    loss, numbers = KINDS[kind]
    loss = loss(impl)

    def scaled(image, text, *others):
        return 2 * loss(F.normalize(image, dim=1), F.normalize(text, dim=1), *others)

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    expected = value_and_gradients(scaled, *pairs(12), numbers)
    torch.testing.assert_close(value_and_gradients(compiled, *pairs(12), numbers), expected, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        others = [torch.tensor(number, dtype=torch.float64) for number in numbers]
        torch.testing.assert_close(compiled(*pairs(12), *others), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_is_sound(kind):
    image, text = pairs(6, dtype=torch.float32)
    inputs = (image, text, torch.tensor(10.0), torch.tensor(-8.0), torch.arange(6) // 2, [], None)
    inputs += (kind, "tiled")
    op = torch.ops.vqclip.tiled_loss
    checks = ("test_schema", "test_faketensor")
    for wants_grad in (True, False):
        torch.library.opcheck(op.default, (*inputs, wants_grad), test_utils=checks)
        strided = (image, text.T.contiguous().T, *inputs[2:8], "ring")
        torch.library.opcheck(op.default, (*strided, wants_grad), test_utils=checks)
        strided = (image.T.contiguous().T, text, *inputs[2:])
        torch.library.opcheck(op.default, (*strided, wants_grad), test_utils=checks)


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 33, 4096])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_the_sum_of_softplus(rows, dtype, rtol):
    for spread, mean in itertools.product((1e-3, 1.0, 40.0), (-80.0, -10.0, 0.0, 90.0)):
        x = mean + spread * torch.randn(rows, 7, generator=torch.manual_seed(rows), dtype=torch.float64)
        x[0, 0] = -torch.inf
        x = x.to(dtype)
        exact = torch.logaddexp(x.double(), torch.zeros_like(x, dtype=torch.float64)).sum()
        torch.testing.assert_close(tiled.softplus_sum(x).double(), exact, rtol=rtol, atol=0)
    assert tiled.softplus_sum(torch.full((rows, 2), torch.nan)).isnan()
    assert tiled.softplus_sum(torch.full((rows, 2), torch.inf)) == torch.inf


def test_this_torch_has_the_fast_product():
    """So that a PyTorch that renames the operator is noticed: the losses would be right, at half the speed."""
    assert torch.backends.mkldnn.is_available() == tiled.HAS_ONEDNN
