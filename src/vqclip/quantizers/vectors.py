"""Arithmetic on vectors, ids, their prefixes and counts of codes for all quantizers (C codebooks with K codes each)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from vqclip.errors import ConfigError
from vqclip.nn.precision import gpu_memory

SHORT = 1e-6
"""Shorter vectors have no direction."""
CHUNK = 2**20
"""Scores (tokens × codes) that a CPU computes at a time: 4 MiB in float32."""
MAX_COUNTED_CODES = 2**20
"""Codebooks with more codes are not counted, because of the size of the histogram."""


class Prefix(NamedTuple):
    """The first stages of every `Residual` and the first codebooks of every `Product`.

    Stages of nested `Residual` and codebooks of nested `Product` are counted through, outermost first.
    """

    stages: int
    """Number of stages, at least 1; 0 without codes."""
    codebooks: int
    """Number of codebooks of a stage, at least 1; 0 without codes."""

    def __str__(self) -> str:
        words = (("stage", self.stages), ("codebook", self.codebooks))
        return ", ".join(f"{number} {word}{'s' * (number > 1)}" for word, number in words)

    def shorter(self) -> list[Prefix]:
        """Return the prefixes to evaluate: by stages with all codebooks, by codebooks with all stages, and this one.

        Numbers of stages and of codebooks are 1, 2, 3, ... up to 8, or 1, 2, 4, ... of more. Without codes there is no
        prefix.
        """
        counts = [{most, *(n for n in range(1, most) if most <= 8 or n.bit_count() == 1)} for most in self]
        found = {Prefix(number, self.codebooks) for number in counts[0]}
        found |= {Prefix(self.stages, number) for number in counts[1]}
        # By stages, then by codebooks.
        return sorted(
            (each for each in found if min(each)),
            key=lambda each: (each == self, each.codebooks < self.codebooks, each),
        )

    def share(self, of: Prefix, to: Prefix) -> Prefix:
        """Return the prefix that is the same share of ``to`` as this one is of ``of``, rounded up."""
        stages, codebooks = (-(-part * new // old) for part, old, new in zip(self, of, to, strict=True))
        return Prefix(stages, codebooks)


def tokens_at_a_time(device: torch.device, numbers: int, most: int) -> int:
    """Return the number of tokens to compute at a time, at least 64.

    Args:
        device: where.
        numbers: float32 numbers of a token.
        most: numbers at a time on a CPU; a GPU takes a 64th of its memory.
    """
    if (memory := gpu_memory(device)) is not None:
        most = memory // 256
    return max(64, most // numbers)


def unit(x: Tensor) -> Tensor:
    """Scale ``(..., D)`` to length 1; vectors shorter than 1e-6 become 0, so that the gradient does not explode.

    A large vector is divided by a power of two first, which is exact, so that its square does not overflow.
    """
    x = x * torch.where(x.detach().abs().amax(dim=-1, keepdim=True) > 2.0**60, 2.0**-70, 1.0).to(x.dtype)
    length = x.norm(dim=-1, keepdim=True)
    return x / length.masked_fill(length < SHORT, torch.inf)


def check_channels(name: str, channels: int, least: int = 2) -> None:
    """Check that vectors have enough channels to be normalised.

    Raises:
        ConfigError: normalising would leave only a sign, without a gradient.
    """
    if channels < least:
        raise ConfigError(
            f"{name}: got {channels} channel{'s' * (channels > 1)}, of which only a sign would be left, without a "
            f"gradient; expected at least {least}, or no normalisation"
        )


def straight_through(quantized: Tensor, x: Tensor) -> Tensor:
    """Return ``quantized``, bit for bit, with the gradient of ``x``; NaN where ``x`` is NaN (Bengio et al. 2013).

    Computed as ``quantized + (x - x.detach())``: the usual ``x + (quantized - x).detach()`` rounds.
    """
    return (x - x.detach()).add_(quantized)


def squared_error(a: Tensor, b: Tensor, keep: Tensor | None) -> Tensor:
    """Sum the squared difference of two ``(T, G, D)`` over tokens, averaged over channels → ``(G,)``."""
    error = reduce((a - b).square(), "t g d -> t g", "mean")
    if keep is not None:
        error = error.masked_fill(~keep[:, None], 0)
    return error.sum(dim=0)


def ids_from_digits(digits: Tensor, bases: Sequence[int]) -> Tensor:
    """Convert mixed-radix digits, least significant first, to ids: ``(..., d)`` integer or bool → ``(...)`` int64.

    Horner's rule on integers: exact up to 2^63 codes, and faster than a sum over so short a dimension.
    """
    *lower, highest = digits.unbind(-1)
    ids = highest.to(torch.int64, copy=True)
    for digit, base in zip(reversed(lower), reversed(bases[:-1]), strict=True):
        ids.mul_(base).add_(digit)
    return ids


def histogram(ids: Tensor, size: int) -> Tensor:
    """Count every code.

    The shape of the result depends only on ``size``, so it compiles without a graph break, unlike `torch.bincount`.

    Args:
        ids: ``(T, C)`` int64 in ``[0, size)``, or negative for tokens to ignore.
        size: K, the codes in each codebook.

    Returns:
        ``(C, K)`` int64.
    """
    codebooks = ids.shape[1]
    bins = ids.clamp(min=0) + size * torch.arange(codebooks, device=ids.device)
    counts = torch.zeros(codebooks * size, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, bins.flatten(), (ids >= 0).long().flatten()).view(codebooks, size)


def sums_by_code(x: Tensor, ids: Tensor, size: int) -> Tensor:
    """Sum the vectors of each code, in their order also on a GPU (the order of `index_add` is not deterministic).

    Args:
        x: ``(T, C, D)`` vectors.
        ids: ``(T, C)`` int64 in ``[0, size)``, or negative for tokens to ignore.
        size: K, the codes in each codebook.

    Returns:
        ``(C, K, D)``.
    """
    codebooks, dim = x.shape[1:]
    # An additional code in each codebook collects the ignored tokens.
    bins = ids.where(ids >= 0, size) + (size + 1) * torch.arange(codebooks, device=ids.device)
    counts = histogram(bins.reshape(-1, 1), codebooks * (size + 1)).flatten()
    rows = bins.flatten().argsort(stable=True)
    sums = F.embedding_bag(rows, x.reshape(-1, dim), counts.cumsum(0) - counts, mode="sum")
    return sums.view(codebooks, size + 1, dim)[:, :size]


def summary(name: str, each: Tensor, used: Tensor | None = None) -> Tensor:
    """Reduce a metric of several codebooks or stages to its sum, maximum or mean, depending on the name.

    Args:
        name: of the metric.
        each: ``(C,)``, at least 0.
        used: ``(C,)`` bool, True for those that count, at least one of them; None: all do.
    """
    each = each if used is None else each.where(used, 0)
    if name == "bits_used":
        return each.sum()
    if name == "oldest":
        return each.max()
    return each.mean() if used is None else each.sum() / used.sum()
