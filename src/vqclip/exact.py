"""Ids that rounding does not decide: where it could, a sample is encoded again in float64.

    features in float32 ─→ ids ─→ in doubt? ── no ──→ ids
                                      └── yes ─→ features in float64 ─→ ids

Floating-point sums come in another order in another batch, on another device and in another runtime. Features then
differ in their last bits, and one that lies so near a border between two codes gets the other code: one id in some
hundred thousand. In float64 that takes a feature a billion times nearer, but float64 costs several times as much. So
only the samples in doubt are encoded in it, as predicates of computational geometry are decided exactly only where
rounding could change them (Shewchuk 1997, https://doi.org/10.1007/PL00009321).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.precision import without_tf32
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

__all__ = ["TOLERANCE", "Doubting", "ExactEncoder", "in_float64", "settled"]

TOLERANCE = 32 * torch.finfo(torch.float32).eps
"""How far from its float64 value a feature in float32 may lie, of the largest feature of the sample: units of float32's
precision. Trained towers stay within 29, and within 1.4 in the mean (``benchmarks/exact.py``)."""

_FAR = 8.0
"""Times the tolerance; more is no rounding of float32's. TF32 comes to hundreds."""

_SIGNS = ((1.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, -1.0), (1.0, 1.0, -1.0, -1.0))
"""Of the shifts, repeated over the channels; each is gone both ways. One would do where each channel is rounded by
itself, as in FSQ, LFQ and BSQ; in a codebook of vectors a border may run along one of them, hardly along all."""

ArrayT = TypeVar("ArrayT", bound=Any)


class ExactEncoder:
    """Encodes like its tokenizer, but to the same ids in every batch, on every device and in every runtime.

    For FSQ, LFQ and BSQ, alone, in a `Product` or as stages of a `Residual`, ids are those of features in float64,
    as long as features in float32 lie within `TOLERANCE` of them. For VQ and SimVQ a few borders are missed.

    Args:
        tokenizer: in evaluation mode, with weights in float32. A copy of it in float64 is kept: twice its memory more.

    Raises:
        ConfigError: the weights are in another type, the device has no float64, or the tokenizer has no codes.
    """

    def __init__(self, tokenizer: ImageTokenizer | TextTokenizer):
        self.tokenizer = tokenizer
        self.doubting = Doubting(tokenizer)
        self.float64 = in_float64(tokenizer)

    def encode(self, inputs: Any) -> Tensor:
        """What the tokenizer's own ``encode`` takes → ids ``(B, N, C)`` int64.

        Raises:
            ShapeError: as the tokenizer does.
            ConfigError: features lie so far from their float64 values that no tolerance can have covered them.
        """
        batch = self.tokenizer.batch(inputs)
        with torch.no_grad(), without_tf32(batch.device):
            return settled(self.doubting, self._settle, batch)

    def _settle(self, batch: Tensor) -> Tensor:
        """The ids of samples in doubt, from features in float64."""
        narrow, mask = self.doubting.features(batch)
        wide, _ = self.float64.features(batch)
        if mask is not None:
            wide = wide.masked_fill(~mask.unsqueeze(-1), 0)
        error = float(((narrow - wide).abs() / _reach(narrow)).amax())
        if not error <= _FAR:  # NaN is not
            raise ConfigError(
                f"exact ids: got features in float32 {error:.3g} times the tolerance away from their values in "
                "float64, expected hardly ever more than 1: does the tower compute part of them in a narrower type?"
            )
        return self.float64.quantizer.encode(wide, mask)


class Doubting(nn.Module):
    """Encodes in float32, and says which samples rounding could decide otherwise; a module, for `torch.export`.

    Args:
        tokenizer: what encodes.
    """

    shifts: Tensor

    def __init__(self, tokenizer: ImageTokenizer | TextTokenizer):
        super().__init__()
        _require_float32(tokenizer)
        self.tokenizer = tokenizer
        signs = torch.tensor(_SIGNS, device=tokenizer.device)
        shifts = torch.cat([torch.zeros_like(signs[:1]), signs, -signs])
        channels = torch.arange(tokenizer.quantizer.dim, device=tokenizer.device) % signs.shape[1]
        self.register_buffer("shifts", shifts[:, None, None, channels], persistent=False)

    def features(self, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the quantizer is given, ``(B, N, D)``, 0 where masked, and the mask ``(B, N)`` or None."""
        features, mask = self.tokenizer.features(batch)
        return (features if mask is None else features.masked_fill(~mask.unsqueeze(-1), 0)), mask

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the tokenizer's tower → ids ``(B, N, C)`` int64, and which samples are in doubt, ``(B,)`` bool.

        A sample is, if an id changes where its features move by the tolerance, or if they hold NaN.
        """
        features, mask = self.features(batch)
        reach = _reach(features)
        shifted = features + self.shifts * reach  # (shifts, B, N, D), the first of them 0
        masks = mask if mask is None else mask.expand(shifted.shape[:-1])
        ids, *others = self.tokenizer.quantizer.encode(shifted, masks).unbind()
        changed = torch.stack([other != ids for other in others])
        return ids.contiguous(), changed.any(dim=0).flatten(1).any(dim=1) | reach.isnan().flatten()


def in_float64(tokenizer: ImageTokenizer | TextTokenizer) -> ImageTokenizer | TextTokenizer:
    """A copy in float64.

    Raises:
        ConfigError: as in `ExactEncoder`.
    """
    _require_float32(tokenizer)
    return copy.deepcopy(tokenizer).double()


def settled(
    first: Callable[[ArrayT], tuple[ArrayT, ArrayT]], second: Callable[[ArrayT], ArrayT], batch: ArrayT
) -> ArrayT:
    """The ids of ``first``, of the samples in doubt those of ``second``; of torch's tensors or of numpy's arrays.

    Args:
        first: a batch → ids ``(B, ...)`` and which samples are in doubt ``(B,)``.
        second: a batch of those samples → their ids.
        batch: ``(B, ...)``.
    """
    ids, doubtful = first(batch)
    if bool(doubtful.any()):
        ids[doubtful] = second(batch[doubtful])
    return ids


def _require_float32(tokenizer: ImageTokenizer | TextTokenizer) -> None:
    weights = next(tokenizer.parameters())
    if weights.dtype != torch.float32 or weights.device.type == "mps":
        raise ConfigError(
            f"exact ids: got weights in {weights.dtype} on {weights.device}, expected float32 on a device that has "
            "float64: tokenizer.float(), on the CPU or a CUDA GPU"
        )
    if not tokenizer.codebook_sizes:
        raise ConfigError(f"exact ids: the {tokenizer.modality} tokenizer's quantizer has no codes to encode to")


def _reach(features: Tensor) -> Tensor:
    """``(B, N, D)`` → ``(B, 1, 1)``: how far a feature may be off."""
    return TOLERANCE * features.abs().amax(dim=(1, 2), keepdim=True)
