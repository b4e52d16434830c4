"""Residual quantization: each stage quantizes what the stages before it left."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS
from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.draws import random_integers, stream
from vqclip.quantizers.stats import Stats
from vqclip.quantizers.usage import summary

if TYPE_CHECKING:  # the package resolves the name to its union, which holds this file's own configuration
    from vqclip.quantizers.base import QuantizerSection as QuantizerConfig


FINEST = 2.0**24
"""How many times finer than the first stage's codes the last one's may lie, for float32 to add them up."""


class Residual(Quantizer):
    """Several stages of one quantizer (residual VQ: SoundStream, Zeghidour et al. 2021, arXiv 2107.03312).

    The vector is brought to the range of the codes once, as the layer does. Stage i then takes the codes nearest to
    what is left, its own codes being ``refinement^i`` times finer: half for LFQ and BSQ, a level's width for FSQ (with
    the uniform layout), as they are for VQ and SimVQ, which learn the scale. The vector is the sum of the stages'
    codes; its gradient passes once. Stages that start with k-means do so one step after another, each on what stages
    with codes have left.

    Ids stand stage after stage: stage i of a layer with C codebooks has columns ``i C`` to ``(i + 1) C - 1``.

    With ``dropout`` only the first d stages count in a training step, d from ``least`` to ``depth`` drawn by (seed,
    layer, step): the same on every rank, without a word between them. The others' ids are -1, they add 0 to the vector
    and nothing to any statistic; so does a stage whose ids are set to -1 later, to spend fewer bits.

    Losses are the sums of the stages' own, metrics named ``0/usage``, ``1/usage``, ... beside their means.

    Args:
        layer: the quantizer of a stage; only its settings are taken, every stage gets one of its own.
        depth: number of stages, at least 1.
        dropout: train with fewer stages at random; `update` must then be called once a step, for the next draw.
        least: stages that are never dropped, 1 to ``depth``.
        groups: G, how many of it; more than 1 in a `Product`.

    Raises:
        ConfigError: a number out of range, a layer whose codes do not refine what it leaves (cosine VQ, other layouts
            of FSQ, Identity), or more stages than float32 has digits for.
    """

    step: Tensor

    def __init__(self, layer: Quantizer, depth: int, dropout: bool = False, least: int = 1, groups: int = 1):
        _check_least(depth, least)
        _check_refinement(layer, depth)
        super().__init__(layer.dim, layer.codebook_sizes * depth, layer.loss_weights)
        self.layers = nn.ModuleList(layer.spawn(groups) for _ in range(depth))
        self.dropout = dropout
        self.least = least
        self.limit: int | None = None
        """Stages that count, in training and evaluation alike; None for all (or as dropout draws). See `at_depth`."""
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        _refresh_waiting(self)
        self.register_load_state_dict_post_hook(_refresh_waiting)

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.layers)

    @property
    def refinement(self) -> Tensor | float | None:
        """That of all stages together."""
        ratio = self.stages[0].refinement
        return None if ratio is None else ratio**self.depth

    @property
    def started(self) -> bool:
        """Whether all stages are."""
        return all(stage.started for stage in self.stages)

    @property
    def stages(self) -> list[Quantizer]:
        """The quantizers of the stages, coarsest first."""
        return list(self.layers)  # type: ignore[arg-type]

    def spawn(self, groups: int = 1) -> Residual:
        """See `Quantizer.spawn`."""
        return Residual(self.stages[0], self.depth, self.dropout, self.least, groups)

    def losses(self, stats: Stats) -> dict[str, Tensor]:
        """The sum over stages of each loss of the layer."""
        stats = stats.sync()
        each = [stage.losses(stats.under(str(i))) for i, stage in enumerate(self.stages)]
        return {name: torch.stack([losses[name] for losses in each]).sum() for name in each[0]}

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Those of every stage i as ``i/...``, and over the stages that have tokens; ``tokens`` is of the first one."""
        each = [stage.metrics(stats.under(str(i))) for i, stage in enumerate(self.stages)]
        used = torch.stack([m["tokens"] > 0 for m in each])
        used[0] = True  # so that there is something to take the mean of
        whole = {n: summary(n, torch.stack([m[n].double() for m in each])[used]) for n in each[0] if "/" not in n}
        nested = {f"{i}/{name}": value for i, m in enumerate(each) for name, value in m.items() if name != "tokens"}
        return {**whole, "tokens": each[0]["tokens"], **nested}

    def update(self, stats: Stats, start: bool = True) -> None:
        """Every stage's own, and the number of the step by which dropout draws."""
        for i, stage in enumerate(self.stages):
            already = stage.started
            stage.update(stats.under(str(i)), start)
            # What this stage leaves has just changed: the next one starts on what it leaves from now on.
            start = start and already
        _refresh_waiting(self)
        if self.training:
            self.step.add_(1)

    def _bound(self, x: Tensor) -> Tensor:
        return self.stages[0]._bound(x)

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        return self.stages[0]._pass_gradient(values, bounded)

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        left, sums, columns = bounded.detach(), [], []
        for i, stage in enumerate(self.stages):
            values, ids = stage._nearest(left * self._fineness(i))
            if self.limit is not None and i >= self.limit:
                values, ids = torch.zeros_like(values), torch.full_like(ids, -1)
            sums.append(values / self._fineness(i))
            columns.append(ids)
            left = left - sums[-1]
        return functools.reduce(torch.add, sums), torch.cat(columns, dim=-1)

    def _decode(self, ids: Tensor) -> Tensor:
        parts = zip(self.stages, ids.chunk(self.depth, dim=-1), strict=True)
        return functools.reduce(torch.add, [stage._decode(p) / self._fineness(i) for i, (stage, p) in enumerate(parts)])

    def _quantize(self, bounded: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Stats]:
        left, sums, columns, stats = bounded, [], [], {}
        for i, (stage, theirs) in enumerate(zip(self.stages, self._stage_masks(bounded, keep), strict=True)):
            values, ids, stats[str(i)] = stage._quantize(left * self._fineness(i), theirs)
            sums.append(values / self._fineness(i))
            columns.append(ids)
            left = left - sums[-1]
        return functools.reduce(torch.add, sums), torch.cat(columns, dim=-1), Stats.nest(stats)

    def _stage_masks(self, bounded: Tensor, keep: Tensor | None) -> list[Tensor | None]:
        """Which tokens each stage sees: ``(T,)`` or None for all."""
        depth: Tensor | int
        if self.limit is not None:
            depth = self.limit
        elif self.dropout and self.training:
            number = random_integers(stream(self.key, self.step), torch.zeros_like(self.step))
            depth = self.least + number % (self.depth - self.least + 1)
        else:
            return [keep] * self.depth
        every = torch.ones(len(bounded), dtype=torch.bool, device=bounded.device) if keep is None else keep
        return [every & (i < depth) for i in range(self.depth)]

    def _fineness(self, stage: int) -> Tensor | float:
        """How many times finer the codes of a stage lie: a number, or ``(D,)`` in float32, of which all are exact."""
        if stage == 0:
            return 1.0
        ratio = self.stages[0].refinement
        assert ratio is not None
        return (ratio.double() ** stage).float() if isinstance(ratio, Tensor) else ratio**stage


def depth_of(module: nn.Module) -> int:
    """Stages of the deepest `Residual` in a module, such as a whole model; 1 where there is none."""
    return max((part.depth for part in module.modules() if isinstance(part, Residual)), default=1)


@contextmanager
def at_depth(module: nn.Module, depth: int) -> Iterator[None]:
    """Within the block, let only the first ``depth`` stages of every `Residual` in ``module`` count, nested ones alike.

    The others' ids are -1, so that a token costs fewer bits.

    Raises:
        ConfigError: ``depth`` is less than 1.
    """
    if depth < 1:
        raise ConfigError(f"depth: got {depth}, expected at least 1")
    before = {part: part.limit for part in module.modules() if isinstance(part, Residual)}
    try:
        for part in before:
            part.limit = depth
        yield
    finally:
        for part, limit in before.items():
            part.limit = limit


def _refresh_waiting(module: nn.Module, keys: object = None) -> None:
    """Tell every stage whether any of them has yet to start; after a load, the hooks of the stages run first."""
    assert isinstance(module, Residual)
    waiting = not module.started
    for part in module.parts():
        part.waiting = waiting


def _check_least(depth: int, least: int) -> None:
    if depth < 1 or not 1 <= least <= depth:
        raise ConfigError(f"Residual: depth is {depth} and least {least}, expected 1 <= least <= depth")


def _check_refinement(layer: Quantizer, depth: int) -> None:
    if depth == 1:
        return
    ratio = layer.refinement
    if ratio is None:
        raise ConfigError(
            f"Residual: the codes of this {type(layer).__name__} do not refine what it leaves; expected FSQ with the "
            "layout uniform, LFQ, BSQ, SimVQ, VQ without cosine, or a Product or Residual of them"
        )
    largest = float(ratio.max()) if isinstance(ratio, Tensor) else ratio
    if largest**depth > FINEST:
        useful = int(math.log(FINEST) / math.log(largest))
        raise ConfigError(f"Residual: depth is {depth}, expected at most {useful}: float32 has no digits for more")


class ResidualConfig(Config):
    """Residual quantization: several stages of one quantizer, each for what the ones before it left."""

    kind: Literal["residual"] = "residual"
    layer: QuantizerConfig
    """The quantizer of every stage."""
    depth: Annotated[int, Field(ge=1, le=MAX_CODEBOOKS)]
    """Number of stages, and so of ids per codebook of the layer."""
    dropout: bool = False
    """In training, let only the first few stages count, a number drawn for every step."""
    least: Annotated[int, Field(ge=1)] = 1
    """Stages that dropout always leaves."""

    @model_validator(mode="after")
    def _least_is_a_depth(self) -> ResidualConfig:
        _check_least(self.depth, self.least)
        return self

    def build(self) -> Residual:
        """Make the quantizer."""
        return Residual(self.layer.build(), self.depth, self.dropout, self.least)
