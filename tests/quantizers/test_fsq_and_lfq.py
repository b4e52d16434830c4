"""LFQ, and the exact entropies of binary codes."""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from vector_quantize_pytorch import FSQ as PeerFSQ

from vqclip.errors import ConfigError
from vqclip.quantizers import FSQ, LFQ, BinaryLossWeights, FSQConfig, LFQConfig
from vqclip.quantizers import entropy as module
from vqclip.quantizers.entropy import bit_entropy, code_mass


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [1, 4, 9, 10])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 20.0])
def test_losses_equal_their_definition(bits: int, temperature: float) -> None:
    quantizer = LFQ(bits, temperature)
    x = tokens(50, bits).requires_grad_()
    codes = quantizer.decode(torch.arange(2**bits)[:, None]).double()
    squared_distance = (x[:, None] - codes).square().sum(dim=-1)
    log_share = (-squared_distance / temperature).log_softmax(dim=-1)
    log_mean = log_share.logsumexp(dim=0) - math.log(50)  # in logs, so that nothing underflows
    expected = {
        "token_entropy": -(log_share.exp() * log_share).sum(dim=-1).mean(),
        "codebook_entropy_gap": bits * math.log(2) + (log_mean.exp() * log_mean).sum(),
        "commitment": (x - x.detach().sign()).square().mean(),
    }
    losses = quantizer.losses(quantizer(x).stats)
    assert losses.keys() == expected.keys() == quantizer.loss_weights.keys()
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-10, atol=1e-10)
        a, b = (torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (losses[name], value))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_memory_does_not_grow_with_tokens_times_codes() -> None:
    """2^20 codes and 1,024 tokens: a tokens x codes tensor would be 4 GiB."""
    quantizer = LFQ(20, entropy_temperature=1.0)
    x = tokens(1024, 20).float().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        losses = quantizer.losses(quantizer(x).stats)
        sum(losses.values()).backward()
    assert max(saved) <= 2**20
    assert sum(saved) < 2**25


def test_above_the_counted_size_there_is_no_gap() -> None:
    quantizer = LFQ(21)
    assert "codebook_entropy_gap" not in quantizer.loss_weights
    assert "codebook_entropy_gap" not in quantizer.losses(quantizer(torch.randn(3, 21)).stats)
    assert LFQConfig(bits=21, loss_weights=BinaryLossWeights(codebook_entropy_gap=0.0)).build().dim == 21
    missing = LFQ(4, loss_weights={"commitment": 1.0}).loss_weights
    assert missing == {"token_entropy": 0.1, "codebook_entropy_gap": 0.1, "commitment": 1.0}
    assert LFQ(21, loss_weights={"commitment": 1.0}).loss_weights == {"token_entropy": 0.1, "commitment": 1.0}


def test_a_bound_keeps_channels_within_the_scale() -> None:
    quantizer = LFQ(3, entropy_temperature=1.0, scale=0.5, bound="tanh")
    x = torch.tensor([[-3.0, 0.1, 2.0]], dtype=torch.float64, requires_grad=True)
    out = quantizer(x)
    assert out.vectors.tolist() == [[-0.5, 0.5, 0.5]]
    assert out.ids.tolist() == LFQ(3)(x).ids.tolist()
    torch.testing.assert_close(quantizer.continuous(x), 0.5 * x.tanh())
    (gradient,) = torch.autograd.grad(out.vectors.sum(), x)
    torch.testing.assert_close(gradient, 0.5 * (1 - x.tanh().square()))
    error = (0.5 * x.tanh() - out.vectors).square().mean()
    torch.testing.assert_close(quantizer.losses(out.stats)["commitment"], error)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LFQ(0), "bits is 0"),
        (lambda: LFQ(64), "1 to 63"),
        (lambda: LFQ(4, math.nan), "temperature"),
        (lambda: LFQ(4, loss_weights={"entropy": 1.0}), "no loss is named"),
        (lambda: LFQ(4, loss_weights={"commitment": -1.0}), "loss_weights.commitment is -1.0, expected a number of at"),
        (lambda: FSQ((8, 5.5)), r"levels\[1\] is 5.5, expected a whole number"),
        (lambda: LFQ(4, scale=0.0), "scale is 0.0"),
        (lambda: LFQ(4, bound="clamp"), "bound is 'clamp', expected one of none, tanh"),
        (lambda: LFQ(21, loss_weights={"codebook_entropy_gap": 0.1}), "codebook_entropy_gap"),
        (lambda: LFQConfig(bits=21), "codebook_entropy_gap to 0"),
        (lambda: FSQ(()), "empty"),
        (lambda: FSQ((8, 1)), r"levels\[1\] is 1"),
        (lambda: FSQ((1001,)), "2 to 1000"),
        (lambda: FSQ((1000,) * 7), r"2\^63"),
        (lambda: FSQConfig(levels=(1000,) * 7), r"2\^63"),
    ],
)
def test_wrong_settings_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match=message):
        build()


def test_bit_entropy_of_confident_bits_keeps_its_digits() -> None:
    logits = torch.tensor([-80.0, -30.0, -5.0, 0.0, 5.0, 30.0, 80.0])
    exact = [math.log1p(math.exp(-abs(z))) + abs(z) / (1 + math.exp(abs(z))) for z in logits.tolist()]
    torch.testing.assert_close(bit_entropy(logits), torch.tensor(exact), rtol=1e-6, atol=0)


def brute_force(logits: Tensor) -> Tensor:
    """``(T, n)`` bit logits → ``(T, 2^n)``: the softmax over all codes, by its definition."""
    codes = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=logits.shape[-1])), dtype=logits.dtype)
    return (logits / 2 @ codes.T).softmax(dim=-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [0, 9, 133])
def test_code_mass_of_real_tokens_in_parts(compiled: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked tokens are left out, codebooks kept apart, and only the logits are saved for backward."""
    monkeypatch.setattr(module, "PART", 1)
    logits = torch.randn(tokens, 2, 5, dtype=torch.float64, requires_grad=True)
    keep, sizes, saved = torch.arange(tokens) % 3 != 0, [], []
    joint = module._joint
    monkeypatch.setattr(module, "_joint", lambda part: sizes.append(part.shape[2]) or joint(part))
    mass_of = torch.compile(code_mass, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else code_mass
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.numel()) or each, lambda each: each):
        mass = mass_of(logits, keep)
    upstream = torch.randn(2, 32, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(mass, logits, upstream)
    expected = torch.stack([brute_force(logits[keep, codebook]).sum(dim=0) for codebook in range(2)])
    torch.testing.assert_close(mass, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits, upstream)[0], rtol=1e-12, atol=1e-12)
    assert max(saved) <= logits.numel()
    assert Counter(sizes) == Counter(4 * {0: [0], 9: [9], 133: [64, 64, 5]}[tokens])  # both halves, forth and back


LEVELS = [(8, 5, 5, 5), (8, 6, 5), (7, 5, 5, 5, 5), (4, 4, 4, 4), (3, 3), (16, 9, 33), (5,)]


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_agrees_with_vector_quantize_pytorch(levels: tuple[int, ...]) -> None:
    x = 2 * torch.randn(3, 20_000, len(levels), generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    ours, (vectors, ids) = FSQ(levels)(x), PeerFSQ(list(levels))(x)
    assert torch.equal(ours.ids.squeeze(-1), ids)
    torch.testing.assert_close(ours.vectors, vectors, rtol=0, atol=2e-7)  # the peer's straight-through rounds
    upstream = torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, upstream) for each in (ours.vectors, vectors)))


@given(levels=st.lists(st.integers(2, 12), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_every_code_is_reached_and_decodes_to_a_vector_of_its_own(levels: list[int]) -> None:
    quantizer = FSQ(levels)
    # Inputs at the middle of every level, and beyond the outermost ones.
    points = []
    for count in levels:
        x = torch.linspace(-8, 8, 4001)
        single = FSQ((count,))(x[:, None]).ids[:, 0]
        assert (single.diff() >= 0).all(), "a larger input never gets a smaller level"
        points.append([x[single == level].median().item() for level in range(count)])
    grid = torch.tensor(list(itertools.product(*points)))
    out = quantizer(grid)
    assert sorted(out.ids[:, 0].tolist()) == list(range(math.prod(levels)))
    assert len(out.vectors.unique(dim=0)) == math.prod(levels)


def test_ids_are_exact_where_floats_are_not() -> None:
    bits = tokens(200, 63)
    numbers = [int("".join("1" if v > 0 else "0" for v in row), 2) for row in bits.tolist()]
    assert LFQ(63)(bits).ids[:, 0].tolist() == numbers
    levels = (1000,) * 6
    quantizer = FSQ(levels)
    x = 3 * torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    out = quantizer(x)
    digits = [[round(v * (n // 2)) + n // 2 for v, n in zip(row, levels, strict=True)] for row in out.vectors.tolist()]
    expected = [sum(digit * 1000**place for place, digit in enumerate(row)) for row in digits]
    assert out.ids[:, 0].tolist() == expected
    assert max(expected) > 2**59


def test_two_levels_split_at_zero() -> None:
    out = FSQ((2,))(torch.tensor([[-5.0], [-0.1], [0.1], [5.0]]))
    assert out.vectors[:, 0].tolist() == [-1, -1, 0, 0]
    assert out.ids[:, 0].tolist() == [0, 0, 1, 1]
