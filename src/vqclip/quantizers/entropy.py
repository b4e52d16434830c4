"""Exact entropies of binary codes without a tokens × codes tensor.

LFQ (Yu et al. 2023, https://arxiv.org/abs/2310.05737) assigns a token softly to the ``K = 2^n`` corners of a cube. The
softmax over corners factorises into the n bits, ``p(code) = Π_b p_b``, which makes both entropies cheap:

    p = sigmoid(logits)                              # (T, n), probability of each bit
    token_entropy = Σ_b H(p[:, b])                   # T × n numbers instead of T × K
    for part in p:                                   # some tokens at a time; backward computes A and B again
        A = joint(part[:, :h])                       # (t, 2^h), each token's distribution over its first h bits
        B = joint(part[:, h:])                       # (t, 2^(n-h)), over the other bits
        mass += (Aᵀ @ B).flatten()                   # (K,), the sum over tokens; row-major order is the codes' order
    codebook_entropy_gap = log K - H(mass / T)

Shapes: T tokens, C codebooks, n bits, K = 2^n codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vqclip.dist import is_torch_compiling
from vqclip.nn.precision import first_derivative_only
from vqclip.quantizers.vectors import tokens_at_a_time

PART = 2**18
"""Probabilities (tokens × codes of half the bits) that a CPU computes at a time."""


def bit_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of a bit that is 1 with probability ``sigmoid(logits)``, any shape.

    Computed with ``a = |logits|`` as ``log(1 + e^-a) + a σ(-a)``: neither term is negative, so a confident bit has no
    cancellation.
    """
    return _BitEntropy.apply(logits)


class _BitEntropy(torch.autograd.Function):
    """The entropy with a gradient that needs only the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        a = logits.abs()
        return F.softplus(-a) + a * torch.sigmoid(-a)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return grad * (-logits * torch.sigmoid(logits) * torch.sigmoid(-logits))


def code_mass(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return the sum over tokens of the distribution over all codes.

    Memory beside the result, C K: twice C √K numbers for each token of a part, `PART` in all on a CPU and a 64th of a
    GPU's memory; nothing but the logits is saved for backward, which computes the parts again.

    Args:
        logits: ``(T, C, n)``; bit b of a token is 1 with probability ``sigmoid(logits[..., b])``. Bit 0 is the most
            significant one of the code.
        keep: ``(T,)`` bool, the tokens to sum; all by default.

    Returns:
        ``(C, K)``; the sum over codes is the number of tokens.
    """
    grouped = rearrange(logits, "t c n -> c n t").contiguous()  # tokens last, for long inner loops
    return _CodeMass.apply(grouped, keep)


class _CodeMass(torch.autograd.Function):
    """``(C, n, T)`` bit logits → ``(C, 2^n)``, part by part along the tokens; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits, keep)
        return (_mass_in_graph if is_torch_compiling() else _mass)(logits, keep)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, keep = ctx.saved_tensors
        return (_mass_gradient_in_graph if is_torch_compiling() else _mass_gradient)(grad, logits, keep), None


def _mass(logits: Tensor, keep: Tensor | None) -> Tensor:
    codebooks, bits, _ = logits.shape
    half = bits // 2
    total = logits.new_zeros(codebooks, 2**half, 2 ** (bits - half))
    for part, real in _parts(logits, keep):
        high = _joint(part[:, :half])
        total.baddbmm_(high if real is None else high * real, _joint(part[:, half:]).transpose(1, 2))
    return total.flatten(1)


def _mass_gradient(grad: Tensor, logits: Tensor, keep: Tensor | None) -> Tensor:
    half = logits.shape[1] // 2
    grad = grad.unflatten(1, (2**half, -1))
    highs, lows = [], []
    for part, real in _parts(logits, keep):
        high, low = _joint(part[:, :half]), _joint(part[:, half:])
        high_grad, low_grad = torch.bmm(grad, low), torch.bmm(grad.transpose(1, 2), high)
        if real is not None:
            high_grad, low_grad = high_grad * real, low_grad * real
        highs.append(_joint_gradient(part[:, :half], high, high_grad))
        lows.append(_joint_gradient(part[:, half:], low, low_grad))
    return torch.cat([torch.cat(highs, dim=2), torch.cat(lows, dim=2)], dim=1)


def _joint(logits: Tensor) -> Tensor:
    """Return the joint probabilities ``(C, 2^h, T)`` of bits ``(C, h, T)``."""
    joint = logits.new_ones(logits.shape[0], 1, logits.shape[2])
    zero, one = torch.sigmoid(-logits), torch.sigmoid(logits)
    # From the least significant bit on, so that each doubling concatenates two contiguous blocks.
    for bit in reversed(range(logits.shape[1])):
        joint = torch.cat((joint * zero[:, bit, None], joint * one[:, bit, None]), dim=1)
    return joint


def _joint_gradient(logits: Tensor, joint: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient at the logits; one matrix product."""
    # ∂p(code)/∂logit is p(code) p(0) if the code has the bit, else -p(code) p(1). The two sums are kept apart:
    # otherwise the tiny gradient of a confident bit would be the difference of two large numbers.
    codes = torch.arange(joint.shape[1], device=joint.device)
    bits = (codes >> torch.arange(logits.shape[1] - 1, -1, -1, device=joint.device)[:, None]) & 1
    with_bit, without = torch.matmul(torch.cat((bits, 1 - bits)).to(joint), grad * joint).chunk(2, dim=1)
    return torch.sigmoid(-logits) * with_bit - torch.sigmoid(logits) * without


def _parts(logits: Tensor, keep: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield parts ``(C, n, t)`` of the tokens, and which of their tokens to sum; at least one."""
    if torch.compiler.is_exporting():
        yield logits, keep
        return
    codebooks, bits, tokens = logits.shape
    size = tokens_at_a_time(logits.device, codebooks << (bits - bits // 2), PART)
    for begin in range(0, max(tokens, 1), size):
        rows = slice(begin, begin + size)
        yield logits[..., rows], None if keep is None else keep[rows]


# Operators of their own in a compiled graph, of which the number of parts would be a part.
@torch.library.custom_op("vqclip::code_mass", mutates_args=())
def _mass_in_graph(logits: Tensor, keep: Tensor | None) -> Tensor:
    return _mass(logits, keep)


@torch.library.custom_op("vqclip::code_mass_gradient", mutates_args=())
def _mass_gradient_in_graph(grad: Tensor, logits: Tensor, keep: Tensor | None) -> Tensor:
    return _mass_gradient(grad, logits, keep)


@_mass_in_graph.register_fake
def _(logits: Tensor, keep: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape[0], 2 ** logits.shape[1])


@_mass_gradient_in_graph.register_fake
def _(grad: Tensor, logits: Tensor, keep: Tensor | None) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def entropy_gap(mass: Tensor, tokens: Tensor) -> Tensor:
    """Return ``log K - H(mean distribution over codes)`` in nats; 0 without tokens.

    Args:
        mass: ``(C, K)`` sum of the tokens' distributions.
        tokens: () number of tokens.

    Returns:
        ``(C,)`` float64, at least 0.
    """
    shares = mass.double() / tokens.clamp(min=1)
    # The inner `where` keeps a share of 0 out of the logarithm: it adds exactly 0 to value and gradient.
    log = torch.where(shares != 0, torch.where(shares != 0, shares, 1.0).log(), 0.0)
    gap = math.log(mass.shape[-1]) + (shares * log).sum(dim=-1)
    # Rounding can make a gap of 0 slightly negative.
    return torch.where(tokens > 0, gap, 0.0).clamp(min=0)
