"""What the losses share: checks, and the features of all ranks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError, ShapeError

Implementation = Literal["tiled", "ring", "gather"]
"""``tiled``: logits a few rows at a time, gradients computed in forward; memory grows with the batch.
``ring``: the same without all texts on every rank, for up to twice the traffic.
``gather``: the readable reference, with all G × G logits on every rank."""

Positives = Literal["sample_id", "caption"]
"""What tells that two pairs of a batch are no negatives of each other: the same sample (one place in one source, which
a batch holds twice where epochs meet or weights repeat it), or the same text tokens. They are left out of each other's
sums, not drawn together."""


def check_implementation(name: str) -> None:
    """Raises: ConfigError: there is none of that name."""
    if name not in get_args(Implementation):
        raise ConfigError(f"impl: got {name!r}, expected one of {', '.join(get_args(Implementation))}")


def pair_keys(positives: Positives | None, sample_ids: Tensor, tokens: Tensor) -> Tensor | None:
    """``(B,)`` int64, equal where two pairs are no negatives of each other; None for None.

    Args:
        positives: what tells.
        sample_ids: ``(B,)`` int64.
        tokens: ``(B, N)`` int64, the texts. Their key is a polynomial of 64 bits: two texts of a batch share one by
            accident with a probability of about 2^-64, and are then no negatives of each other.
    """
    if positives is None:
        return None
    if positives == "sample_id":
        return sample_ids
    powers = torch.full_like(tokens[:1], _MULTIPLIER).cumprod(dim=1)
    return (_mix_bits(tokens + 1) * powers).sum(dim=1)


_MULTIPLIER = 6364136223846793005
"""Knuth's, of his 64-bit linear congruential generator (MMIX)."""


def _mix_bits(x: Tensor) -> Tensor:
    """Spread the bits of small numbers over all 64; products wrap around."""
    x = x * _MULTIPLIER
    return (x ^ (x >> 32)) * _MULTIPLIER


def check_keys(positives: Positives | None, keys: Tensor | None) -> None:
    """Raises: ConfigError: keys were asked for and are not there."""
    if positives is not None and keys is None:
        raise ConfigError(f"loss.positives: got {positives!r}, but no keys were passed; expected those of pair_keys()")


def to_full_precision(image: Tensor, text: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Both ``(B, E)`` features in fp32 (fp64 for fp64).

    Raises:
        ShapeError: the two do not pair up, or there is not one key for each pair.
    """
    if image.ndim != 2 or image.shape != text.shape:
        raise ShapeError(
            f"features: got image {tuple(image.shape)} and text {tuple(text.shape)}, expected (B, E) for both"
        )
    if keys is not None and (keys.shape != image.shape[:1] or keys.dtype != torch.int64):
        raise ShapeError(
            f"keys: got {tuple(keys.shape)} of {keys.dtype}, expected ({len(image)},) of torch.int64: one for each pair"
        )
    dtype = torch.float64 if torch.float64 in (image.dtype, text.dtype) else torch.float32
    return image.to(dtype), text.to(dtype)


def check_scalars(**numbers: Tensor) -> None:
    """Raises ShapeError: a scale or bias has dimensions."""
    for name, number in numbers.items():
        if number.ndim:
            raise ShapeError(f"{name}: got shape {tuple(number.shape)}, expected (): pass {name}.squeeze()")


def false_negatives(keys: Tensor, group: dist.Group = None) -> Tensor:
    """``(G, G)`` bool: two different pairs of equal keys. A collective."""
    keys = dist.all_gather(keys, group=group)
    same = keys[:, None] == keys
    return same.fill_diagonal_(False)


def gather_features(image: Tensor, text: Tensor, group: dist.Group = None) -> tuple[Tensor, Tensor]:
    """Both ``(B, E)`` features of all ranks, ``(G, E)`` each, with their gradients."""
    image, text = dist.all_gather(torch.stack([image, text], dim=1), group=group).unbind(1)  # one collective for both
    return image, text
