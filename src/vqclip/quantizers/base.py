"""The contract of a quantizer: what every one of them takes, returns and promises.

Shapes (DESIGN section 2): ``...`` any leading dimensions, D the quantizer's ``dim``, C codebooks a token, K codes a
codebook. Inside, a quantizer sees ``(T, G, D)``: T tokens and a group axis G, which is 1 except in a `Product`, where
one stateless layer serves G codebooks at once; its statistics carry G as their first axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from vqclip.errors import ConfigError
from vqclip.nn.precision import full_precision
from vqclip.quantizers.checks import require_ids, require_vectors
from vqclip.quantizers.stats import Stats
from vqclip.quantizers.usage import MAX_COUNTED_CODES, histogram, perplexity, summary, usage, usage_if_uniform
from vqclip.quantizers.vectors import straight_through
from vqclip.seeds import derive_seed


class QuantizerOutput(NamedTuple):
    """What a quantizer returns."""

    vectors: Tensor
    """``(..., D)`` quantized vectors with the gradient of the input, 0 where masked; float32 (float64 for float64)."""
    ids: Tensor
    """``(..., C)`` int64 in ``[0, K)``, -1 where masked."""
    stats: Stats
    """This rank's sums and counts, for `Quantizer.losses`, `metrics` and `update`."""


class Quantizer(nn.Module, ABC):
    """Maps vectors to discrete codes and back; knows nothing of images or text.

    What every quantizer keeps (tests/quantizers/test_contract.py):

    - ``decode(ids)`` equals ``vectors``, bit for bit.
    - A masked token is as good as absent, in every output, statistic and gradient.
    - Forward holds no collective, in training neither. Ranks meet in `losses` and `update` only.
    - It computes in float32 (float64 for float64 input) whatever autocast or ``.bfloat16()`` say.
    - NaN in the input gives NaN vectors, never an id out of range.

    A new quantizer calls ``super().__init__`` and implements `_nearest` and `_decode`; `_bound`, `_pass_gradient`,
    `_statistics`, `losses`, `metrics`, `update`, `spawn` and `refinement` where it differs from what is here. All of
    them see ``(T, G, D)``.

    Args:
        dim: D, the width of the vectors.
        codebook_sizes: K of each of the C codebooks; at most 2^63 each, so that ids fit int64.
        loss_weights: the weight of each entry of `losses` in the training loss, by the same names.

    Raises:
        ConfigError: a codebook is larger than int64 can count.
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
        """Stream of this quantizer's draws; see `set_seed`, without which all quantizers draw alike."""
        self.waiting = False
        """Whether a quantizer beside this one, another stage of a `Residual`, has yet to start. As long as any has,
        forward draws tokens for a start: compiled, it then changes once and not at the start of every stage."""

    @property
    def bits(self) -> float:
        """Bits per token: the sum of log2 K over codebooks; 0 without codes."""
        return math.fsum(math.log2(size) for size in self.codebook_sizes)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
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
        require_vectors(type(self).__name__, self.dim, x, mask)
        with full_precision(x.device):
            tokens, keep = self._tokens(x, mask)
            bounded = self._bound(tokens)
            values, ids, stats = self._quantize(bounded, keep)
            vectors = self._pass_gradient(values.to(bounded.dtype), bounded)
            if keep is not None:
                vectors = vectors.masked_fill(~keep[:, None, None], 0)
        return QuantizerOutput(vectors.reshape(x.shape), ids.reshape(*x.shape[:-1], len(self.codebook_sizes)), stats)

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The ids alone, without gathering statistics: ``(..., D)`` → ``(..., C)`` int64, -1 where masked.

        Raises:
            ShapeError: as in `forward`.
        """
        require_vectors(type(self).__name__, self.dim, x, mask)
        with full_precision(x.device), torch.no_grad():
            tokens, keep = self._tokens(x, mask)
            ids = self._nearest(self._bound(tokens))[1]
            if keep is not None:
                ids = ids.masked_fill(~keep[:, None, None], -1)
        return ids.reshape(*x.shape[:-1], len(self.codebook_sizes))

    def decode(self, ids: Tensor) -> Tensor:
        """Turn ids back into vectors.

        Args:
            ids: ``(..., C)`` integers in ``[0, K)``, or -1 for an absent token.

        Returns:
            ``(..., D)``, equal to the `vectors` that came with the ids, bit for bit; 0 for -1. Code values are float32
            numbers, also where ``vectors`` is float64 (unless the codebook itself was made float64).

        Raises:
            ShapeError: wrong width or dtype, or an id out of range (not checked under `torch.compile`).
        """
        require_ids(type(self).__name__, self.codebook_sizes, ids)
        grouped = ids.long().reshape(math.prod(ids.shape[:-1]), 1, len(self.codebook_sizes))
        with full_precision(ids.device):
            return self._decode(grouped).reshape(*ids.shape[:-1], self.dim)

    def continuous(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What ``forward(x, mask).vectors`` would be without the rounding, ``(..., D)`` → ``(..., D)``.

        For figures "with the quantizer bypassed" and for looking at the quantization error.

        Raises:
            ShapeError: as in `forward`.
        """
        require_vectors(type(self).__name__, self.dim, x, mask)
        with full_precision(x.device):
            tokens, keep = self._tokens(x, mask)
            vectors = self._bound(tokens)
            if keep is not None:
                vectors = vectors.masked_fill(~keep[:, None, None], 0)
        return vectors.reshape(x.shape)

    def losses(self, stats: Stats) -> dict[str, Tensor]:
        """Unweighted auxiliary losses, name → scalar: means over the tokens of all ranks.

        On statistics that are not reduced yet this is a collective, which every rank must enter; the training step
        reduces all of them at once before, with `vqclip.quantizers.sync`.
        """
        return {}

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Codebook health, name → detached scalar; never a collective.

        It describes the tokens in ``stats``, of this rank or of all: ``tokens`` is their number, ``usage`` the share of
        codes among them, ``usage_if_uniform`` the share that as many tokens would reach if all codes were equally
        likely, ``perplexity`` the exponential of the entropy of the code histogram and ``bits_used`` that entropy in
        bits. With several codebooks these are means (the sum of the bits), and ``0/usage``, ``1/usage``, ...
        those of each. Codebooks of more than `vqclip.quantizers.usage.MAX_COUNTED_CODES` codes are not counted:
        ``tokens`` is then the only entry.
        """
        metrics = {"tokens": stats["tokens"]}
        if "codes" not in stats:
            return metrics
        metrics["usage_if_uniform"] = usage_if_uniform(stats["tokens"], stats["codes"].shape[-1])
        spread = perplexity(stats["codes"])
        for name, each in {"usage": usage(stats["codes"]), "perplexity": spread, "bits_used": spread.log2()}.items():
            metrics[name] = summary(name, each)
            if len(each) > 1:
                metrics.update({f"{codebook}/{name}": value for codebook, value in enumerate(each)})
        return metrics

    def update(self, stats: Stats, start: bool = True) -> None:
        """Adapt codebooks after an optimizer step, once, on the statistics of all its micro-batches.

        A collective like `losses` where a quantizer has something to adapt; most have not. In evaluation mode nothing
        changes.

        Args:
            stats: of forwards in training mode.
            start: whether codes that wait for their first tokens may be set from these.
        """

    def spawn(self, groups: int = 1) -> Quantizer:
        """Another quantizer of the same settings for a group axis of ``groups``, with codebooks drawn anew.

        `Residual` takes one for every stage, `Product` one for all its parts together. A quantizer without state is
        good for any number of either.
        """
        return self

    def set_seed(self, seed: int) -> None:
        """Key the draws of training (dropout's depths, replacement codes) by (seed, place in this module, step)."""
        for path, module in self.named_modules():
            if isinstance(module, Quantizer):
                module.key = derive_seed(seed, path)

    @property
    def refinement(self) -> Tensor | float | None:
        """How many times finer than this quantizer's a next stage's codes should lie, a number or ``(D,)``, >= 1.

        None: no scaling of its codes refines what it leaves, so that it cannot be a stage of `Residual`.
        """
        return None

    @property
    def started(self) -> bool:
        """Whether its codes stand for something already; see `update`."""
        return True

    @property
    def rank_local(self) -> bool:
        """Whether ranks hold different codes, each its own tokens'."""
        return any(part.rank_local for part in self.parts() if part is not self)

    def parts(self) -> list[Quantizer]:
        """This quantizer and all inside it."""
        return [part for part in self.modules() if isinstance(part, Quantizer)]

    @abstractmethod
    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        """The codes: what `_bound` gave, ``(T, G, D)`` → values ``(T, G, D)`` without gradient and ids ``(T, G, C)``.

        Values have the dtype of the codes, float32 as a rule, so that `_decode` gives the same bits.
        """

    @abstractmethod
    def _decode(self, ids: Tensor) -> Tensor:
        """``(T, G, C)`` int64 → the same values ``(T, G, D)``, 0 for -1."""

    def _bound(self, x: Tensor) -> Tensor:
        """``(T, G, D)`` → what is rounded, on the scale of the codes."""
        return x

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        """``values``, bit for bit, with a gradient for ``bounded``; NaN where that is."""
        return straight_through(values, bounded)

    def _quantize(self, bounded: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Stats]:
        """Values and ids as from `_nearest`, 0 and -1 where masked, and the statistics; ``keep`` as `_statistics`."""
        values, ids = self._nearest(bounded)
        if keep is not None:
            absent = ~keep[:, None, None]
            values, ids = values.masked_fill(absent, 0), ids.masked_fill(absent, -1)
        return values, ids, self._statistics(bounded, values, ids, keep)

    def _statistics(self, bounded: Tensor, values: Tensor, ids: Tensor, keep: Tensor | None) -> Stats:
        """Sums over tokens, each with G as its first axis except ``tokens``; masked tokens must add nothing.

        Args:
            bounded: ``(T, G, D)``, with gradient; anything finite where masked.
            values: ``(T, G, D)``, 0 where masked.
            ids: ``(T, G, C)``, -1 where masked.
            keep: ``(T,)`` bool or None, True = real token.
        """
        count = keep.sum() if keep is not None else torch.full((), len(ids), dtype=torch.int64, device=ids.device)
        sums = {"tokens": count}
        if len(self.codebook_sizes) == 1 and self.codebook_sizes[0] <= MAX_COUNTED_CODES:
            sums["codes"] = histogram(ids.squeeze(-1), self.codebook_sizes[0])
        return Stats(sums)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        # Codebooks stay in float32 under `.bfloat16()` and `.half()`: rounded codes would be other codes.
        def keep_fp32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(keep_fp32, recurse)

    def _tokens(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One row a token in float32 or float64: ``(T, 1, D)``, 0 where masked, and the mask as ``(T,)``."""
        tokens = x.reshape(-1, 1, self.dim)
        tokens = tokens if tokens.dtype == torch.float64 else tokens.float()
        if mask is None:
            return tokens, None
        keep = mask.reshape(-1)
        # Whatever stands in the padding, NaN as well, reaches neither a statistic nor a gradient.
        return tokens.masked_fill(~keep[:, None, None], 0), keep


# So that a quantizer that was exported can be saved.
_register_namedtuple(QuantizerOutput, serialized_type_name="vqclip.quantizers.QuantizerOutput")


class QuantizerSection(Protocol):
    """Any quantizer's configuration."""

    def build(self) -> Quantizer:
        """Make the quantizer."""
