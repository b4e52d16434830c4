"""Ids that rounding does not decide: where it could, a sample's features are computed again in float64.

    features in float32 ─→ in doubt? ── no ──→ quantizer, in float64
                                └── yes ─→ features in float64 ─→ quantizer

Floating-point sums come in another order in another batch, on another device and in another runtime. Features then
differ in their last bits, and one that lies so near a border between two codes gets the other code: one id in some
hundred thousand. In float64 that takes a feature a billion times nearer, but float64 costs several times as much. So
only the samples in doubt are computed in it, as predicates of computational geometry are decided exactly only where
rounding could change them (Shewchuk 1997, https://doi.org/10.1007/PL00009321).

Ids are then those of float64, as long as features in float32 lie within the tolerance of them: 32 times the mean error
of the tower. That holds of FSQ, LFQ and BSQ, alone or in a `Product`, and of a `Residual` of the first two; with stages
of BSQ, and for VQ and SimVQ, a few borders are missed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.precision import without_tf32
from vqclip.quantizers import Quantizer
from vqclip.quantizers.vectors import straight_through

if TYPE_CHECKING:
    from vqclip.tokenizer import Tokenizer

__all__ = [
    "Doubting",
    "Reference",
    "arithmetic",
    "exact_features",
    "in_float64",
    "is_exact",
    "require_exact",
    "settled",
]

_ROUNDING = torch.finfo(torch.float32).eps
"""Of the sample's largest feature: how far trained towers are off in the mean (``benchmarks/exact.py``)."""
_REACH = 32
"""Times that error, or the tokenizer's own where it is larger: the tolerance. Of a million features, trained towers had
none off by more than 23 times their mean error."""
_MEASURED = 4
"""Samples that the tokenizer's own error is measured on."""
_SIGNS = ((1.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, -1.0), (1.0, 1.0, -1.0, -1.0))
"""Of the shifts, repeated over the channels. One finds all borders where each channel is rounded by itself; in a
codebook of vectors a border may run along one of them, hardly along all."""
_WITHOUT_FLOAT64 = ("meta", "mps")

ArrayT = TypeVar("ArrayT", bound=Any)
TokenizerT = TypeVar("TokenizerT", bound="Tokenizer")


def is_exact(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer makes exact ids as it is, and is called, now; see `vqclip.tokenizer.Tokenizer.exact`."""
    if not tokenizer.exact or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return _why_not(tokenizer) is None and not torch.is_autocast_enabled(tokenizer.device.type)


def require_exact(tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a tokenizer that, as it is, makes no exact ids whatever `exact` says."""
    if (reason := _why_not(tokenizer)) is not None:
        raise ConfigError(f"exact ids: {reason}")


def _why_not(tokenizer: Tokenizer) -> str | None:
    if tokenizer.training:
        return "got a tokenizer in training mode, expected evaluation mode: tokenizer.eval()"
    device = tokenizer.device
    dtypes = {tensor.dtype for tensor in _weights(tokenizer) if tensor.is_floating_point()} - {torch.float32}
    if dtypes or device.type in _WITHOUT_FLOAT64:
        found = next(iter(dtypes), torch.float32)
        return (
            f"got weights in {found} on {device}, expected float32 on a device that has float64: tokenizer.float(), on "
            "the CPU or a CUDA GPU"
        )
    if not tokenizer.codebook_sizes:
        return f"the {tokenizer.modality} tokenizer's quantizer has no codes to encode to"
    return None


def arithmetic(tokenizer: Tokenizer) -> AbstractContextManager[None]:
    """What features are computed in: where ids are exact without TF32, which has a tenth of float32's precision."""
    return without_tf32(tokenizer.device) if is_exact(tokenizer) else nullcontext()


def exact_features(tokenizer: Tokenizer, inputs: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
    """What the quantizer is to see, where ids are exact.

    Args:
        tokenizer: one for which `is_exact` is true.
        inputs: ``(B, ...)``, what the features were made from.
        features: ``(B, N, D)`` float32, `Tokenizer.features`.
        mask: ``(B, N)`` bool, True at real tokens, or None.

    Returns:
        ``(B, N, D)`` float64: the same numbers, those of samples in doubt computed in float64; the same gradient.
    """
    wide, tolerance = tokenizer.reference.of(tokenizer)
    doubtful = _in_doubt(tokenizer.quantizer, features, mask, tolerance)[1]
    rows = doubtful.nonzero().squeeze(1)
    features = features.double()
    if not len(rows):
        return features
    with torch.no_grad():
        again, _ = wide.features(inputs[rows])
    return features.index_put((rows,), straight_through(again, features[rows]))


class Beside(NamedTuple):
    """What exact ids need beside a tokenizer."""

    wide: Tokenizer
    """Its copy in float64."""
    tolerance: float
    """How far a feature in float32 may be off, of the largest feature of the sample."""


class Reference:
    """Keeps what exact ids need: made when it is asked for, again when weights have changed; copies start without."""

    def __init__(self) -> None:
        self._weights: tuple[tuple[int, int], ...] = ()
        self._kept: Beside | None = None

    def of(self, tokenizer: Tokenizer) -> Beside:
        """The float64 copy of the tokenizer as it is now, and 32 times the mean error of features of drawn inputs."""
        # A tensor's version is how often it was written to; tensors of inference mode count none.
        weights = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in _weights(tokenizer))
        if self._kept is None or weights != self._weights:
            wide = in_float64(tokenizer)
            self._kept = Beside(wide, _REACH * max(_ROUNDING, _mean_error(tokenizer, wide)))
            self._weights = weights
        return self._kept

    def __reduce__(self) -> tuple[type[Reference], tuple[()]]:
        return Reference, ()


@torch.no_grad()
def _mean_error(tokenizer: Tokenizer, wide: Tokenizer) -> float:
    """Root of squares, of the sample's largest feature."""
    batch = tokenizer.drawn_inputs(_MEASURED).to(tokenizer.device)
    with without_tf32(batch.device):
        (narrow, mask), (exact, _) = tokenizer.features(batch), wide.features(batch)
    largest = _real(exact, mask).abs().amax(dim=(1, 2), keepdim=True)
    errors = (narrow - exact) / largest.clamp(min=torch.finfo(torch.float64).tiny)
    mean = float((errors if mask is None else errors[mask]).square().mean().sqrt())
    return mean if math.isfinite(mean) else 0.0  # of weights that hold NaN no id means anything


class Doubting(nn.Module):
    """Encodes in float32, and says which samples rounding could decide otherwise; a module, for `torch.export`.

    Args:
        tokenizer: what encodes.

    Raises:
        ConfigError: as it is, it makes no exact ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        require_exact(tokenizer)
        self.tokenizer = tokenizer
        self.tolerance = tokenizer.reference.of(tokenizer).tolerance

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the tokenizer's tower → ids ``(B, N, C)`` int64, and which samples are in doubt, ``(B,)`` bool."""
        return _in_doubt(self.tokenizer.quantizer, *self.tokenizer.features(batch), self.tolerance)


def _in_doubt(quantizer: Quantizer, features: Tensor, mask: Tensor | None, tolerance: float) -> tuple[Tensor, Tensor]:
    """Ids ``(B, N, C)``, and which samples have one that changes where their features move by the tolerance, ``(B,)``.

    The quantizer computes in float64, so that its own rounding decides nothing either. Features that are NaN or
    infinite are in no doubt: float64 would not mend them.
    """
    with torch.no_grad():
        features = _real(features.double(), mask)
        reach = tolerance * features.abs().amax(dim=(1, 2), keepdim=True)
        ids = quantizer.encode(features, mask).contiguous()
        changed = torch.zeros_like(ids, dtype=torch.bool)
        for shift in _shifts(features, quantizer.channelwise):
            changed = changed | (quantizer.encode(features + shift * reach, mask) != ids)
        return ids, changed.flatten(1).any(dim=1) & reach.isfinite().flatten()


def _shifts(features: Tensor, channelwise: bool) -> Iterator[Tensor]:
    """Each ``(D,)``, of 1 and -1: both ways, along as many directions as there may be borders along one."""
    channels = torch.arange(features.shape[-1], device=features.device)
    for pattern in _SIGNS[:1] if channelwise else _SIGNS:
        signs = features.new_tensor(pattern)[channels % len(pattern)]
        yield from (signs, -signs)


def _real(features: Tensor, mask: Tensor | None) -> Tensor:
    """0 where masked, whatever stood there."""
    return features if mask is None else features.masked_fill(~mask.unsqueeze(-1), 0)


def in_float64(tokenizer: TokenizerT) -> TokenizerT:
    """A copy whose features are in float64. Its quantizer and what comes after that are the tokenizer's own."""
    known: dict[int, Any] = {}  # to `deepcopy`: what has been copied already
    for tensor in _weights(tokenizer):
        if tensor.is_floating_point():
            wide = tensor.detach().double()
            known[id(tensor)] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
    copied = copy.copy(tokenizer)
    copied.reference = Reference()
    copied._modules = dict(tokenizer._modules)
    for name in ("tower", "project_in"):
        copied._modules[name] = copy.deepcopy(tokenizer._modules[name], known)
    return copied


def _weights(tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Parameters and buffers of what makes features."""
    for part in (tokenizer.tower, tokenizer.project_in):
        yield from part.parameters()
        yield from part.buffers()


def settled(
    first: Callable[[ArrayT], tuple[ArrayT, ArrayT]], second: Callable[[ArrayT], ArrayT], batch: ArrayT
) -> ArrayT:
    """The ids of ``first``, of the samples in doubt those of ``second``; of torch's tensors or of numpy's arrays.

    Args:
        first: a batch → ids ``(B, ...)`` and which samples are in doubt ``(B,)``, as `Doubting`.
        second: a batch of those samples → their ids, from features in float64.
        batch: ``(B, ...)``.
    """
    ids, doubtful = first(batch)
    if bool(doubtful.any()):
        ids[doubtful] = second(batch[doubtful])
    return ids
