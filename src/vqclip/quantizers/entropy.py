"""Exact entropies of a code whose bits are independent given the token, without a tokens × codes tensor.

LFQ (Yu et al. 2023, https://arxiv.org/abs/2310.05737) assigns a token softly to the ``K = 2^n`` corners of a cube. The
softmax over corners factorises into the n bits, ``p(code) = Π_b p_b``, which makes both entropies cheap:

- The entropy of one token's distribution is the sum of the entropies of its bits: T × n numbers instead of T × K.
- The mean distribution over tokens is a matrix product. Let A ``(T, 2^h)`` hold each token's distribution over the
  first h bits and B ``(T, 2^(n-h))`` that over the others; then the sum over tokens is ``AᵀB``, whose entries in
  row-major order are the codes in order.

Shapes: T tokens, C codebooks, n bits, K = 2^n codes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vqclip.nn.precision import first_derivative_only


def bit_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of a bit that is 1 with probability ``sigmoid(logits)``, any shape.

    Written with ``a = |logits|`` as ``log(1 + e^-a) + a σ(-a)``: two terms that are never negative, so nothing cancels
    for a confident bit.
    """
    return _BitEntropy.apply(logits)


class _BitEntropy(torch.autograd.Function):
    """Keeps the logits alone for backward, whose gradient is one product."""

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
    """Sum over tokens of the distribution over all codes.

    Memory: 2 T C √K numbers and C K for the result.

    Args:
        logits: ``(T, C, n)``; bit b of a token is 1 with probability ``sigmoid(logits[..., b])``. Bit 0 is the most
            significant one of the code.
        keep: ``(T,)`` bool, the tokens to add up; all by default.

    Returns:
        ``(C, K)``, its sum over codes is the number of tokens.
    """
    half = logits.shape[-1] // 2
    grouped = rearrange(logits, "t c n -> c n t").contiguous()  # tokens last: whatever is done, is done to many of them
    high, low = _Joint.apply(grouped[:, :half]), _Joint.apply(grouped[:, half:])
    if keep is not None:
        high = high * keep
    return torch.bmm(high, rearrange(low, "c j t -> c t j")).flatten(1)


class _Joint(torch.autograd.Function):
    """``(C, h, T)`` bit logits → ``(C, 2^h, T)`` joint probabilities, with a gradient that costs one matrix product."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        codebooks, bits, tokens = logits.shape
        joint = logits.new_ones(codebooks, 1, tokens)
        zero, one = torch.sigmoid(-logits), torch.sigmoid(logits)
        # From the least significant bit on, so that a doubling only puts two blocks of memory side by side.
        for bit in reversed(range(bits)):
            joint = torch.cat((joint * zero[:, bit, None], joint * one[:, bit, None]), dim=1)
        ctx.save_for_backward(joint, zero, one)
        return joint

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        joint, zero, one = ctx.saved_tensors
        # ∂p(code)/∂logit is p(code) times p(0) where the code has the bit, -p(1) where it has not. The two are added up
        # apart, or a confident bit's tiny gradient would be the difference of two large numbers.
        codes = torch.arange(joint.shape[1], device=joint.device)
        bits = (codes >> torch.arange(zero.shape[1] - 1, -1, -1, device=joint.device)[:, None]) & 1
        with_bit, without = torch.matmul(torch.cat((bits, 1 - bits)).to(joint), grad * joint).chunk(2, dim=1)
        return zero * with_bit - one * without


def entropy(probabilities: Tensor) -> Tensor:
    """``-Σ p log p`` over the last dimension, in nats; ``(..., K)`` → ``(...)``.

    A zero adds exactly nothing, to the value and to the gradient: the inner `where` keeps log away from it, where a
    clamp inside the log would bend both.
    """
    positive = probabilities != 0
    log = torch.where(positive, torch.where(positive, probabilities, 1.0).log(), 0.0)
    return -(probabilities * log).sum(dim=-1)


def entropy_gap(mass: Tensor, tokens: Tensor) -> Tensor:
    """How far the mean distribution over codes is from even: ``log K - H(mean)`` in nats, 0 without tokens.

    Args:
        mass: ``(C, K)`` sum of the tokens' distributions.
        tokens: () their number.

    Returns:
        ``(C,)`` float64, at least 0.
    """
    gap = math.log(mass.shape[-1]) - entropy(mass.double() / tokens.clamp(min=1))
    # A gap of 0 may come out a rounding error below it.
    return torch.where(tokens > 0, gap, 0.0).clamp(min=0)
