"""Finite scalar quantization: round every channel to one of a few levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer, ids_from_digits, straight_through

MARGIN = 1e-3  # how far the bounded value reaches beyond the outermost levels, of their range (Mentzer et al.)
MAX_LEVELS = 1000  # beyond, the margin would reach past the rounding of the outermost level


class FSQ(Quantizer):
    """Finite Scalar Quantization (Mentzer et al. 2023, https://arxiv.org/abs/2309.15505).

    Channel i is squashed by tanh and rounded to one of ``levels[i]`` values; the product of the levels is the codebook.
    No codebook is stored, there is nothing to collapse and no auxiliary loss.

    Codes and ids are those of vector-quantize-pytorch's ``FSQ(levels)``: an odd number of levels L gives the values
    ``-1, ..., 0, ..., 1``, an even one ``-1, ..., 0, ..., 1 - 2/L``; channel 0 is the least significant digit of the
    id. With 2 levels (refused there) the threshold is at 0, between the values -1 and 0.

    Args:
        levels: L of every channel, each 2 to 1000; the paper advises 5 and more. Good mixes for K of about 2^8, 2^10,
            2^12, 2^14, 2^16: ``(8, 6, 5)``, ``(8, 5, 5, 5)``, ``(7, 5, 5, 5, 5)``, ``(8, 8, 8, 6, 5)``,
            ``(8, 8, 8, 5, 5, 5)``.

    Raises:
        ConfigError: no levels, a number of levels out of range, or more codes than int64 can count.
    """

    levels: Tensor

    def __init__(self, levels: Sequence[int]):
        _check_levels(levels)
        super().__init__(dim=len(levels), codebook_sizes=(math.prod(levels),))
        # Integers, for `.bfloat16()` leaves these alone; not saved, for they are configuration.
        self.register_buffer("levels", torch.tensor(levels, dtype=torch.int64), persistent=False)
        self._bases = tuple(levels)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        reach, offset, shift, half = self._constants(x)
        squashed = torch.tanh(x + shift)
        codes, ids = self._round(squashed, reach, offset, half)
        return straight_through(codes.to(x.dtype), squashed * (reach / half)), ids.unsqueeze(-1)

    def _round(self, squashed: Tensor, reach: Tensor, offset: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        """Values in [-1, 1] → codes ``(T, G, D)``, NaN for NaN, and ids ``(T, G)``."""
        with torch.no_grad():
            digits = (squashed * reach).sub_(offset).round_().add_(half)
            codes = self._codes(digits)
            ids = ids_from_digits(digits.nan_to_num_(0).to(torch.int32), self._bases)
        return codes, ids

    def _decode(self, ids: Tensor) -> Tensor:
        rest, digits = ids.squeeze(-1).clamp(min=0), []
        for base in self._bases:
            digits.append(rest % base)
            rest = rest // base
        return self._codes(torch.stack(digits, dim=-1)).masked_fill(ids < 0, 0)

    def _continuous(self, x: Tensor) -> Tensor:
        reach, offset, shift, half = self._constants(x)
        return (torch.tanh(x + shift) * reach - offset) / half

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What bounds a channel: ``tanh(x + shift) * reach - offset`` rounds to ``-half, ..., L - 1 - half``; 0 to 0.

        Each ``(G, D)``, for `torch` is slow to broadcast over an inner dimension as small as D.
        """
        even = self.levels % 2 == 0
        reach = (self.levels - 1).to(x.dtype) * (1 + MARGIN) / 2
        offset = torch.where(even, 0.5, 0.0).to(x.dtype)
        # At 2 levels this shift would put the threshold at -3.8, where no activation ever is.
        shift = torch.where(self.levels == 2, 0.0, torch.atanh(offset / reach))
        half = (self.levels // 2).to(x.dtype)
        reach, offset, shift, half = (c.expand(x.shape[1:]).contiguous() for c in (reach, offset, shift, half))
        return reach, offset, shift, half

    def _codes(self, digits: Tensor) -> Tensor:
        """``(..., D)`` digits, ``0, ..., L - 1`` → code values in float32: the one place where they are computed."""
        half = (self.levels // 2).float().expand(digits.shape[1:]).contiguous()
        return (digits - half).float().div_(half)


class FSQConfig(Config):
    """Finite scalar quantization: one codebook of as many codes as the product of ``levels``."""

    kind: Literal["fsq"] = "fsq"
    levels: Annotated[tuple[Annotated[int, Field(ge=2, le=MAX_LEVELS)], ...], Field(min_length=1)] = (8, 5, 5, 5)
    """Number of levels of each channel; their product is the codebook size, their count the quantizer's width."""

    @model_validator(mode="after")
    def _fits_int64(self) -> FSQConfig:
        _check_levels(self.levels)
        return self

    def build(self) -> FSQ:
        """Make the quantizer."""
        return FSQ(self.levels)


def _check_levels(levels: Sequence[int]) -> None:
    if not levels:
        raise ConfigError("FSQ: levels is empty, expected one number of levels per channel, such as (8, 5, 5, 5)")
    for channel, count in enumerate(levels):
        if not 2 <= count <= MAX_LEVELS:
            raise ConfigError(f"FSQ: levels[{channel}] is {count}, expected 2 to {MAX_LEVELS}")
    if math.prod(levels) > 2**63:
        raise ConfigError(
            f"FSQ: levels {tuple(levels)} make {math.prod(levels)} codes, which do not fit int64 ids (at most 2^63); "
            "split the channels over several codebooks with Product"
        )
