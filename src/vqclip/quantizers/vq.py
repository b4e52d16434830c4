"""Vector quantization: a table of codes that move with the vectors."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import torch
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.nn.dropout import GaussianNoise
from vqclip.nn.precision import full_precision
from vqclip.quantizers.base import resolve_weights
from vqclip.quantizers.gradients import drawn_direction, soft_assignment
from vqclip.quantizers.nearest import GradientPath, TableConfig, TableQuantizer, look_up, whole
from vqclip.quantizers.new_codes import kmeans, replacements
from vqclip.quantizers.stats import Draw, Stats, stream
from vqclip.quantizers.vectors import check_channels, squared_error, sums_by_code, unit

log = logging.getLogger(__name__)

Learning = Literal["ema", "gradient", "ibq", "diveq"]
"""Update rule of the codes: moving mean of their vectors, gradient of the codebook loss, or of the training loss."""
LOSSES: dict[Learning, dict[str, float]] = {
    "ema": {"commitment": 0.25},
    "gradient": {"commitment": 0.25, "codebook": 1.0},
    "ibq": {"commitment": 1.0, "codebook": 0.25, "index": 1.0},
    "diveq": {"commitment": 0.0},
}
"""Losses of each rule, with their weights by default."""
NOISE_VARIANCE = 1e-3
"""Variance of DiVeQ's noise in the paper."""
TRAINED = "tokens_to_follow"
"""Entry of statistics that were computed in training mode."""

KMEANS_VECTORS = 8
"""Number of vectors for k-means per code."""


class VQ(TableQuantizer):
    """Vector Quantization (VQ-VAE: van den Oord et al. 2017, https://arxiv.org/abs/1711.00937).

    A vector becomes the nearest of K codes. With ``learning="ema"`` each code is the moving mean of its vectors (the
    paper's appendix), with ``"gradient"`` a loss moves it. With ``"ibq"`` and ``"diveq"`` the gradient of ``vectors``
    itself moves codes: all of them (`soft_assignment`), or the nearest one, in a direction with noise
    (`drawn_direction`) that `vqclip.nn.dropout.set_dropout_keys` keys; without keys there is none. Forward changes
    nothing; `update` uses the statistics of the global batch:

        first step:  codes = k-means of up to 8 K random tokens
        later:       sizes  = decay · sizes  + (1 - decay) · counts of each code
                     totals = decay · totals + (1 - decay) · sums of each code's vectors
                     codes  = totals / sizes
        always:      codes with sizes < dead_below · mean size are replaced by random tokens

    An update whose tokens contain NaN or infinity moves no code; the next one reports it, once. The tokens are those of
    all ranks with ``sync_codebook``, and of this rank without it, unless `sync` has reduced the statistics.

    Dead codes follow SoundStream (Zeghidour et al. 2021): at most a quarter of the codes (or 64) in one step become
    tokens drawn by (seed, step, layer), no two of them equal to each other or to a code.

    Losses, each a mean over the tokens of all ranks: ``commitment``; with ``gradient`` and ``ibq`` also ``codebook``
    (`TableQuantizer`); with ``ibq`` also ``index``, the same number with a gradient for the vector and for all codes.
    One with weight 0, as ``commitment`` has by default with ``diveq``, is not computed.

    Other arguments: see `VQConfig`.

    Args:
        loss_weights: name → weight, by default those in `LOSSES`.
        groups: G, the number of codebooks; more than 1 in a `Product`.

    Raises:
        ConfigError: a value out of range, a weight for a loss that does not exist, or an argument that ``learning``
            does not read.
    """

    codebook: Tensor
    sizes: Tensor
    totals: Tensor
    skipped: Tensor
    """() int64, the updates that moved no code because of tokens that are not finite, in this process."""

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        learning: Learning = "ema",
        decay: float = 0.99,
        cosine: bool = False,
        kmeans: bool = True,
        dead_below: float = 0.03,
        gradient: GradientPath | None = None,
        noise_variance: float | None = None,
        sync_codebook: bool = True,
        loss_weights: Mapping[str, float] | None = None,
        groups: int = 1,
    ):
        self._settings: dict[str, Any] = {k: v for k, v in locals().items() if k not in ("self", "__class__", "groups")}
        for name, value in (("decay", decay), ("dead_below", dead_below)):
            if not 0 <= value < 1:
                raise ConfigError(f"VQ: {name} is {value}, expected a number from 0 to less than 1")
        if cosine:
            check_channels("VQ with cosine", dim)
        if learning not in get_args(Learning):
            raise ConfigError(f"VQ: learning is {learning!r}, expected one of {', '.join(get_args(Learning))}")
        if gradient is not None and learning in ("ibq", "diveq"):
            raise ConfigError(
                f"VQ: gradient is {gradient!r} with learning: {learning}, which has a gradient of its own; leave it "
                "out, or set learning: ema or gradient"
            )
        if noise_variance is not None and (learning != "diveq" or not 0 <= noise_variance < math.inf):
            raise ConfigError(
                f"VQ: noise_variance is {noise_variance} with learning: {learning}, expected a number of at least 0 "
                "with learning: diveq, and none with the others"
            )
        path = gradient if learning in ("ibq", "diveq") else gradient or "rotation"
        super().__init__(dim, codebook_size, groups, path, vq_weights(learning, loss_weights, sync_codebook))
        self.learning, self.decay, self.cosine, self.dead_below = learning, decay, cosine, dead_below
        self.sync_codebook = sync_codebook
        codebook = self._normalize(torch.randn(groups, codebook_size, dim, dtype=torch.float32) * dim**-0.5)
        if learning != "ema":
            self.codebook = nn.Parameter(codebook)
        else:
            self.register_buffer("codebook", codebook)
            self.register_buffer("totals", torch.zeros_like(codebook))
        self.register_buffer("sizes", torch.zeros_like(codebook[..., 0]))
        variance = NOISE_VARIANCE if noise_variance is None else noise_variance
        self.noise = GaussianNoise(variance**0.5) if learning == "diveq" else None
        self.skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._skipped_before: Tensor | None = self.skipped
        # It follows from `sizes`, but forward does not wait for the device.
        self._is_started = not kmeans
        self._needs_update = learning == "ema" or kmeans or dead_below > 0
        self._is_next = True
        self._refresh_draws()
        self.register_load_state_dict_post_hook(_refresh_started)

    def spawn(self, groups: int = 1) -> VQ:
        """See `Quantizer.spawn`."""
        return VQ(**self._settings, groups=groups)

    def codes(self) -> Tensor:
        """Return the codes ``(G, K, D)``."""
        return self._normalize(whole(self.codebook))

    @property
    def refinement(self) -> float | None:
        """1; None with cosine: the remainder of a unit vector is shorter than any code."""
        return None if self.cosine else 1.0

    @property
    def started(self) -> bool:
        """True if the codebook is initialised; always without k-means."""
        return self._is_started

    def set_turn(self, is_next: bool) -> None:
        """See `Quantizer.set_turn`; tokens for k-means are drawn in the turn alone."""
        self._is_next = is_next
        self._refresh_draws()

    @property
    def rank_local(self) -> bool:
        """True without ``sync_codebook``."""
        return not self.sync_codebook

    def _update(self, stats: Stats, start: bool) -> None:
        """Move the codes to the tokens of the global batch, replace dead codes, and count the step."""
        if TRAINED not in (stats.sums if self.sync_codebook else stats.own):
            raise ConfigError("VQ.update: got the statistics of a forward in evaluation mode, expected training mode")
        if not self._is_started:
            _refresh_started(self)  # buffers may have been changed without load_state_dict
        stats = stats.sync() if self.sync_codebook else stats.local()
        followed = stats.sums if self.sync_codebook else stats.own
        if self._draws_wanted() > len(followed.get("drawn/vectors", ())):
            raise ConfigError(
                "VQ.update: got statistics without drawn tokens, expected those of a forward after codes were loaded"
            )
        # If a token has no finite distance from its code, the update is one without tokens.
        finite = stats["commitment"].to(self.codebook.dtype).isfinite().all()
        self._count_skipped(~finite)
        counts = followed["codes"].where(finite, 0)
        with full_precision(whole(self.codebook).device):
            if self._is_started:
                self._update_averages(counts, followed["vectors"] if self.learning == "ema" else None)
            elif start:
                present = followed["drawn/present"].where(finite, 0)
                self._initialize_kmeans(counts, followed["drawn/vectors"], present)
            if self.dead_below > 0:
                self._replace_dead(followed["drawn/vectors"], followed["drawn/present"].where(finite, 0))
            self._count_step(counts)
        self._refresh_draws()

    def _bound(self, x: Tensor) -> Tensor:
        return self._normalize(x)

    def _attach_codes(self, values: Tensor, ids: Tensor, bounded: Tensor) -> Tensor:
        if self.training and self.learning == "diveq":
            return look_up(self.codes(), ids.squeeze(-1))
        if self.training and self.learning == "ibq":
            return soft_assignment(values, bounded, self.codes(), ids.squeeze(-1))
        return values

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        if self.training and self.noise is not None:  # diveq
            return drawn_direction(values, bounded, self.noise(bounded))
        if self.training and self.learning == "ibq":
            return values + (bounded - bounded).detach()  # NaN where the vector is
        return super()._pass_gradient(values, bounded)

    def _normalize(self, x: Tensor) -> Tensor:
        return unit(x) if self.cosine else x

    def _statistics(self, bounded: Tensor, values: Tensor, ids: Tensor, keep: Tensor | None) -> Stats:
        sums = dict(super()._statistics(bounded, values, ids, keep).sums)
        if "index" in self.loss_weights:
            sums["index"] = squared_error(bounded, values, keep)
        if not self.training:
            return Stats(sums)
        followed = {TRAINED: sums["tokens"], "codes": sums["codes"]}
        if self.learning == "ema":
            followed["vectors"] = sums_by_code(bounded.detach(), ids.squeeze(-1), self.codebook_sizes[0])
        stats = Stats(sums | followed) if self.sync_codebook else Stats(sums, own=followed)
        if not self._settings["kmeans"] and not self._draws_wanted():
            return stats
        real = torch.ones(len(ids), dtype=torch.bool, device=ids.device) if keep is None else keep
        draw = Draw(stream(self.key, self.step), self._draws, bounded.detach(), real, shared=self.sync_codebook)
        return replace(stats, draws={"drawn": draw})

    def _draws_wanted(self) -> int:
        size = self.codebook_sizes[0]
        if self._is_next and not self._is_started:
            return size * KMEANS_VECTORS
        return min(size, max(size // 4, 64)) if self.dead_below > 0 else 0

    def _refresh_draws(self) -> None:
        # A tensor of its own for each number: statistics keep theirs.
        self._draws = torch.tensor(self._draws_wanted(), device="cpu")

    def _count_skipped(self, skipped: Tensor) -> None:
        """Count the update if it is skipped; report the first one in the next, so that none waits for the device."""
        before = self._skipped_before
        # A number that has not arrived yet may be any.
        if before is not None and before > 0 and self.skipped > 0:
            _warn_skipped()
            before = None
        self.skipped = self.skipped.to(skipped.device) + skipped
        self._skipped_before = None if before is None else self.skipped.to("cpu", non_blocking=True, copy=True)

    def _update_averages(self, counts: Tensor, vectors: Tensor | None) -> None:
        """Update the moving averages with ``counts`` ``(G, K)`` and ``vectors`` ``(G, K, D)``, sums over tokens."""
        counts = counts.to(self.sizes.dtype)
        seen = counts.sum() > 0
        # The averages start with equal counts and the current codes.
        average = counts.mean(dim=-1, keepdim=True).expand_as(counts)
        fresh = (self.sizes.sum(dim=-1, keepdim=True) == 0) & seen
        sizes = torch.where(fresh, average, self.sizes)
        moved = torch.where(seen, torch.lerp(counts, sizes, self.decay), sizes)
        self.sizes.copy_(moved)
        if vectors is None:
            return
        totals = torch.where(fresh[..., None], self.codebook * average[..., None], self.totals)
        totals = torch.where(seen, torch.lerp(vectors.to(totals.dtype), totals, self.decay), totals)
        self.totals.copy_(totals)
        # A code that has not been used for very long keeps its value instead of becoming 0 / 0.
        known = seen & (moved > 1e-6 * moved.mean(dim=-1, keepdim=True))
        mean = totals / torch.where(known, moved, 1)[..., None]
        self.codebook.copy_(self._normalize(torch.where(known[..., None], mean, self.codebook)))

    def _initialize_kmeans(self, counts: Tensor, vectors: Tensor, present: Tensor) -> None:
        """Initialise the codes by k-means of the drawn tokens ``(M, G, D)``; if there are none, wait for the next step.

        With fewer different tokens than codes, the other codes do not change.
        """
        found = vectors[present.flatten() > 0].to(self.codebook.dtype)
        if not len(found):
            return
        size = self.codebook_sizes[0]
        log.info("VQ: k-means of %d vectors of %d channels into %d codes", len(found), self.dim, size)
        centres, members, placed = kmeans(rearrange(found, "m g d -> g m d"), size, cosine=self.cosine)
        sizes = members.to(self.sizes.dtype) * (counts.sum(dim=-1, keepdim=True) / len(found))
        self._set_codes(placed, centres, sizes)
        self._is_started = True

    def _replace_dead(self, vectors: Tensor, present: Tensor) -> None:
        average = self.sizes.mean(dim=-1, keepdim=True)
        dead = self.sizes < self.dead_below * average
        tokens = rearrange(vectors, "m g d -> g m d").to(self.codebook.dtype)
        codes, replaced = replacements(self.codes(), dead, tokens, present.flatten() > 0)
        self._set_codes(replaced, codes, average.expand_as(self.sizes))

    def _set_codes(self, where: Tensor, codes: Tensor, sizes: Tensor) -> None:
        """Set codes ``(G, K, D)`` where ``where`` ``(G, K)`` is True, with ``sizes`` as their moving counts."""
        self.codebook.copy_(torch.where(where[..., None], codes, self.codebook))
        self.sizes.copy_(torch.where(where, sizes, self.sizes))
        if self.learning == "ema":
            self.totals.copy_(torch.where(where[..., None], codes * sizes[..., None], self.totals))


class VQLossWeights(Config):
    """Weights of VQ's losses in the training loss; null: the default of `learning`."""

    commitment: Annotated[float, Field(ge=0)] | None = None
    """Weight of the mean squared distance that moves vectors to their codes; by default 0.25 with learning: ema and
    gradient, 1 with ibq, 0 with diveq."""
    codebook: Annotated[float, Field(ge=0)] | None = None
    """Weight of the same distance, moving codes to their vectors; by default 1 with learning: gradient, 0.25 with ibq,
    0 with ema and diveq, which allow no other."""
    index: Annotated[float, Field(ge=0)] | None = None
    """Weight of the same distance, moving vectors and, through the soft assignment, all codes; by default 1 with
    learning: ibq, 0 with the others, which allow no other."""


class VQConfig(TableConfig):
    """Vector quantization: a table of codes that move with the vectors."""

    kind: Literal["vq"] = "vq"
    learning: Learning = "ema"
    """Update rule of the codes: ema (moving mean of their vectors), gradient (the codebook loss), or by the training
    loss itself: ibq (all codes, through a soft assignment) or diveq (the nearest code, in a direction with noise)."""
    gradient: GradientPath | None = None
    """Gradient from codes to vectors with learning: ema and gradient: straight_through, or rotation (the rotation
    trick), the default. ibq and diveq have gradients of their own, and allow neither."""
    noise_variance: Annotated[float, Field(ge=0)] | None = None
    """Variance of the noise with learning: diveq; by default 0.001, as in the paper. Not allowed with the others."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the moving counts and means; higher is slower."""
    cosine: bool = False
    """Vectors and codes have unit length (Yu et al. 2021, https://arxiv.org/abs/2110.04627)."""
    kmeans: bool = True
    """Initialise the codes with k-means of tokens of the first batch."""
    dead_below: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """A code with less than this share of the average count is replaced by a token of the batch; 0 for never."""
    sync_codebook: bool = True
    """Use the tokens of all ranks. False: each rank uses its own, so that `update` needs no communication and codebooks
    diverge; checkpoints and evaluations use rank 0's codes."""
    loss_weights: VQLossWeights = VQLossWeights()
    """Weights of the losses."""

    @model_validator(mode="after")
    def _fits_together(self) -> VQConfig:
        with torch.device("meta"):
            self.build()
        return self

    def build(self) -> VQ:
        """Make the quantizer; torch's global generator draws its first codes."""
        settings = self.model_dump(exclude={"kind", "loss_weights"})
        return VQ(**settings, loss_weights=self.loss_weights.model_dump(exclude_none=True))


def vq_weights(learning: Learning, weights: Mapping[str, float] | None, sync_codebook: bool) -> dict[str, float]:
    """Return the weights of the losses of the rule.

    Raises:
        ConfigError: a weight that does not fit ``learning``, or codebooks that differ between ranks but learn by
            gradient.
    """
    found = resolve_weights("VQ", dict.fromkeys(VQLossWeights.model_fields, 0.0) | LOSSES[learning], weights)
    if wrong := [name for name, weight in found.items() if weight > 0 and name not in LOSSES[learning]]:
        raise ConfigError(
            f"VQ: loss_weights has {wrong[0]}, but with learning: {learning} there is no such loss; leave it out, or "
            f"set learning: {' or '.join(rule for rule, losses in LOSSES.items() if wrong[0] in losses)}"
        )
    if learning == "gradient" and found["codebook"] == 0:
        raise ConfigError("VQ: loss_weights.codebook is 0, so nothing would move the codes; set learning: ema")
    if learning != "ema" and not sync_codebook:
        raise ConfigError(
            f"VQ: sync_codebook is false with learning: {learning}, but DDP averages the gradients of codes, which "
            "must then be equal on all ranks; expected learning: ema"
        )
    return found


def _refresh_started(module: nn.Module, keys: object = None) -> None:
    assert isinstance(module, VQ)
    module._is_started = not module._settings["kmeans"] or bool(module.sizes.sum() > 0)
    module._refresh_draws()


@functools.cache
def _warn_skipped() -> None:
    log.warning(
        "VQ: the tokens of an update contained NaN or infinity, so that it moved no code; VQ.skipped counts such "
        "updates; mask these tokens, or find their cause, such as an overflow in fp16 (unless learning is ema, skip "
        "the optimizer's step too, which moves the codes)"
    )
