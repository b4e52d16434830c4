"""Quantizers made of others: several codebooks side by side, and several stages one after another."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS, MAX_STAGES, MAX_WIDTH
from vqclip.errors import ConfigError
from vqclip.nn.precision import constant
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.nearest import TableConfig, TableQuantizer, look_up, nearest_few
from vqclip.quantizers.stats import Stats, random_integers, stream
from vqclip.quantizers.vectors import CHUNK, summary, tokens_at_a_time

if TYPE_CHECKING:  # the package binds the name to its union, which contains the configurations of this file
    QuantizerConfig = Any

FINEST = 2.0**24
"""Largest factor between the first and the last stage's codes; beyond it float32 cannot add them."""


def check_size(name: str, dim: int, codebooks: int, stages: int = 1) -> None:
    """Check the sizes of a quantizer that contains others, before it is made; raise ConfigError if one is too large."""
    if codebooks > MAX_CODEBOOKS or dim > MAX_WIDTH:
        raise ConfigError(
            f"{name}: got {codebooks} codebooks and {dim} channels a token, nested ones counted; expected at most "
            f"{MAX_CODEBOOKS} of each"
        )
    if stages > MAX_STAGES:
        raise ConfigError(f"{name}: got {stages} stages, nested ones counted; expected at most {MAX_STAGES}")


class Product(Quantizer):
    """Several codebooks per token (product quantization: Jégou et al. 2011; multi-codebook: UniTok, Ma et al. 2025).

    Vectors are split into ``codebooks`` parts of ``layer.dim`` neighbouring channels. Each part is quantized by
    ``layer``; ids and vectors are concatenated. Codebook c has column c of the ids and metrics ``c/usage``. Losses are
    means over the codebooks, with the weights of the layer.

    All parts are computed together, in the group axis; a layer with state has a separate codebook for each.

    Args:
        layer: the quantizer of one part, which may be a `Product` or `Residual`; only its settings are used.
        codebooks: number of parts, at least 1.
        groups: G, the number of such products; more than 1 inside another `Product`.

    Raises:
        ConfigError: ``codebooks`` is less than 1, or there are more codebooks or channels than `check_size` allows.
    """

    def __init__(self, layer: Quantizer, codebooks: int, groups: int = 1):
        if codebooks < 1:
            raise ConfigError(f"Product: codebooks is {codebooks}, expected at least 1")
        check_size("Product", layer.dim * codebooks, len(layer.codebook_sizes) * codebooks)
        super().__init__(layer.dim * codebooks, layer.codebook_sizes * codebooks, layer.loss_weights)
        self.layer = layer.spawn(groups * codebooks)
        self.codebooks = codebooks

    def _losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return the layer's losses, each the mean over codebooks."""
        return self.layer._losses(stats)

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Return the layer's metrics: means over codebooks, and ``0/usage``, ``1/usage``, ... for each."""
        return self.layer.metrics(stats)

    def _update(self, stats: Stats, start: bool) -> None:
        """Update the layer; see `Quantizer.update`."""
        self.layer.update(stats, start)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """See `Quantizer.places`."""
        inner, places = self.layer.extent.codebooks, self.layer.places
        return tuple((stage, part * inner + codebook) for part in range(self.codebooks) for stage, codebook in places)

    @property
    def started(self) -> bool:
        """True if the layer is initialised."""
        return self.layer.started

    @property
    def refinement(self) -> tuple[float, ...] | float | None:
        """The layer's refinement, repeated for every part."""
        ratio = self.layer.refinement
        return ratio * self.codebooks if isinstance(ratio, tuple) else ratio

    def spawn(self, groups: int = 1) -> Product:
        """See `Quantizer.spawn`."""
        return Product(self.layer, self.codebooks, groups)

    def _bound(self, x: Tensor) -> Tensor:
        return self._join(self.layer._bound(self._split(x)))

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        return self._join(self.layer._pass_gradient(self._split(values), self._split(bounded)))

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = self.layer._nearest(self._split(bounded))
        return self._join(values), self._join(ids)

    def _decode(self, ids: Tensor) -> Tensor:
        return self._join(self.layer._decode(self._split(ids)))

    def _quantize(self, bounded: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Stats]:
        values, ids, stats = self.layer._quantize(self._split(bounded), keep)
        return self._join(values), self._join(ids), stats

    def _first_stages(self, bounded: Tensor, stages: int) -> Tensor:
        return self._join(self.layer._first_stages(self._split(bounded), stages))

    def _split(self, x: Tensor) -> Tensor:
        """``(T, G, C D)`` → ``(T, G C, D)``."""
        return rearrange(x, "t g (c d) -> t (g c) d", c=self.codebooks)

    def _join(self, x: Tensor) -> Tensor:
        """``(T, G C, D)`` → ``(T, G, C D)``."""
        return rearrange(x, "t (g c) d -> t g (c d)", c=self.codebooks)


class ProductConfig(Config):
    """Product quantization: several codebooks of the same kind side by side."""

    kind: Literal["product"] = "product"
    layer: QuantizerConfig
    """The quantizer of each codebook; its width times ``codebooks`` is the whole width."""
    codebooks: Annotated[int, Field(ge=1, le=MAX_CODEBOOKS)]
    """Number of codebooks, and so of ids per token."""

    def build(self) -> Product:
        """Make the quantizer."""
        return Product(self.layer.build(), self.codebooks)


class Residual(Quantizer):
    """Several stages of one quantizer (residual VQ: SoundStream, Zeghidour et al. 2021, arXiv 2107.03312).

        remainder = bound(x)                           # once, by the first stage
        for i in range(depth):
            code_i = nearest_i(remainder * refinement^i) / refinement^i
            remainder = remainder - code_i
        vector = code_0 + code_1 + ...                 # straight-through gradient, once

    ``refinement`` is 2 for LFQ and BSQ, the number of levels for FSQ (with the uniform layout), and 1 for VQ and SimVQ,
    which learn the scale. Stages with k-means are initialised one per step, each on the remainder of the earlier ones.

    Stage i of a layer with C codebooks has the columns ``i C`` to ``(i + 1) C - 1`` of the ids.

    With ``shared`` all stages have one codebook, which learns from the tokens of every stage. With ``beam`` B, a search
    keeps the B best sums of codes after every stage instead of one, at up to B² times the cost; the result is the sum
    nearest to the vector. Its first stages are then chosen for the sum, not for themselves. In a shared codebook, codes
    in another order are the same sum, kept once.

    With ``dropout`` only the first d stages are active in a training step. d, from ``least`` to ``depth``, is drawn by
    (seed, layer, step) and so equal on all ranks without communication. An inactive stage has ids -1 and adds nothing
    to the vector or to statistics. `truncate` sets ids of late stages to -1 afterwards, to use fewer bits.

    Losses are sums over stages; metrics are means, and ``0/usage``, ``1/usage``, ... for each stage. Other
    arguments: see `ResidualConfig`; with ``dropout``, `update` draws the next number of stages.

    Args:
        layer: the quantizer of a stage; only its settings are used, every stage is a new one.
        groups: G, the number of such quantizers; more than 1 inside a `Product`.

    Raises:
        ConfigError: a number out of range, a layer that cannot be refined (cosine VQ, other layouts of FSQ, Identity),
            more stages than the precision of float32 allows, more stages or codebooks than `check_size` allows, a
            search among the codes of another layer than VQ or SimVQ, or a shared codebook where there is none.
    """

    step: Tensor

    def __init__(
        self,
        layer: Quantizer,
        depth: int,
        dropout: bool = False,
        least: int = 1,
        shared: bool = False,
        beam: int = 1,
        groups: int = 1,
    ):
        _check_numbers(depth, least, beam, isinstance(layer, TableQuantizer), dropout)
        _check_shared(shared, isinstance(layer.parts()[-1], TableQuantizer))
        if depth > 1:
            ratio = layer.refinement
            if ratio is None:
                raise ConfigError(
                    f"Residual: the codes of this {type(layer).__name__} cannot be refined; expected FSQ with the "
                    "layout uniform, LFQ, BSQ, SimVQ, VQ without cosine, or a Product or Residual of them"
                )
            largest = max(ratio) if isinstance(ratio, tuple) else ratio
            if largest**depth > FINEST:
                useful = int(math.log(FINEST) / math.log(largest))
                raise ConfigError(f"Residual: depth is {depth}, expected at most {useful}, the precision of float32")
        check_size("Residual", layer.dim, len(layer.codebook_sizes) * depth, layer.extent.stages * depth)
        super().__init__(layer.dim, layer.codebook_sizes * depth, layer.loss_weights)
        self.layers = nn.ModuleList(layer.spawn(groups) for _ in range(1 if shared else depth))
        self.depth, self.shared, self.beam = depth, shared, beam
        self.dropout = self._needs_update = dropout
        self.least = least
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        _refresh_turns(self)
        self.register_load_state_dict_post_hook(_refresh_turns)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """See `Quantizer.places`."""
        inner, places = self.stages[0].extent.stages, self.stages[0].places
        return tuple((number * inner + stage, codebook) for number in range(self.depth) for stage, codebook in places)

    @property
    def refinement(self) -> tuple[float, ...] | float | None:
        """The product of the stages' refinements."""
        ratio = self.stages[0].refinement
        if isinstance(ratio, tuple):
            return tuple(each**self.depth for each in ratio)
        return None if ratio is None else ratio**self.depth

    @property
    def started(self) -> bool:
        """True if all stages are initialised."""
        return all(stage.started for stage in self.stages)

    @property
    def stages(self) -> list[Quantizer]:
        """Quantizers of the stages, coarsest first; with ``shared`` the same one ``depth`` times."""
        return list(self.layers) * (self.depth if self.shared else 1)  # type: ignore[return-value]

    def spawn(self, groups: int = 1) -> Residual:
        """See `Quantizer.spawn`."""
        return Residual(self.stages[0], self.depth, self.dropout, self.least, self.shared, self.beam, groups)

    def _losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return the sum over stages of each loss of the layer."""
        each = [stage._losses(stats.under(str(i))) for i, stage in enumerate(self.stages)]
        return {name: torch.stack([losses[name] for losses in each]).sum() for name in each[0]}

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Return each stage's metrics as ``i/...``, means over stages with tokens, and ``tokens`` of the first."""
        each = [stage.metrics(stats.under(str(i))) for i, stage in enumerate(self.stages)]
        used = torch.stack([m["tokens"] > 0 for m in each])
        used[0].fill_(True)  # so that the mean is not empty
        whole = {n: summary(n, torch.stack([m[n].double() for m in each]), used) for n in each[0] if "/" not in n}
        nested = {f"{i}/{name}": value for i, m in enumerate(each) for name, value in m.items() if name != "tokens"}
        return {**whole, "tokens": each[0]["tokens"], **nested}

    def _update(self, stats: Stats, start: bool) -> None:
        """Update every stage, and the step number that keys dropout."""
        if self.shared:
            stats = stats.local() if self.rank_local else stats.sync()
        for i, stage in enumerate(self.layers):
            assert isinstance(stage, Quantizer)
            already = stage.started
            stage.update(self._over_stages(stats) if self.shared else stats.under(str(i)), start)
            # A stage that has just been initialised changes the remainder: the next one starts in the next step.
            start = start and already
        _refresh_turns(self)
        self.step.add_(1)

    def _bound(self, x: Tensor) -> Tensor:
        return self.stages[0]._bound(x)

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        return self.stages[0]._pass_gradient(values, bounded)

    def _over_stages(self, stats: Stats) -> Stats:
        """Return reduced statistics of the only codebook: sums over stages, and drawn tokens.

        Of the stages in turn; before the codebook has started, of the first one.
        """
        each = [stats.under(str(i)) for i in range(self.depth)]

        def join(name: str, of_stages: list[Tensor]) -> Tensor:
            parts = torch.stack(of_stages)
            if not name.startswith("drawn/"):
                return parts.sum(dim=0)
            if not self.started:  # k-means: remainders of a codebook that has not begun tell nothing
                return parts[0]
            turn = torch.arange(parts.shape[1], device=parts.device)
            return parts[turn % self.depth, turn]

        sums = {name: join(name, [part.sums[name] for part in each]) for name in each[0].sums}
        own = {name: join(name, [part.own[name] for part in each]) for name in each[0].own}
        return Stats(sums, is_global=True, own=own)

    def _search(self, bounded: Tensor) -> list[Tensor] | list[None]:
        """Return the ids ``(T, G, 1)`` of each stage for the best of the sums that the search found; None without."""
        if self.beam == 1:
            return [None] * self.depth
        tokens = tokens_at_a_time(bounded.device, self.beam**2 * bounded.shape[1] * self.dim, CHUNK)
        parts = (bounded,) if torch.compiler.is_exporting() else bounded.split(tokens)
        return list(torch.cat([self._best_sums(part) for part in parts]).split(1, dim=-1))

    def _best_sums(self, bounded: Tensor) -> Tensor:
        """Return the ids ``(T, G, depth)`` of the best sums that a beam search finds."""
        left = bounded.detach()[:, None]  # what each of the best sums leaves, (T, beam, G, D)
        chosen = torch.zeros((*left.shape[:3], 0), dtype=torch.int64, device=left.device)
        for stage in self.stages:
            assert isinstance(stage, TableQuantizer)
            with torch.no_grad():
                codes, beam = stage.codes(), left.shape[1]
                few = min(self.beam, codes.shape[1])
                ids = nearest_few(left.flatten(0, 1), codes.to(left.dtype), few).movedim(2, 1)
                values = look_up(codes, ids.flatten(0, 1))
            shape = (bounded.shape[0], beam, few, bounded.shape[1])
            left = (left[:, :, None] - values.view(*shape, self.dim)).flatten(1, 2)
            before = chosen[:, :, None].expand(-1, -1, few, -1, -1)
            chosen = torch.cat((before, ids.reshape(*shape, 1)), dim=-1).flatten(1, 2)
            distances = left.square().sum(dim=-1)
            if self.shared:
                distances = distances.masked_fill(_same_codes(chosen), torch.inf)
            best = distances.topk(min(self.beam, beam * few), dim=1, largest=False).indices[..., None]
            left, chosen = (each.gather(1, best.expand(-1, -1, -1, each.shape[-1])) for each in (left, chosen))
        return chosen[:, 0]

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        left, sums, columns = bounded.detach(), [], []
        for i, (stage, chosen) in enumerate(zip(self.stages, self._search(bounded), strict=True)):
            part = left * self._fineness(i, left.device)
            values, ids = stage._nearest(part) if chosen is None else (stage._decode(chosen), chosen)
            sums.append(values / self._fineness(i, left.device))
            columns.append(ids)
            left = left - sums[-1]
        return functools.reduce(torch.add, sums), torch.cat(columns, dim=-1)

    def _decode(self, ids: Tensor) -> Tensor:
        parts = zip(self.stages, ids.chunk(self.depth, dim=-1), strict=True)
        scaled = [stage._decode(p) / self._fineness(i, p.device) for i, (stage, p) in enumerate(parts)]
        return functools.reduce(torch.add, scaled)

    def _quantize(self, bounded: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Stats]:
        left, sums, columns, stats = bounded, [], [], {}
        masks, found = self._stage_masks(bounded, keep), self._search(bounded)
        for i, (stage, theirs, chosen) in enumerate(zip(self.stages, masks, found, strict=True)):
            part = left * self._fineness(i, left.device)
            if chosen is None:
                values, ids, stats[str(i)] = stage._quantize(part, theirs)
            else:
                values, ids, stats[str(i)] = stage._finish(stage._decode(chosen), chosen, part, theirs)
            sums.append(values / self._fineness(i, left.device))
            columns.append(ids)
            left = left - sums[-1].detach()
        return functools.reduce(torch.add, sums), torch.cat(columns, dim=-1), Stats.nest(stats)

    def _first_stages(self, bounded: Tensor, stages: int) -> Tensor:
        inner, left, sums = self.stages[0].extent.stages, bounded, []
        for i, first in enumerate(range(0, stages, inner)):
            values = self.stages[i]._first_stages(left * self._fineness(i, left.device), min(inner, stages - first))
            sums.append(values / self._fineness(i, left.device))
            left = left - sums[-1].detach()
        return functools.reduce(torch.add, sums)

    def _stage_masks(self, bounded: Tensor, keep: Tensor | None) -> list[Tensor | None]:
        """Return for each stage the tokens that it quantizes: ``(T,)`` bool, or None for all."""
        if not (self.dropout and self.training):
            return [keep] * self.depth
        number = random_integers(stream(self.key, self.step), torch.zeros_like(self.step))
        depth = self.least + number % (self.depth - self.least + 1)
        every = torch.ones(len(bounded), dtype=torch.bool, device=bounded.device) if keep is None else keep
        return [every & (i < depth) for i in range(self.depth)]

    def _fineness(self, stage: int, device: torch.device) -> Tensor | float:
        """Return the factor by which a stage's codes are finer: a number, or ``(D,)`` in float32, which is exact."""
        if stage == 0:
            return 1.0
        ratio = self.stages[0].refinement
        assert ratio is not None
        if isinstance(ratio, tuple):
            return constant([each**stage for each in ratio], device, torch.float32)
        return ratio**stage


def _refresh_turns(module: nn.Module, keys: object = None) -> None:
    """Let the first codebook that is not initialised be the next. As a load hook it runs after those of the stages."""
    assert isinstance(module, Residual)
    is_next = True
    for part in module.parts():
        if len(part.parts()) == 1:  # has the codebook itself
            part.set_turn(is_next)
            is_next = is_next and part.started


def _same_codes(ids: Tensor) -> Tensor:
    """Return where a row of ``ids`` ``(T, rows, G, stages)`` has the codes of an earlier one, in any order: bool.

    Rows are compared by sums of 62-bit hashes of their ids.
    """
    sums, order = random_integers(ids.new_zeros(()), ids).sum(dim=-1).sort(dim=1, stable=True)
    again = F.pad(sums[:, 1:] == sums[:, :-1], (0, 0, 1, 0))
    return torch.zeros_like(again).scatter(1, order, again)


def _check_shared(shared: bool, table: bool) -> None:
    if shared and not table:
        raise ConfigError(
            "Residual: shared is True, but the codes of this layer are not learned, so there is no codebook to share; "
            "expected a layer of VQ or SimVQ, or shared: false"
        )


def _check_numbers(depth: int, least: int, beam: int, table: bool, dropout: bool) -> None:
    if depth < 1 or not 1 <= least <= depth:
        raise ConfigError(f"Residual: depth is {depth} and least {least}, expected 1 <= least <= depth")
    if beam != 1 and (beam < 1 or not table):
        raise ConfigError(f"Residual: beam is {beam}, expected 1, or more where the layer is VQ or SimVQ")
    if beam > 1 and dropout:
        raise ConfigError(
            f"Residual: beam is {beam} with dropout, but a search for the best sum of all stages finds first "
            "stages that are poor alone; expected beam: 1, or dropout: false"
        )


class ResidualConfig(Config):
    """Residual quantization: several stages of one quantizer, each for the error of the stages before it."""

    kind: Literal["residual"] = "residual"
    layer: QuantizerConfig
    """The quantizer of every stage."""
    depth: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    """Number of stages, and so of ids per codebook of the layer."""
    dropout: bool = False
    """Use a random number of stages in every training step."""
    least: Annotated[int, Field(ge=1)] = 1
    """Number of stages that are never dropped."""
    shared: bool = False
    """true: one codebook for all stages, with vq and simvq only. false: one for each."""
    beam: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of sums of codes that the search for ids keeps after each stage; more than 1 with vq and simvq only,
    and without dropout: the first stages are then poor alone."""

    @model_validator(mode="after")
    def _fits_together(self) -> ResidualConfig:
        _check_numbers(self.depth, self.least, self.beam, isinstance(self.layer, TableConfig), self.dropout)
        leaf = self.layer
        while isinstance(leaf, (ProductConfig, ResidualConfig)):
            leaf = leaf.layer
        _check_shared(self.shared, isinstance(leaf, TableConfig))
        return self

    def build(self) -> Residual:
        """Make the quantizer."""
        return Residual(self.layer.build(), self.depth, self.dropout, self.least, self.shared, self.beam)
