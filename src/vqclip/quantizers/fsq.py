"""Quantizers without anything to learn: FSQ rounds every channel to one of a few levels, Identity none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vqclip.config import Config
from vqclip.config.bounds import MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.precision import constant, first_derivative_only
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.vectors import ids_from_digits

MARGIN = 1e-3  # distance of the bound from the outermost levels, relative to their range (Mentzer et al.)
MAX_LEVELS = 1000  # with more, the margin would exceed half a step

Layout = Literal["original", "symmetric", "uniform"]
"""Positions of the levels; see `FSQ`."""


class FSQ(Quantizer):
    """Finite Scalar Quantization (Mentzer et al. 2023, https://arxiv.org/abs/2309.15505).

    Channel i is bounded by tanh and rounded to one of ``levels[i]`` values. The codebook is the product of the levels;
    it is not stored, cannot collapse and needs no auxiliary loss:

        bounded = tanh(x / width + shift) · reach - offset, in units of the levels   # `_Squash`
        digit   = round(bounded)                      # 0 .. L - 1 in every channel
        value   = (digit - zero) / unit               # the quantized vector
        id      = digit_0 + L_0 (digit_1 + L_1 (...)) # channel 0 is the least significant digit

    Positions of the L levels of a channel:

    - ``original``: ``-1, ..., 0, ..., 1``, or ``-1, ..., 0, ..., 1 - 2/L`` for an even L. Codes and ids equal those of
      vector-quantize-pytorch's ``FSQ(levels)``. With 2 levels (refused there) the threshold is at 0.
    - ``symmetric``: evenly spaced from -1 to 1 (Parker et al. 2024, https://arxiv.org/abs/2411.19842), its
      ``preserve_symmetry``. The outermost levels cover half the range of the others.
    - ``uniform``: like ``symmetric``, but the bounded value may exceed the outermost levels by half a step, so that all
      levels cover equal ranges. The remainder then fits a next stage exactly: for `Residual`, its ``ResidualFSQ``.

    Args:
        levels: L of every channel, each 2 to 1000; the paper recommends at least 5. Good choices for K of about 2^8,
            2^10, 2^12, 2^14, 2^16: ``(8, 6, 5)``, ``(8, 5, 5, 5)``, ``(7, 5, 5, 5, 5)``, ``(8, 8, 8, 6, 5)``,
            ``(8, 8, 8, 5, 5, 5)``.
        layout: positions of the levels.

    Raises:
        ConfigError: no levels, a number of levels out of range, more codes than int64 can count, or unknown layout.
    """

    def __init__(self, levels: Sequence[int], layout: Layout = "original"):
        if not levels:
            raise ConfigError("FSQ: levels is empty, expected one number of levels per channel, such as (8, 5, 5, 5)")
        for channel, count in enumerate(levels):
            if not 2 <= count <= MAX_LEVELS or int(count) != count:
                raise ConfigError(f"FSQ: levels[{channel}] is {count}, expected a whole number from 2 to {MAX_LEVELS}")
        if layout not in get_args(Layout):
            raise ConfigError(f"FSQ: layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
        self.levels = tuple(map(int, levels))
        """L of every channel."""
        super().__init__(dim=len(levels), codebook_sizes=(math.prod(self.levels),))
        self.layout = layout

    @property
    def refinement(self) -> tuple[float, ...] | None:
        """The range of each channel divided by the rounding error; None for layouts whose levels do not fit it."""
        return self.levels if self.layout == "uniform" else None

    def _bound(self, x: Tensor) -> Tensor:
        return _Squash.apply(x, *(self._wide(each, x) for each in self._curve(x.device, x.dtype)))

    def _curve(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return width, shift, reach, offset and unit of `_Squash`, each ``(D,)``."""
        levels = constant(self.levels, device)
        one, zero = torch.ones_like(levels), torch.zeros_like(levels)
        if self.layout == "symmetric":
            return one, zero, one, zero, one
        if self.layout == "uniform":
            reach = levels / (levels - 1)
            return reach, zero, reach, zero, one
        reach = (levels - 1).to(dtype) * (1 + MARGIN) / 2
        offset = torch.where(levels % 2 == 0, 0.5, 0.0).to(dtype)
        # With 2 levels this shift would put the threshold at -3.8, out of reach of activations.
        shift = torch.where(levels == 2, 0.0, torch.atanh(offset / reach))
        return one, shift, reach, offset, levels // 2

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            levels = constant(self.levels, bounded.device)
            unit = self._wide(self._unit(levels), bounded)
            if self.layout == "original":
                digits = (bounded * unit).round_().add_(unit)
            else:  # an even number of levels has 0 between two of them: rounded up, as vector-quantize-pytorch does
                digits = (bounded + 1).mul_(unit).add_(0.5).floor_()
            digits = digits.nan_to_num_(0).clamp_(torch.zeros_like(unit), self._wide(levels - 1, bounded))
            ids = ids_from_digits(digits.to(torch.int32), self.levels)
            return self._values(digits, unit), ids.unsqueeze(-1)

    def _decode(self, ids: Tensor) -> Tensor:
        rest, digits = ids.squeeze(-1).clamp(min=0), []
        for base in self.levels:
            digits.append(rest % base)
            rest = rest // base
        every = torch.stack(digits, dim=-1)
        unit = self._wide(self._unit(constant(self.levels, ids.device)), every)
        return self._values(every, unit).masked_fill(ids < 0, 0)

    @staticmethod
    def _values(digits: Tensor, unit: Tensor) -> Tensor:
        """Return the values of ``(T, G, D)`` digits ``0, ..., L - 1`` in float32, for encoding and decoding."""
        unit = unit.float()
        return digits.float().sub_(unit).div_(unit)

    def _unit(self, levels: Tensor) -> Tensor:
        """Return ``(D,)``: digits per unit of the value, which is also the (half-integer) digit of the value 0."""
        return levels // 2 if self.layout == "original" else (levels - 1) / 2

    @staticmethod
    def _wide(each: Tensor, like: Tensor) -> Tensor:
        """Expand ``(D,)`` to ``(G, D)``: torch broadcasts slowly over an inner dimension as small as D."""
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return each.to(dtype).expand(like.shape[1:]).contiguous()


class _Squash(torch.autograd.Function):
    """``(tanh(x / width + shift) * reach - offset) / unit`` with half the memory of the plain expression."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, width: Tensor, shift: Tensor, reach: Tensor, offset: Tensor, unit: Tensor
    ) -> Tensor:
        squashed = torch.addcdiv(shift, x, width).tanh_()
        ctx.save_for_backward(squashed, reach / (unit * width))
        # The last operation makes a new tensor: torch 2.11 compiles one that is changed in place to a wrong gradient.
        return (squashed * reach).sub_(offset) / unit

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        squashed, slope = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, squashed).mul_(slope), None, None, None, None, None


class FSQConfig(Config):
    """Finite scalar quantization: one codebook, whose size is the product of ``levels``."""

    kind: Literal["fsq"] = "fsq"
    levels: Annotated[tuple[Annotated[int, Field(ge=2, le=MAX_LEVELS)], ...], Field(min_length=1)] = (8, 5, 5, 5)
    """Number of levels of each channel; their product is the codebook size, their count the quantizer's width."""
    layout: Layout = "original"
    """Positions of the levels: original; symmetric (evenly from -1 to 1); uniform (equal ranges, for residual
    quantization)."""

    @model_validator(mode="after")
    def _fits_int64(self) -> FSQConfig:
        self.build()
        return self

    def build(self) -> FSQ:
        """Make the quantizer."""
        return FSQ(self.levels, self.layout)


class Identity(Quantizer):
    """Returns its input, 0 where masked: the baseline without a bottleneck of codes.

    It has no codebook: ids have shape ``(..., 0)`` and cannot be decoded.

    Args:
        dim: D, the width of the vectors, at least 1.

    Raises:
        ConfigError: ``dim`` is less than 1.
    """

    def __init__(self, dim: int):
        if dim < 1:
            raise ConfigError(f"Identity: dim is {dim}, expected at least 1")
        super().__init__(dim=dim, codebook_sizes=())

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        return bounded.detach(), bounded.new_empty((*bounded.shape[:-1], 0)).long()

    def _decode(self, ids: Tensor) -> Tensor:
        raise ShapeError("Identity has no codebook, so ids cannot be decoded; use FSQ or LFQ for discrete tokens")


class IdentityConfig(Config):
    """No quantization: the continuous baseline."""

    kind: Literal["identity"] = "identity"
    dim: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """Width of the vectors."""

    def build(self) -> Identity:
        """Make the quantizer."""
        return Identity(self.dim)
