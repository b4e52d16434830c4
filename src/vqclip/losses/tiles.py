"""Parts of the tiled losses: tiles of the logits, and gradients that are computed in forward.

No process holds the G × G logits (Inf-CLIP: Cheng et al. 2024, https://arxiv.org/abs/2410.17243). Each rank computes
the rows of its own images; `vqclip.losses.exchange` supplies the texts of all ranks.

    forward:  for block in exchange.blocks(...):      # texts of all ranks
                  for tile in tiles.of(block):        # (R, C) logits, `tile_side` rows and columns at most
                      loss += f(tile)
                      gradients.add(f'(tile))         # dI += dS @ texts, dT += dSᵀ @ images
              gradients.finish(loss)                  # the only sums over ranks: loss, dscale, dbias, dT
    backward: incoming gradient × the stored gradients

Backward contains no collective, so it cannot wait for another rank or interfere with DDP's collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.losses.exchange import Block, Exchange
from vqclip.losses.products import add_product_, product
from vqclip.nn.device import gpu_memory

TILE_BYTES = 2**22
"""Size of one tile on a CPU: small enough for its cache, large enough for fast products."""

KEPT_TILES = 4
"""Memory for tiles that the first round keeps for the second, in full tiles; the others are computed again."""


def tile_side(features: Tensor) -> int:
    """Return the number of rows and columns of a tile, at least 1.

    On a GPU a tile takes up to a 1024th of the memory, since smaller ones leave it idle, in multiples of 256 rows.
    """
    memory = gpu_memory(features.device)
    side = math.isqrt((TILE_BYTES if memory is None else memory // 1024) // features.element_size())
    return max(1, side) if memory is None else max(256, side // 256 * 256)


class Gradients(NamedTuple):
    """A loss over the global batch and its gradients; those of features are multiplied by W (see `vqclip.dist`)."""

    loss: Tensor
    """()"""
    image: Tensor
    """``(B, E)``"""
    text: Tensor
    """``(B, E)``"""
    scale: Tensor
    """()"""
    bias: Tensor
    """()"""

    @staticmethod
    def of(loss: Tensor, *gradients: Tensor) -> Gradients:
        """Return a loss with its gradients, or with empty ones."""
        return Gradients(loss, *(gradients or [loss.new_empty(0) for _ in range(4)]))

    def separate(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors without views of one another, which an operator may not return."""
        return self.loss.clone(), self.image, self.text, self.scale.clone(), self.bias.clone()


class Tile(NamedTuple):
    """A rectangle of the logits."""

    rows: slice
    """Images of this rank."""
    columns: slice
    """Texts of the block."""
    logits: Tensor
    """``(R, C)``, -inf for the pairs and for entries that are not negatives."""
    offset: int
    """Diagonal of the pairs: the column of the first row's pair, which may be outside the tile."""

    def set_pairs_(self, of_pairs: Tensor) -> None:
        """Overwrite the pairs' entries with those of ``(B,)``, one for each image of this rank."""
        pairs = self.logits.diagonal(self.offset)
        pairs.copy_(of_pairs[self.rows][max(0, -self.offset) :][: len(pairs)])


class Tiles:
    """The tiles of ``scale * image @ block.texts.T + bias``.

    Args:
        image: ``(B, E)`` of this rank.
        start: index of this rank's first pair among all G.
        scale: () factor of the logits.
        bias: () added to the logits.
        keys: ``(G,)`` of all pairs; a row and a column with equal keys are not negatives of each other.
        pairs_apart: True: pairs are -inf in the logits. False: they keep their logits.
        kept: memory for tiles that the first round keeps for the second, in tiles of full size; only the second round
            may modify them.
    """

    def __init__(
        self,
        image: Tensor,
        start: int,
        scale: Tensor,
        bias: Tensor | None = None,
        keys: Tensor | None = None,
        pairs_apart: bool = True,
        kept: int = 0,
    ):
        self._images, self._start, self._scale, self._bias, self._keys = image, start, scale, bias, keys
        self._pairs_apart = pairs_apart
        self._side = tile_side(image)
        self._room = kept * self._side**2 * image.element_size()
        self._kept: dict[tuple[int, int], Tile] = {}

    def of(self, block: Block) -> Iterator[Tile]:
        """Yield the block's tiles; none for an empty block."""
        side, sizes = self._side, (len(self._images), len(block.texts))
        for top, left in itertools.product(*(range(0, size, side) for size in sizes)):
            place = (block.columns.start + left, top)
            tile = self._kept.pop(place, None)
            if tile is None:
                tile = self._compute(
                    block, slice(top, min(top + side, sizes[0])), slice(left, min(left + side, sizes[1]))
                )
                if self._room >= tile.logits.nbytes:
                    self._room -= tile.logits.nbytes
                    self._kept[place] = tile
            yield tile

    def _compute(self, block: Block, rows: slice, columns: slice) -> Tile:
        logits = product(self._images[rows] * self._scale, block.texts[columns].T)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._keys is not None:
            own, others = self._keys[self._start :][rows], self._keys[block.columns][columns]
            logits.masked_fill_(own[:, None] == others, -torch.inf)
        offset = self._start + rows.start - block.columns.start - columns.start
        if self._pairs_apart:
            logits.diagonal(offset).fill_(-torch.inf)
        return Tile(rows, columns, logits, offset)


def add_logsumexp_(total: Tensor, logits: Tensor, dim: int) -> None:
    """Set ``total`` to ``log(exp(total) + Σ exp(logits))`` with the sum along ``dim``, in fp64."""
    highest = logits.amax(dim, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    more = (logits - highest).exp_().sum(dim).double().log_().add_(highest.squeeze(dim))
    total.copy_(torch.logaddexp(total, more))


def softmaxes(logits: Tensor, by_row: Tensor, by_column: Tensor, factor: float) -> Tensor:
    """Overwrite the logits with ``factor * (exp(logits - by_row) + exp(logits - by_column))`` and return them.

    Args:
        logits: ``(R, C)``.
        by_row: ``(R,)`` float64, used in full precision: the part that does not fit the logits' dtype becomes a factor.
        by_column: ``(C,)`` float64, like ``by_row``.
        factor: factor of the sum.
    """
    rows, columns = by_row.to(logits.dtype), by_column.to(logits.dtype)
    of_rows, of_columns = (
        ((rounded - exact).exp() * factor).to(logits.dtype) for rounded, exact in ((rows, by_row), (columns, by_column))
    )
    along_columns = (logits - columns).exp_().mul_(of_columns)
    return torch.addcmul(along_columns, logits.sub_(rows[:, None]).exp_(), of_rows[:, None], out=logits)


def softplus_sum(x: Tensor) -> Tensor:
    """Return the sum of ``log(1 + exp(x))`` over ``(R, C)``, in a quarter of the time of `softplus`.

    Logarithms take most of its time, so one is taken for 32 numbers: ``log(1 + a) + log(1 + b)`` is
    ``log(1 + a + b + ab)``. All terms are positive, so small ones keep their precision. With ``a = exp(-|x|) <= 1`` the
    product of 32 is at most 2^32.
    """
    small = x.abs().neg_().exp_()
    for _ in range(5):
        half = (len(small) + 1) // 2
        some, others = small[: len(small) - half], small[half:]
        some.addcmul_(some, others).add_(others)
        small = small[:half]
    return small.log1p_().sum() + x.clamp(min=0).sum()


class FeatureGradients:
    """The gradients of the features, accumulated from tiles of the logits' gradient.

    Args:
        image: ``(B, E)`` of this rank.
        text: ``(B, E)`` of this rank.
        exchange: the exchange of the texts.
        wanted: False: the result has empty gradients, and no tile is added.
        unit: factor of all gradients, applied once at the end instead of to every tile.
    """

    def __init__(self, image: Tensor, text: Tensor, exchange: Exchange, wanted: bool, unit: float = 1.0):
        self._own_image, self._exchange, self._unit = image, exchange, unit
        self._image = image.new_zeros(image.shape) if wanted else None
        self.of_texts = [exchange.empty(text, 0.0)] if wanted else []
        """Must be the last that the pass over `Exchange.blocks` carries in which tiles are added."""

    def add(self, block: Block, tile: Tile) -> None:
        """Add a tile with the gradient of its logits."""
        assert self._image is not None
        add_product_(self._image[tile.rows], tile.logits, block.texts[tile.columns])
        add_product_(block.carried[-1][tile.columns], tile.logits.T, self._own_image[tile.rows])

    def finish(self, loss: Tensor, scale: Tensor, bias: Tensor | None = None) -> Gradients:
        """Sum the loss and the gradients over ranks. A collective.

        Args:
            loss: () this rank's part.
            scale: () factor of the logits.
            bias: () this rank's part of the bias's gradient, without ``unit``; None for a loss without one.
        """
        if self._image is None:
            return Gradients.of(dist.reduce_(loss.double()).to(scale.dtype))
        bias = torch.zeros_like(scale) if bias is None else bias
        # Every logit is the scale times a cosine, so the scale's gradient follows from the images' gradient.
        of_scale = (self._own_image * self._image).sum()
        numbers = torch.stack([loss.double(), of_scale.double() * self._unit, bias.double() * self._unit])
        loss, of_scale, of_bias = dist.reduce_(numbers).to(scale.dtype)
        factor = scale * (dist.world_size() * self._unit)
        of_text = self._exchange.collect_sum(self.of_texts[0]).mul_(factor)
        return Gradients(loss, self._image.mul_(factor), of_text, of_scale, of_bias)


class _PrecomputedGradients(torch.autograd.Function):
    """A loss with precomputed gradients; second derivatives are refused."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *known: Tensor) -> Tensor:
        loss, *gradients = known
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "impl: got a loss with precomputed gradients (tiled or ring) and create_graph=True, expected "
                "impl='gather' for second derivatives"
            )
        return (*(grad * known for known in ctx.saved_tensors), *[None] * 5)


def attach_gradients(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, gradients: Gradients) -> Tensor:
    """Return the loss, (), connected to its inputs in autograd's graph."""
    return _PrecomputedGradients.apply(image, text, scale, bias, *gradients)
