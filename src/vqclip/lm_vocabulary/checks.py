"""Checks of the arguments of vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.inputs import to_int64

INT64_IDS = 2**63
"""Number of ids from 0 that int64 has."""


def require_codebooks(sizes: Sequence[int]) -> None:
    """Check that there is a codebook, and none is empty; raise ConfigError otherwise."""
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"codebook sizes: got {tuple(sizes)}, expected at least one codebook of at least one code: a tokenizer's "
            "codebook_sizes (Identity has none)"
        )


def require_room(sizes: Sequence[int], offset: int) -> None:
    """Check that ids from ``offset``, one for each code, fit int64; raise ConfigError otherwise."""
    if offset < 0:
        raise ConfigError(f"offset: got {offset}, expected 0 or more")
    if offset + sum(sizes) > INT64_IDS:
        raise ConfigError(
            f"vocabulary: {len(sizes)} codebooks of together {sum(sizes)} codes from id {offset} do not fit int64 ids "
            f"(at most {INT64_IDS}); train a Product of smaller codebooks, or use DelayedCodes, whose streams have "
            "ids of their own"
        )


def require_integers(name: str, ids: Tensor, ndim: int, shape: str) -> Tensor:
    """Return integers of any type as int64.

    Raises:
        ShapeError: for anything but a tensor of integers with ``ndim`` axes; ``shape`` describes what is expected.
    """
    if not isinstance(ids, Tensor):
        raise ShapeError(
            f"{name}: got a {type(ids).__name__}, expected an int64 tensor {shape}; torch.tensor makes one"
        )
    if ids.ndim != ndim:
        raise ShapeError(f"{name}: got shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers {shape}")
    return to_int64(name, ids, shape)


def require_codes(ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return ids ``(B, N, C)`` of a tokenizer as int64.

    Raises:
        ShapeError: for another shape or dtype, or an id outside its codebook.
    """
    wide = require_integers("ids", ids, 3, f"(B, N, {len(sizes)})")
    if ids.shape[-1] != len(sizes):
        raise ShapeError(f"ids: got shape {tuple(ids.shape)}, expected (B, N, {len(sizes)}): one id per codebook")
    largest = torch.tensor([size - 1 for size in sizes], device=ids.device)
    require_all((wide >= -1) & (wide <= largest), wide, "ids", [f"0 to {size - 1}, or -1 for none" for size in sizes])
    return wide


def require_all(good: Tensor, ids: Tensor, name: str, expected: Sequence[str]) -> None:
    """Raise ShapeError for the first id that is not ``good``; ``expected`` describes good ids of each codebook."""
    if not bool(good.all()):
        place = [int(index) for index in (~good).nonzero()[0]]
        got = int(ids[tuple(place)])
        raise ShapeError(f"{name}{place}: got id {got}, expected codebook {place[-1]}: {expected[place[-1]]}")
