"""The contract of all quantizers: inputs, outputs and guarantees.

Shapes: ``...`` any leading dimensions, D the quantizer's ``dim``, C codebooks per token, K codes per codebook. The
private methods work on ``(T, G, D)``: T tokens and a group axis G. G is 1 except in a `Product`, which quantizes its
parts in one call; statistics then have G as their first axis.

    out = quantizer(x)                         # forward: no communication
    stats = out.stats + ...                    # sum over microbatches
    stats = sync([stats, ...], order)          # sum over ranks, once per step
    loss = weights · quantizer.losses(stats)
    quantizer.update(stats)                    # after the optimizer step: move codes, replace dead ones
    quantizer.decode(out.ids) == out.vectors   # bit for bit
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.inputs import require_codes
from vqclip.nn.precision import full_precision
from vqclip.quantizers.stats import Stats
from vqclip.quantizers.vectors import (
    MAX_COUNTED_CODES,
    Prefix,
    histogram,
    straight_through,
    summary,
)
from vqclip.seeds import derive_seed

log = logging.getLogger(__name__)

MAX_FORWARDS_WITHOUT_UPDATE = 128
"""Maximum number of forwards with gradients in training mode without an `update`; one more is reported."""


@dataclass(eq=False)
class QuantizerOutput:
    """Output of a quantizer."""

    vectors: Tensor
    """``(..., D)`` quantized vectors with the gradient of the input, 0 where masked; float32 (float64 for float64)."""
    ids: Tensor
    """``(..., C)`` int64 in ``[0, K)``, -1 where masked."""
    stats: Stats
    """This rank's sums and counts, for `Quantizer.losses`, `metrics` and `update`."""

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "QuantizerOutput: got an iteration over it, expected its fields vectors, ids and stats; nn.DataParallel, "
            "which iterates, cannot join statistics: use DistributedDataParallel (DDP)"
        )


class Quantizer(nn.Module, ABC):
    """Base class of modules that map vectors to discrete codes and back.

    Guarantees of every quantizer (tests/quantizers/test_contract.py):

    - ``decode(ids)`` equals ``vectors``, bit for bit.
    - A masked token has no effect on any other output, statistic or gradient.
    - Forward calls no collective, also in training. Only `losses` and `update` do.
    - It computes in float32 (float64 for float64 input), also under autocast and after ``.bfloat16()``.
    - NaN in the input gives NaN vectors, never an id out of range.

    A new quantizer calls ``super().__init__`` and implements `_nearest` and `_decode`. It overrides `_bound`,
    `_attach_codes`, `_pass_gradient`, `_statistics`, `_losses`, `metrics`, `_update`, `spawn` and `refinement` if the
    defaults here do not fit. The private methods of forward get ``(T, G, D)``.

    Args:
        dim: D, the width of the vectors.
        codebook_sizes: K of each of the C codebooks; at most 2^63 each, so that ids fit int64.
        loss_weights: name → weight in the training loss, for each entry of `losses`.

    Raises:
        ConfigError: a codebook has more codes than int64 can count.
    """

    def __init__(self, dim: int, codebook_sizes: Sequence[int], loss_weights: Mapping[str, float] | None = None):
        super().__init__()
        for size in codebook_sizes:
            if size > 2**63:
                raise ConfigError(
                    f"{type(self).__name__}: a codebook of {size} codes does not fit int64 ids (at most 2^63 codes); "
                    "split the channels over several codebooks with Product"
                )
        self.dim = dim
        self.codebook_sizes = tuple(codebook_sizes)
        self.loss_weights = dict(loss_weights or {})
        self.key = 0
        """Key of this quantizer's random draws; equal for all quantizers until `set_seed` is called."""
        self._needs_update = False
        """Whether training without `update` is a mistake."""
        self._forwards = 0
        """Forwards with gradients in training mode since the last `update`, without compiled ones."""

    @property
    def bits(self) -> float:
        """Bits per token: the sum of log2 K over codebooks; 0 without codes."""
        return math.fsum(math.log2(size) for size in self.codebook_sizes)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Numbers of the stage and of the codebook that each column of the ids belongs to; see `Prefix`."""
        return ((0, 0),) * len(self.codebook_sizes)

    @property
    def extent(self) -> Prefix:
        """Number of stages, and of codebooks of a stage; 0 of both without codes."""
        return Prefix(*(1 + max((place[axis] for place in self.places), default=-1) for axis in range(2)))

    def columns(self, stages: int | None = None, codebooks: int | None = None) -> list[int]:
        """Return the columns of the ids that belong to the first stages and codebooks; None: to all.

        Raises:
            ConfigError: a number is no integer, less than 1, or more than `extent`.
        """
        name, whole = type(self).__name__, self.extent
        prefix = Prefix(whole.stages if stages is None else stages, whole.codebooks if codebooks is None else codebooks)
        if not all(whole):
            raise ConfigError(f"{prefix}: {name} has no codes; expected a quantizer with a codebook")
        for axis, got, most in zip(Prefix._fields, prefix, whole, strict=True):
            if type(got) is not int or not 1 <= got <= most:
                raise ConfigError(f"{axis}: got {got!r}, expected 1 to {most}, the {axis} of this {name}")
        return [
            column
            for column, (stage, codebook) in enumerate(self.places)
            if stage < prefix.stages and codebook < prefix.codebooks
        ]

    def truncate(self, ids: Tensor, stages: int | None = None, codebooks: int | None = None) -> Tensor:
        """Replace the ids outside of the first stages and codebooks by -1, for which `decode` adds 0.

        The first stages of `Residual` without `beam` have the same ids as alone: a quantizer of fewer bits.

        Args:
            ids: ``(..., C)`` integers.
            stages: number of stages to keep, counted through nested `Residual`; None: all.
            codebooks: number of codebooks to keep, counted through nested `Product`; None: all.

        Returns:
            ``(..., C)`` int64.

        Raises:
            ConfigError, ShapeError: see `columns` and `decode`.
        """
        ids = require_codes(ids, self.codebook_sizes, f"{type(self).__name__}: ids")
        kept = self.columns(stages, codebooks)
        truncated = torch.full_like(ids, -1)
        truncated[..., kept] = ids[..., kept]
        return truncated

    def first_stages(self, x: Tensor, stages: int, mask: Tensor | None = None) -> Tensor:
        """Quantize by the first stages alone, all of them active in training too, with the gradient of `forward`.

        Args:
            x: as of `forward`.
            stages: number of stages, counted through nested `Residual`.
            mask: as of `forward`.

        Returns:
            ``(..., D)``, equal bit for bit to ``decode(truncate(ids, stages))`` for the ids of `encode`. Its gradient
            reaches no code of a later stage.

        Raises:
            ConfigError: see `columns`; stages that a beam search chose together.
            ShapeError: see `forward`.
        """
        self.require_first_stages(stages)
        with full_precision(x.device):
            bounded, keep = self._check_and_bound(x, mask)
            vectors = self._pass_gradient(self._first_stages(bounded, stages).to(bounded.dtype), bounded)
            if keep is not None:
                vectors = vectors.masked_fill(~keep[:, None, None], 0)
        return vectors.reshape(x.shape)

    def require_first_stages(self, stages: int) -> None:
        """Check the number of `first_stages`; raise ConfigError if the quantizer cannot quantize by them alone."""
        if self.extent.stages < 2:
            raise ConfigError(
                f"stages: got {stages} for a {type(self).__name__} of one stage; expected null, or a Residual quantizer"
            )
        self.columns(stages)
        if any(getattr(part, "beam", 1) > 1 for part in self.parts()):
            raise ConfigError(
                f"stages: got {stages} for a Residual with beam, which chooses first stages for the sum of all; "
                "expected null, or beam: 1"
            )

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"dim={self.dim}, codebook_sizes={self.codebook_sizes}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> QuantizerOutput:
        """Quantize, with a straight-through gradient.

        Args:
            x: ``(..., D)`` floating point, any number of leading dimensions, also empty.
            mask: ``(...)`` bool, True = real token; all real by default.

        Returns:
            Vectors, ids and statistics; see `QuantizerOutput`.

        Raises:
            ShapeError: wrong width or dtype of ``x``, or a mask that does not fit it.
        """
        # Not when compiling: a number that changes would compile again.
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._forwards += 1
            if self._forwards == 1 + MAX_FORWARDS_WITHOUT_UPDATE and any(part._needs_update for part in self.parts()):
                _warn_missing_update(type(self).__name__)
        with full_precision(x.device):
            bounded, keep = self._check_and_bound(x, mask)
            values, ids, stats = self._quantize(bounded, keep)
            vectors = self._pass_gradient(values.to(bounded.dtype), bounded)
            if keep is not None:
                vectors = vectors.masked_fill(~keep[:, None, None], 0)
        return QuantizerOutput(vectors.reshape(x.shape), ids.reshape(*x.shape[:-1], len(self.codebook_sizes)), stats)

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the ids without computing statistics: ``(..., D)`` → ``(..., C)`` int64, -1 where masked."""
        with full_precision(x.device), torch.no_grad():
            bounded, keep = self._check_and_bound(x, mask)
            ids = self._nearest(bounded)[1]
            if keep is not None:
                ids = ids.masked_fill(~keep[:, None, None], -1)
        return ids.reshape(*x.shape[:-1], len(self.codebook_sizes))

    def decode(self, ids: Tensor) -> Tensor:
        """Turn ids back into vectors.

        Args:
            ids: ``(..., C)`` integers in ``[0, K)``, or -1 for an absent token.

        Returns:
            ``(..., D)``, equal bit for bit to the `vectors` that forward returned with the ids; 0 for -1. Code values
            are float32 numbers, also if ``vectors`` is float64 (unless the codebook itself is float64).

        Raises:
            ShapeError: wrong width or dtype, or an id out of range (not checked under `torch.compile`).
        """
        ids = require_codes(ids, self.codebook_sizes, f"{type(self).__name__}: ids")
        grouped = ids.reshape(math.prod(ids.shape[:-1]), 1, len(self.codebook_sizes))
        with full_precision(ids.device):
            return self._decode(grouped).reshape(*ids.shape[:-1], self.dim)

    def continuous(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return ``forward(x, mask).vectors`` without the rounding, ``(..., D)`` → ``(..., D)``.

        Used to evaluate with the quantizer bypassed, and to measure the quantization error.
        """
        with full_precision(x.device):
            vectors, keep = self._check_and_bound(x, mask)
            if keep is not None:
                vectors = vectors.masked_fill(~keep[:, None, None], 0)
        return vectors.reshape(x.shape)

    def losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return unweighted auxiliary losses, name → scalar: means over the tokens of all ranks.

        A collective in training mode if the statistics are not reduced yet. The training step reduces those of all
        quantizers together before, with `vqclip.quantizers.sync`. Never a collective in evaluation mode, in which a
        rank may be alone: statistics that are not reduced then give the means over the tokens of this rank.
        """
        together = self.training and self.loss_weights
        return self._losses(stats.sync(histograms=False) if together else stats.local())

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Return measures of codebook usage, name → detached scalar; never a collective.

        They describe the tokens in ``stats``, of this rank or of all: ``tokens`` is their number, ``usage`` the share
        of codes that occur, ``usage_if_uniform`` the expected share for equally likely codes and the same number of
        tokens, ``perplexity`` the exponential of the entropy of the code histogram, and ``bits_used`` that entropy in
        bits. With several codebooks these are means (for bits, the sum), and ``0/usage``, ``1/usage``, ... describe
        each one. Codebooks with more than `MAX_COUNTED_CODES` (2^20) codes are not counted, and
        ``tokens`` is then the only entry.

        Raises:
            ShapeError: the statistics cover all ranks, and their histograms this one.
        """
        metrics = {"tokens": stats["tokens"]}
        if "codes" not in stats:
            return metrics
        if stats.is_global and stats.histograms:
            raise ShapeError("metrics: got sums over all ranks with histograms of one; expected those of stats.sync()")
        counts = stats["codes"].double()  # (C, K)
        metrics["usage_if_uniform"] = -torch.expm1(stats["tokens"].double() * math.log1p(-1 / counts.shape[-1]))
        shares = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
        spread = torch.special.entr(shares).sum(dim=-1).exp()
        used = (counts > 0).double().mean(dim=-1)
        for name, each in {"usage": used, "perplexity": spread, "bits_used": spread.log2()}.items():
            metrics[name] = summary(name, each)
            if len(each) > 1:
                metrics.update({f"{codebook}/{name}": value for codebook, value in enumerate(each)})
        return metrics

    def update(self, stats: Stats, start: bool = True) -> None:
        """Update codebooks after an optimizer step, once, with the statistics of all its microbatches.

        A collective like `losses` if the quantizer has a codebook to update. Does nothing in evaluation mode.

        The step has reduced the sums, but not the histograms. An update or a loss that reads counts of codes has them
        among the sums (see `TableQuantizer`): ``stats.sync()`` would be a further collective of every step.

        Args:
            stats: statistics of forwards in training mode.
            start: False: do not initialise a codebook in this step.

        Raises:
            ConfigError: the statistics are those of a forward in evaluation mode, or the codes are in shards.
        """
        if self.training:
            self._forwards = 0
            with torch.no_grad():
                self._update(stats, start)

    def spawn(self, groups: int = 1) -> Quantizer:
        """Return a new quantizer with the same settings, for a group axis of ``groups``, with a new random codebook.

        `Residual` makes one for every stage, `Product` one for all its parts. A quantizer without state returns itself.
        """
        return self

    def set_seed(self, seed: int) -> None:
        """Key the random draws of training (dropout depth, replacement codes) by (seed, path of the module, step)."""
        for path, module in self.named_modules():
            if isinstance(module, Quantizer):
                module.key = derive_seed(seed, path)

    @property
    def refinement(self) -> tuple[float, ...] | float | None:
        """Factor by which the codes of a next stage in `Residual` are finer: a number or one for each channel, >= 1.

        None: no factor makes the codes fit the quantization error, so it cannot be a stage of `Residual`.
        """
        return None

    @property
    def started(self) -> bool:
        """True if the codebook is initialised; see `update`."""
        return True

    def set_turn(self, is_next: bool) -> None:
        """Allow the codebook to be initialised in the next `update`: False while an earlier stage is to be."""

    @property
    def rank_local(self) -> bool:
        """True if each rank has its own codebook, from its own tokens."""
        return any(part.rank_local for part in self.parts() if part is not self)

    def parts(self) -> list[Quantizer]:
        """Return this quantizer and all quantizers inside it."""
        return [part for part in self.modules() if isinstance(part, Quantizer)]

    @abstractmethod
    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        """Return code values ``(T, G, D)`` without gradient and ids ``(T, G, C)`` for the output of `_bound`.

        Values have the dtype of the codes, usually float32, so that `_decode` returns the same bits.
        """

    @abstractmethod
    def _decode(self, ids: Tensor) -> Tensor:
        """Return the values ``(T, G, D)`` of ids ``(T, G, C)`` int64; 0 for -1."""

    def _losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return `losses`, without communication."""
        return {}

    def _update(self, stats: Stats, start: bool) -> None:
        """Implement `update`, in training mode and without gradient."""

    def _bound(self, x: Tensor) -> Tensor:
        """Map ``(T, G, D)`` to the range of the codes, before rounding."""
        return x

    def _attach_codes(self, values: Tensor, ids: Tensor, bounded: Tensor) -> Tensor:
        """Return ``values`` of `_nearest`, bit for bit, with the gradient of codes that the training loss moves."""
        return values

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        """Return ``values``, bit for bit, with a gradient for ``bounded``; NaN where ``bounded`` is NaN."""
        return straight_through(values, bounded)

    def _first_stages(self, bounded: Tensor, stages: int) -> Tensor:
        """Return the values ``(T, G, D)`` of the first stages, with the gradient of `_attach_codes`."""
        return self._attach_codes(*self._nearest(bounded), bounded)

    def _quantize(self, bounded: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Stats]:
        """Return values and ids of `_nearest`, 0 and -1 where masked, and the statistics."""
        return self._finish(*self._nearest(bounded), bounded, keep)

    def _finish(
        self, values: Tensor, ids: Tensor, bounded: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Stats]:
        """Mask values and ids, and return them with the statistics."""
        values = self._attach_codes(values, ids, bounded)
        if keep is not None:
            absent = ~keep[:, None, None]
            values, ids = values.masked_fill(absent, 0), ids.masked_fill(absent, -1)
        return values, ids, self._statistics(bounded, values, ids, keep)

    def _statistics(self, bounded: Tensor, values: Tensor, ids: Tensor, keep: Tensor | None) -> Stats:
        """Return sums over tokens, each with G as its first axis except ``tokens``; masked tokens add nothing.

        By default the counts of codes are a histogram, for `metrics` alone. A quantizer whose `update` or `losses` read
        them returns them as a sum.

        Args:
            bounded: ``(T, G, D)``, with gradient; any finite number where masked.
            values: ``(T, G, D)``, 0 where masked, with the gradient of `_attach_codes`.
            ids: ``(T, G, C)``, -1 where masked.
            keep: ``(T,)`` bool or None, True = real token.
        """
        count = keep.sum() if keep is not None else torch.full((), ids.shape[0], dtype=torch.int64, device=ids.device)
        if len(self.codebook_sizes) != 1 or self.codebook_sizes[0] > MAX_COUNTED_CODES:
            return Stats({"tokens": count})
        return Stats({"tokens": count}, histograms={"codes": histogram(ids.squeeze(-1), self.codebook_sizes[0])})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        # Codebooks stay in float32 under `.bfloat16()` and `.half()`: rounding would change the codes.
        def keep_fp32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(keep_fp32, recurse)

    def _check_and_bound(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return `_bound` of the tokens as ``(T, 1, D)`` in float32 or float64, and the mask as ``(T,)``.

        Raises:
            ShapeError: vectors of a wrong width or dtype, or a mask that does not fit them.
        """
        name = type(self).__name__
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ShapeError(f"{name}: x has shape {tuple(x.shape)}, expected (..., {self.dim}): one channel per entry")
        if not x.is_floating_point():
            raise ShapeError(f"{name}: x is {x.dtype}, expected floating-point vectors (ids are decoded with `decode`)")
        if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
            raise ShapeError(
                f"{name}: mask is {mask.dtype} of shape {tuple(mask.shape)}, expected torch.bool of shape "
                f"{tuple(x.shape[:-1])}: one entry per token, True = real token"
            )
        tokens = x.reshape(-1, 1, self.dim)
        tokens = tokens if tokens.dtype == torch.float64 else tokens.float()
        if mask is None:
            return self._bound(tokens), None
        keep = mask.reshape(-1)
        # Padding may contain anything, also NaN; it must not reach a statistic or a gradient.
        return self._bound(tokens.masked_fill(~keep[:, None, None], 0)), keep


def resolve_weights(name: str, defaults: Mapping[str, float], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of every existing loss: its default if it is missing in ``weights``.

    Raises:
        ConfigError: a weight for a loss that does not exist, or one that is negative or not finite.
    """
    for each, weight in (weights or {}).items():
        if not 0 <= weight < math.inf:
            raise ConfigError(f"{name}: loss_weights.{each} is {weight}, expected a number of at least 0")
    if unknown := set(weights or {}) - set(defaults):
        raise ConfigError(f"{name}: no loss is named {sorted(unknown)}, expected some of {sorted(defaults)}")
    return {**defaults, **(weights or {})}


@functools.cache
def _warn_missing_update(name: str) -> None:
    log.warning(
        "%s: more than %d forwards in training mode without an update, so codebooks and the draws of dropout do not "
        "change; call quantizer.update(stats) after each step of the optimizer, or quantizer.eval() to train around it "
        "(harmless where a step has more microbatches)",
        name,
        MAX_FORWARDS_WITHOUT_UPDATE,
    )


# Needed to export a quantizer.
torch.export.register_dataclass(QuantizerOutput, serialized_type_name="vqclip.quantizers.QuantizerOutput")
