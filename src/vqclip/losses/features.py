"""Checks and the gathering of features, for all losses."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError, ShapeError

Implementation = Literal["tiled", "ring", "gather"]
"""``tiled``: logits in tiles, gradients computed in forward; memory grows with the batch.
``ring``: like ``tiled``, without all texts on every rank, with up to twice the traffic.
``gather``: the readable reference, with all G × G logits on every rank."""

Positives = Literal["sample_id", "caption"]
"""Rule for pairs that are not negatives of each other: the same sample (which a batch contains twice at the border of
two epochs, or when a weight repeats it), or the same text tokens. They are left out of each other's sums, but are not
made positives."""


def check_implementation(name: str) -> None:
    """Check the name of an implementation.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in get_args(Implementation):
        raise ConfigError(f"impl: got {name!r}, expected one of {', '.join(get_args(Implementation))}")


def pair_keys(positives: Positives | None, sample_ids: Tensor, tokens: Tensor) -> Tensor | None:
    """Return ``(B,)`` int64 keys, equal for pairs that are not negatives of each other; None for None.

    Args:
        positives: the rule.
        sample_ids: ``(B,)`` int64.
        tokens: ``(B, N)`` int64, the texts. Their key is a 64-bit polynomial hash: two different texts have equal keys
            with a probability of about 2^-64, and are then not negatives of each other.
    """
    if positives is None:
        return None
    if positives == "sample_id":
        return sample_ids
    powers = torch.full_like(tokens[:1], _MULTIPLIER).cumprod(dim=1)
    return (_mix_bits(tokens + 1) * powers).sum(dim=1)


_MULTIPLIER = 6364136223846793005
"""Multiplier of Knuth's 64-bit linear congruential generator (MMIX)."""


def _mix_bits(x: Tensor) -> Tensor:
    """Spread the bits of small numbers over all 64 bits; products wrap around."""
    x = x * _MULTIPLIER
    return (x ^ (x >> 32)) * _MULTIPLIER


def check_keys(positives: Positives | None, keys: Tensor | None) -> None:
    """Check that keys were passed if the configuration needs them.

    Raises:
        ConfigError: they are missing.
    """
    if positives is not None and keys is None:
        raise ConfigError(f"loss.positives: got {positives!r}, but no keys were passed; expected those of pair_keys()")


def to_full_precision(image: Tensor, text: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Check both ``(B, E)`` features and return them in fp32 (fp64 for fp64).

    Raises:
        ShapeError: the two shapes differ, or there is not one key for each pair.
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
    """Check that scales and biases are scalars.

    Raises:
        ShapeError: one has dimensions.
    """
    for name, number in numbers.items():
        if number.ndim:
            raise ShapeError(f"{name}: got shape {tuple(number.shape)}, expected (): pass {name}.squeeze()")


def false_negatives(keys: Tensor) -> Tensor:
    """Return ``(G, G)`` bool, True for two different pairs with equal keys. A collective."""
    keys = dist.all_gather(keys)
    same = keys[:, None] == keys
    return same.fill_diagonal_(False)


def gather_features(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Gather both ``(B, E)`` features of all ranks, ``(G, E)`` each, with their gradients. A collective."""
    image, text = dist.all_gather(torch.stack([image, text], dim=1)).unbind(1)  # one collective for both
    return image, text
