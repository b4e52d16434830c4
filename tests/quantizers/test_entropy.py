from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from vqclip.quantizers import entropy as module
from vqclip.quantizers.entropy import bit_entropy, code_mass, entropy


def brute_force(logits: Tensor) -> Tensor:
    """``(T, n)`` bit logits → ``(T, 2^n)``: the softmax over all codes, by its definition."""
    codes = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=logits.shape[-1])), dtype=logits.dtype)
    return (logits / 2 @ codes.T).softmax(dim=-1)


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_equal_brute_force_with_their_gradients(bits: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 1)  # three parts
    logits = scale * torch.randn(133, bits, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    logits.requires_grad_()
    codes = brute_force(logits)
    token = -(torch.xlogy(codes, codes)).sum(dim=-1)
    for ours, expected in (
        (bit_entropy(logits).sum(dim=-1), token),
        (code_mass(logits[:, None])[0], codes.sum(dim=0)),
        (entropy(code_mass(logits[:, None])[0] / 133), -torch.xlogy(codes.mean(dim=0), codes.mean(dim=0)).sum()),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        upstream = torch.randn_like(expected)
        a, b = (torch.autograd.grad(y, logits, upstream, retain_graph=True)[0] for y in (ours, expected))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_bit_entropy_of_confident_bits_keeps_its_digits() -> None:
    logits = torch.tensor([-80.0, -30.0, -5.0, 0.0, 5.0, 30.0, 80.0])
    exact = [math.log1p(math.exp(-abs(z))) + abs(z) / (1 + math.exp(abs(z))) for z in logits.tolist()]
    torch.testing.assert_close(bit_entropy(logits), torch.tensor(exact), rtol=1e-6, atol=0)


def test_gradient_of_bit_entropy() -> None:
    logits = torch.linspace(-5, 5, 21, dtype=torch.float64, requires_grad=True)  # 0 is among them
    (gradient,) = torch.autograd.grad(bit_entropy(logits).sum(), logits)
    p = logits.detach().sigmoid()
    torch.testing.assert_close(gradient, -logits.detach() * p * (1 - p), rtol=1e-12, atol=1e-15)


def test_zero_probability_adds_nothing_to_value_or_gradient() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    value = entropy(p)
    (gradient,) = torch.autograd.grad(value, p)
    assert value.item() == pytest.approx(math.log(2), abs=1e-15)
    assert gradient.tolist()[2:] == [0, 0]
    assert gradient[:2].tolist() == pytest.approx([math.log(2) - 1] * 2)


def test_tiny_probability_is_not_clamped() -> None:
    p = torch.tensor([1e-30, 1.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy(p), p)
    assert gradient[0].item() == pytest.approx(30 * math.log(10) - 1)


def test_nan_stays_nan() -> None:
    assert entropy(torch.tensor([0.5, math.nan])).isnan()


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
