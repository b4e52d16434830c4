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
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError, NonFiniteError
from vqclip.precision import without_tf32
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

__all__ = ["Doubting", "ExactEncoder", "drawn_inputs", "in_float64", "settled"]

AnyTokenizer = ImageTokenizer | TextTokenizer

_ROUNDING = torch.finfo(torch.float32).eps
"""Of the sample's largest feature: how far trained towers are off in the mean (``benchmarks/exact.py``)."""
_REACH = 32
"""Times that error, or the tokenizer's own where it is larger: the tolerance. Of a million features, trained towers had
none off by more than 23 times their mean error."""
_FAR = 8
"""Times the tolerance: what no rounding explains."""
_NARROW = 2.0**-12
"""A mean error that float32 does not make; TF32 and bfloat16 do."""
_MEASURED = 4
"""Samples that the tokenizer's own error is measured on."""
_SIGNS = ((1.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, -1.0), (1.0, 1.0, -1.0, -1.0))
"""Of the shifts, repeated over the channels; each is gone both ways. One would do where each channel is rounded by
itself; in a codebook of vectors a border may run along one of them, hardly along all."""
_WORDS = ("a", "red", "small", "blue", "old", "river", "star", "house", "of", "under", "tree", "7", "?")

ArrayT = TypeVar("ArrayT", bound=Any)


class ExactEncoder:
    """Encodes like its tokenizer, but to the same ids in every batch, on every device and in every runtime.

    Ids are those of features in float64, as long as features in float32 lie within the tolerance of them: 32 times the
    mean error of the tower. That holds of FSQ, LFQ and BSQ, alone or in a `Product`, and of a `Residual` of the first
    two; with stages of BSQ, and for VQ and SimVQ, a few borders are missed.

    Args:
        tokenizer: in evaluation mode, with weights in float32. A copy of it in float64 is kept: twice its memory more.
            Weights that are changed later are not seen by that.

    Attributes:
        tokenizer: the one that was given.
        doubting: the part in float32.
        float64: the copy.

    Raises:
        ConfigError: the weights are in another type, the tokenizer is in training mode or has no codes, the device has
            no float64, or the tower computes in a narrower type than float32.
    """

    def __init__(self, tokenizer: AnyTokenizer):
        self.tokenizer = tokenizer
        self.float64 = in_float64(tokenizer)
        self.doubting = Doubting(tokenizer, _tolerance(tokenizer, self.float64))

    def encode(self, inputs: Any) -> Tensor:
        """What the tokenizer's own ``encode`` takes → ids ``(B, N, C)`` int64.

        Raises:
            ShapeError: as the tokenizer does.
            NonFiniteError: a feature is NaN or infinite.
            ConfigError: the tokenizer is in another state than the encoder was made of.
        """
        _require_exact(self.tokenizer)  # once more: it may have been converted since, or moved
        if self.tokenizer.device != self.float64.device:
            raise ConfigError(
                f"exact ids: got a tokenizer on {self.tokenizer.device}, expected {self.float64.device}, where it was "
                "when this encoder was made; make another"
            )
        batch = self.tokenizer.batch(inputs)
        with torch.no_grad(), without_tf32(batch.device):
            return settled(self.doubting, self._settle, batch)

    def _settle(self, batch: Tensor) -> Tensor:
        """The ids of samples in doubt, from features in float64."""
        (narrow, mask), (wide, _) = _features(self.tokenizer, batch), _features(self.float64, batch)
        error = float(_relative(narrow - wide, wide).amax())
        if not math.isfinite(error):
            raise NonFiniteError("exact ids: got a feature that is NaN or infinite; are all weights finite?")
        if error > _FAR * self.doubting.tolerance:
            raise ConfigError(
                f"exact ids: got a feature in float32 off by {error:.1e} of the sample's largest, expected hardly ever "
                f"more than {self.doubting.tolerance:.1e}; have weights changed since this encoder was made?"
            )
        return self.tokenizer.quantizer.encode(wide, mask)


class Doubting(nn.Module):
    """Encodes in float32, and says which samples rounding could decide otherwise; a module, for `torch.export`.

    Args:
        tokenizer: what encodes.
        tolerance: how far a feature may be off, of the largest feature of the sample.
    """

    shifts: Tensor

    def __init__(self, tokenizer: AnyTokenizer, tolerance: float):
        super().__init__()
        self.tokenizer = tokenizer
        self.tolerance = tolerance
        signs = torch.tensor(_SIGNS, dtype=torch.float64, device=tokenizer.device)
        shifts = tolerance * torch.cat([torch.zeros_like(signs[:1]), signs, -signs])
        channels = torch.arange(tokenizer.quantizer.dim, device=tokenizer.device) % signs.shape[1]
        self.register_buffer("shifts", shifts[:, None, None, channels], persistent=False)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the tokenizer's tower → ids ``(B, N, C)`` int64, and which samples are in doubt, ``(B,)`` bool.

        A sample is, if an id changes where its features move by the tolerance, or if they hold NaN. The quantizer
        computes in float64, so that its own rounding decides nothing either.
        """
        features, mask = _features(self.tokenizer, batch)
        largest = _largest(features)
        shifted = features + self.shifts * largest  # (shifts, B, N, D), the first of them 0
        masks = mask if mask is None else mask.expand(shifted.shape[:-1])
        ids, *others = self.tokenizer.quantizer.encode(shifted, masks).unbind()
        changed = torch.stack([other != ids for other in others])
        return ids.contiguous(), changed.any(dim=0).flatten(1).any(dim=1) | largest.isnan().flatten()


def in_float64(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """A copy in float64.

    Raises:
        ConfigError: as in `ExactEncoder`, but for the tower's type.
    """
    _require_exact(tokenizer)
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


def drawn_inputs(tokenizer: AnyTokenizer, count: int) -> Tensor:
    """Inputs of ``features``, drawn from seed 0: noise ``(count, 3, H, W)`` uint8, or captions, ``(count, N)``."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(tokenizer, ImageTokenizer):
        size = tokenizer.tower.image_size
        return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    picks = torch.randint(0, len(_WORDS), (count, 6), generator=generator).tolist()
    return tokenizer.preprocess([" ".join(_WORDS[word] for word in row) for row in picks])


@torch.no_grad()
def _tolerance(tokenizer: AnyTokenizer, wide: AnyTokenizer) -> float:
    """From the mean error (root of squares) of the tower's features on drawn inputs."""
    batch = drawn_inputs(tokenizer, _MEASURED).to(tokenizer.device)
    with without_tf32(batch.device):
        (narrow, mask), (exact, _) = _features(tokenizer, batch), _features(wide, batch)
    errors = _relative(narrow - exact, exact)
    mean = float((errors if mask is None else errors[mask]).square().mean().sqrt())
    if not mean < _NARROW:  # NaN is not
        raise ConfigError(
            f"exact ids: got features in float32 off by {mean:.1e} of the largest in the mean, expected less than "
            f"{_NARROW:.1e}: does the tower compute part of them in a narrower type, or hold NaN?"
        )
    return _REACH * max(_ROUNDING, mean)


def _require_exact(tokenizer: AnyTokenizer) -> None:
    if not isinstance(tokenizer, AnyTokenizer):
        raise ConfigError(
            f"exact ids: got a {type(tokenizer).__name__}, expected a tokenizer that encodes: load_tokenizer(folder, "
            "modality) without encode=False"
        )
    weights = next(tokenizer.parameters())
    if weights.dtype != torch.float32 or weights.device.type == "mps":
        raise ConfigError(
            f"exact ids: got weights in {weights.dtype} on {weights.device}, expected float32 on a device that has "
            "float64: tokenizer.float(), on the CPU or a CUDA GPU"
        )
    if tokenizer.training:
        raise ConfigError("exact ids: got a tokenizer in training mode, expected evaluation mode: tokenizer.eval()")
    if not tokenizer.codebook_sizes:
        raise ConfigError(f"exact ids: the {tokenizer.modality} tokenizer's quantizer has no codes to encode to")


def _features(tokenizer: AnyTokenizer, batch: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the quantizer is given, ``(B, N, D)`` float64, 0 where masked, and the mask ``(B, N)`` or None."""
    features, mask = tokenizer.features(batch)
    features = features.double()
    return (features if mask is None else features.masked_fill(~mask.unsqueeze(-1), 0)), mask


def _largest(features: Tensor) -> Tensor:
    """``(B, N, D)`` → ``(B, 1, 1)``: of each sample."""
    return features.abs().amax(dim=(1, 2), keepdim=True)


def _relative(error: Tensor, features: Tensor) -> Tensor:
    """``(B, N, D)``, of the sample's largest feature."""
    return error.abs() / _largest(features).clamp(min=torch.finfo(torch.float64).tiny)
