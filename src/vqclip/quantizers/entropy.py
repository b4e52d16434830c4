"""Exact entropies of binary codes without a tokens × codes tensor.

LFQ (Yu et al. 2023, https://arxiv.org/abs/2310.05737) assigns a token softly to the ``K = 2^n`` corners of a cube. The
softmax over corners factorises into the n bits, ``p(code) = Π_b p_b``, which makes both entropies cheap:

    p = sigmoid(logits)                              # (T, n), probability of each bit
    token_entropy = Σ_b H(p[:, b])                   # T × n numbers instead of T × K
    A = joint(p[:, :h])                              # (T, 2^h), each token's distribution over its first h bits
    B = joint(p[:, h:])                              # (T, 2^(n-h)), over the other bits
    mass = (Aᵀ @ B).flatten()                        # (K,), the sum over tokens; row-major order is the codes' order
    codebook_entropy_gap = log K - H(mass / T)

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

    Memory: 2 T C √K numbers, and C K for the result.

    Args:
        logits: ``(T, C, n)``; bit b of a token is 1 with probability ``sigmoid(logits[..., b])``. Bit 0 is the most
            significant one of the code.
        keep: ``(T,)`` bool, the tokens to sum; all by default.

    Returns:
        ``(C, K)``; the sum over codes is the number of tokens.
    """
    half = logits.shape[-1] // 2
    grouped = rearrange(logits, "t c n -> c n t").contiguous()  # tokens last, for long inner loops
    high, low = _Joint.apply(grouped[:, :half]), _Joint.apply(grouped[:, half:])
    if keep is not None:
        high = high * keep
    return torch.bmm(high, rearrange(low, "c j t -> c t j")).flatten(1)


class _Joint(torch.autograd.Function):
    """``(C, h, T)`` bit logits → ``(C, 2^h, T)`` joint probabilities; the gradient is one matrix product."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        codebooks, bits, tokens = logits.shape
        joint = logits.new_ones(codebooks, 1, tokens)
        zero, one = torch.sigmoid(-logits), torch.sigmoid(logits)
        # From the least significant bit on, so that each doubling concatenates two contiguous blocks.
        for bit in reversed(range(bits)):
            joint = torch.cat((joint * zero[:, bit, None], joint * one[:, bit, None]), dim=1)
        ctx.save_for_backward(joint, zero, one)
        return joint

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        joint, zero, one = ctx.saved_tensors
        # ∂p(code)/∂logit is p(code) p(0) if the code has the bit, else -p(code) p(1). The two sums are kept apart:
        # otherwise the tiny gradient of a confident bit would be the difference of two large numbers.
        codes = torch.arange(joint.shape[1], device=joint.device)
        bits = (codes >> torch.arange(zero.shape[1] - 1, -1, -1, device=joint.device)[:, None]) & 1
        with_bit, without = torch.matmul(torch.cat((bits, 1 - bits)).to(joint), grad * joint).chunk(2, dim=1)
        return zero * with_bit - one * without


def entropy(probabilities: Tensor) -> Tensor:
    """Return ``-Σ p log p`` over the last dimension, in nats; ``(..., K)`` → ``(...)``.

    A zero adds exactly 0 to the value and to the gradient: the inner `where` keeps it out of the logarithm. A clamp
    would change both.
    """
    positive = probabilities != 0
    log = torch.where(positive, torch.where(positive, probabilities, 1.0).log(), 0.0)
    return -(probabilities * log).sum(dim=-1)


def entropy_gap(mass: Tensor, tokens: Tensor) -> Tensor:
    """Return ``log K - H(mean distribution over codes)`` in nats; 0 without tokens.

    Args:
        mass: ``(C, K)`` sum of the tokens' distributions.
        tokens: () number of tokens.

    Returns:
        ``(C,)`` float64, at least 0.
    """
    gap = math.log(mass.shape[-1]) - entropy(mass.double() / tokens.clamp(min=1))
    # Rounding can make a gap of 0 slightly negative.
    return torch.where(tokens > 0, gap, 0.0).clamp(min=0)
