"""Ids that rounding does not decide: where it could, a sample's features are computed again in float64.

    features in float32 ─→ in doubt? ── no ─────────────────────────→ quantizer, in float64
                                └── yes ─→ features in float64 ─→ quantizer, in float64

Floating-point sums come in another order in another batch, on another device and in another runtime. Features then
differ in their last bits, and one that lies so near a border between two codes gets the other code: one id in some
hundred thousand. In float64 that takes a feature a billion times nearer, but float64 costs several times as much. So
only the samples in doubt are computed in it, as predicates of computational geometry are decided exactly only where
rounding could change them (Shewchuk 1997, https://doi.org/10.1007/PL00009321).

Ids are then those of float64, as long as features in float32 lie within the tolerance of them: 48 times the mean error
of the tower. That holds of FSQ, LFQ and BSQ, alone or in a `Product`, and of a `Residual` of the first two; with stages
of BSQ, and for VQ and SimVQ, a few borders are missed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.precision import without_tf32
from vqclip.projection import gain, normalized
from vqclip.quantizers.vectors import straight_through

if TYPE_CHECKING:
    from vqclip.tokenizer import Tokenizer

__all__ = [
    "Doubting",
    "Tolerance",
    "arithmetic",
    "exact_features",
    "exactness",
    "in_float64",
    "is_exact",
    "require_exact",
    "settled",
]

_ROUNDING = torch.finfo(torch.float32).eps
"""Of the sample's largest feature: how far trained towers are off in the mean (``benchmarks/exact.py``)."""
_REACH = 48
"""Times that error, or the tokenizer's own where it is larger: the tolerance. Of a million features of real pictures
none was off by more than 23 times the mean error; of pictures of one colour, the worst that were found, by 46 times."""
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
    """For commands that promise exact ids.

    Raises:
        ConfigError: whatever `Tokenizer.exact` says, the tokenizer makes none as it is.
    """
    if (reason := _why_not(tokenizer)) is not None:
        raise ConfigError(f"exact ids: {reason}")


def _why_not(tokenizer: Tokenizer) -> str | None:
    if any(module.training for module in tokenizer.modules()):
        return "got a tokenizer in training mode, at least in part, expected evaluation mode: tokenizer.eval()"
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


def _weights(tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Parameters and buffers of what makes features."""
    for part in (tokenizer.tower, tokenizer.project_in):
        yield from part.parameters()
        yield from part.buffers()


@contextmanager
def exactness(tokenizer: Tokenizer, exact: bool) -> Iterator[None]:
    """Set whether a tokenizer is `exact`, within the block."""
    before, tokenizer.exact = tokenizer.exact, exact
    try:
        yield
    finally:
        tokenizer.exact = before


def arithmetic(tokenizer: Tokenizer) -> AbstractContextManager[None]:
    """What features are computed in: where ids are exact, without TF32, which keeps 10 of 23 bits."""
    return without_tf32(tokenizer.device) if is_exact(tokenizer) else nullcontext()


def exact_features(tokenizer: Tokenizer, inputs: Tensor, projected: Tensor, mask: Tensor | None) -> Tensor:
    """What the quantizer is to see, where ids are exact.

    Args:
        tokenizer: one for which `is_exact` is true.
        inputs: ``(B, ...)``, what the next was made from.
        projected: ``(B, N, D)`` float32, `Tokenizer.projected`.
        mask: ``(B, N)`` bool, True at real tokens, or None.

    Returns:
        Normalized, ``(B, N, D)`` float64; those of samples in doubt computed in float64 from the inputs on; with the
        gradient of ``projected``.

    Raises:
        ConfigError: the tower cannot be copied, or not compute in float64.
    """
    tolerance = tokenizer.tolerance.of(tokenizer)
    rows = _in_doubt(tokenizer, projected, mask, tolerance)[1].nonzero().squeeze(1)
    projected = projected.double()
    if len(rows):
        again, rows = _in_float64_where(tokenizer, inputs, projected.detach(), rows, tolerance)
        projected = projected.index_put((rows,), straight_through(again, projected[rows]))
    return normalized(projected, tokenizer.normalize)


@torch.no_grad()
def _in_float64_where(
    tokenizer: Tokenizer, inputs: Tensor, projected: Tensor, rows: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """These rows in float64; all, where one of them is off by more than the tolerance, for others may be as well."""
    wide = in_float64(tokenizer)
    again, mask = wide.projected(inputs[rows])
    if bool((_relative(projected[rows], again, mask) > tolerance).any()):
        rows = torch.arange(len(inputs), device=inputs.device)
        again, _ = wide.projected(inputs)
    return again, rows


def _in_doubt(tokenizer: Tokenizer, projected: Tensor, mask: Tensor | None, tolerance: float) -> tuple[Tensor, Tensor]:
    """Ids ``(B, N, C)``, and which samples have one that changes where what was projected moves by the tolerance.

    The quantizer computes in float64, so that its own rounding decides nothing either. Samples with NaN or infinity are
    in no doubt: float64 would not mend them.
    """
    with torch.no_grad():
        projected = _real(projected.double(), mask)
        largest = _largest(projected)
        features = normalized(projected, tokenizer.normalize)
        reach = tolerance * largest * gain(projected, tokenizer.normalize)
        ids = tokenizer.quantizer.encode(features, mask).contiguous()
        changed = torch.zeros_like(ids, dtype=torch.bool)
        for shift in _shifts(features, tokenizer.quantizer.channelwise):
            changed = changed | (tokenizer.quantizer.encode(features + shift * reach, mask) != ids)
        return ids, changed.flatten(1).any(dim=1) & largest.isfinite().flatten()


def _shifts(features: Tensor, channelwise: bool) -> Iterator[Tensor]:
    """Each ``(D,)``, of 1 and -1: both ways, along as many directions as there may be borders along one."""
    channels = torch.arange(features.shape[-1], device=features.device)
    for pattern in _SIGNS[:1] if channelwise else _SIGNS:
        signs = features.new_tensor(pattern)[channels % len(pattern)]
        yield from (signs, -signs)


def in_float64(tokenizer: TokenizerT) -> TokenizerT:
    """A copy whose features are in float64. Its quantizer and what comes after that are the tokenizer's own.

    It is not kept: what it is copied from may change in ways that nobody is told of.
    """
    tables = _tables(tokenizer)
    known: dict[int, Any] = {}  # to `deepcopy`: what has been copied already
    for tensor in _weights(tokenizer):
        if id(tensor) in tables:
            known[id(tensor)] = tensor
        elif tensor.is_floating_point():
            wide = tensor.detach().double()
            known[id(tensor)] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
    copied = copy.copy(tokenizer)
    copied._modules = dict(tokenizer._modules)
    for name in ("tower", "project_in"):
        copied._modules[name] = copy.deepcopy(tokenizer._modules[name], known)
    for module in copied.tower.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in tables:
            module.register_forward_hook(_widened)
    return copied


def _tables(tokenizer: Tokenizer) -> set[int]:
    """Weights that are looked up alone: of a large vocabulary, what is looked up is widened sooner than all."""
    looked_up: set[int] = set()
    others: set[int] = set()
    for module in tokenizer.tower.modules():
        ids = {id(weight) for weight in module.parameters(recurse=False)}
        (looked_up if isinstance(module, nn.Embedding) else others).update(ids)
    return looked_up - others


def _widened(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.double()


class Tolerance:
    """Keeps how far rounding moves a tokenizer's features: measured when it is asked for, again when weights change."""

    def __init__(self) -> None:
        self._weights: tuple[tuple[int, int], ...] = ()
        self._value = 0.0

    def of(self, tokenizer: Tokenizer) -> float:
        """Of the sample's largest number: 48 times the mean error of drawn inputs, before normalization.

        Raises:
            ConfigError: the tower cannot be copied, or not compute in float64.
        """
        # A tensor's version is how often it was written to, as far as torch is told; tensors of inference mode have
        # none. After other writes the error of the former weights is taken for that of these.
        weights = tuple((id(w), 0 if w.is_inference() else w._version) for w in _weights(tokenizer))
        if weights != self._weights:
            error = _mean_error(tokenizer)
            self._value, self._weights = _REACH * (error if error > _ROUNDING else _ROUNDING), weights  # not NaN
        return self._value


@torch.no_grad()
def _mean_error(tokenizer: Tokenizer) -> float:
    """Root of squares, of the sample's largest number; NaN if weights hold it."""
    batch = tokenizer.drawn_inputs(_MEASURED).to(tokenizer.device)
    with without_tf32(batch.device):
        narrow, mask = tokenizer.projected(batch)
        try:
            wide, _ = in_float64(tokenizer).projected(batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"exact ids: got a tower that cannot be copied, or not compute in float64 ({error}); expected one that "
                "can, or tokenizer.exact = False"
            ) from error
    errors = _relative(narrow, wide, mask)
    return float((errors if mask is None else errors[mask]).square().mean().sqrt())


def _relative(narrow: Tensor, wide: Tensor, mask: Tensor | None) -> Tensor:
    """Errors ``(B, N, D)``, of the sample's largest number; 0 where masked."""
    return _real(narrow - wide, mask).abs() / _largest(_real(wide, mask)).clamp(min=torch.finfo(wide.dtype).tiny)


def _largest(projected: Tensor) -> Tensor:
    """``(B, N, D)`` → ``(B, 1, 1)``: of each sample."""
    return projected.abs().amax(dim=(1, 2), keepdim=True)


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 where masked, whatever stood there."""
    return values if mask is None else values.masked_fill(~mask.unsqueeze(-1), 0)


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
        self.tolerance = tokenizer.tolerance.of(tokenizer)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the tokenizer's tower → ids ``(B, N, C)`` int64, and which samples are in doubt, ``(B,)`` bool."""
        return _in_doubt(self.tokenizer, *self.tokenizer.projected(batch), self.tolerance)


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
