"""The machinery of the tiled losses: logits a square tile at a time, gradients computed in forward.

No process ever holds the G × G logits (Inf-CLIP: Cheng et al. 2024, https://arxiv.org/abs/2410.17243). Each rank owns
the rows of its images; how these meet the texts of all ranks is `vqclip.losses.exchange`'s. As the gradient is worked
out on the way, backward only multiplies it by a number: it holds no collective, so it can neither wait for a rank nor
get in the way of DDP's.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.losses.exchange import Block, Exchange
from vqclip.losses.products import add_product_, product

logger = logging.getLogger(__name__)

TILE_BYTES = 2**22
"""Logits that are worked on at a time: few enough for a CPU's cache, enough for fast products."""

KEPT_BYTES = 2**24
"""Logits that are kept from one round for the next; the others are computed again."""


class Gradients(NamedTuple):
    """A loss over the global batch and its gradients, those of features times the number of ranks (`vqclip.dist`)."""

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

    def separate(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same without two views of one tensor, which an operator may not return."""
        return self.loss.clone(), self.image, self.text, self.scale.clone(), self.bias.clone()


class Tile(NamedTuple):
    """Some rows and columns of the logits."""

    rows: slice
    """Rows: images of this rank."""
    columns: slice
    """Columns: texts of the block."""
    logits: Tensor
    """``(R, C)``, -inf for the pairs and for what is no negative."""
    offset: int
    """Column of the first row's pair; the pairs are this diagonal, if it meets the tile."""

    def set_pairs_(self, of_pairs: Tensor) -> None:
        """Overwrite the pairs with theirs of ``(B,)``, those of all images."""
        pairs = self.logits.diagonal(self.offset)
        pairs.copy_(of_pairs[self.rows][max(0, -self.offset) :][: len(pairs)])


class Tiles:
    """Goes through ``scale * image @ block.texts.T + bias`` tile by tile, as often as one likes.

    Args:
        image: ``(B, E)`` this rank's.
        start: this rank's first pair among all G.
        scale: () factor of the logits.
        bias: () added to them.
        keys: ``(G,)`` all pairs'; a row and a column of equal keys are no negatives of each other.
        pairs_apart: whether the pairs are -inf in the logits; else they stand where they are.
        kept_bytes: logits that the first round keeps for the second, which alone may then write into them.
    """

    def __init__(
        self,
        image: Tensor,
        start: int,
        scale: Tensor,
        bias: Tensor | None = None,
        keys: Tensor | None = None,
        pairs_apart: bool = True,
        kept_bytes: int = 0,
    ):
        self._images, self._start, self._scale, self._bias, self._keys = image, start, scale, bias, keys
        self._pairs_apart = pairs_apart
        self._room, self._number, self._columns = kept_bytes, 0, 0
        self._kept: dict[tuple[int, int], Tile] = {}

    def of(self, block: Block) -> Iterator[Tile]:
        """The block's tiles; none where it has no texts."""
        self._columns = max(self._columns, block.columns.stop)
        side = max(1, math.isqrt(TILE_BYTES // block.texts.element_size()))
        sizes = len(self._images), len(block.texts)
        for top, left in itertools.product(*(range(0, size, side) for size in sizes)):
            place = (block.columns.start + left, top)
            tile = self._kept.pop(place, None)
            if tile is None:
                self._number += 1
                tile = self._compute(
                    block, slice(top, min(top + side, sizes[0])), slice(left, min(left + side, sizes[1]))
                )
                if self._room >= tile.logits.nbytes:
                    self._room -= tile.logits.nbytes
                    self._kept[place] = tile
            yield tile

    def log_tiles(self) -> None:
        """Log how many tiles of the first round the second will find."""
        _log_once(len(self._images), self._columns, self._number, len(self._kept))

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
    """Add the exponentials of the logits along ``dim`` to the sum whose logarithm is ``total``, in fp64."""
    highest = logits.amax(dim, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    more = (logits - highest).exp_().sum(dim).double().log_().add_(highest.squeeze(dim))
    total.copy_(torch.logaddexp(total, more))


def softmaxes(logits: Tensor, by_row: Tensor, by_column: Tensor, factor: float) -> Tensor:
    """``factor * (exp(logits - by_row) + exp(logits - by_column))``, overwriting the logits.

    Args:
        logits: ``(R, C)``.
        by_row: ``(R,)`` float64, of which no digit is lost: what does not fit the logits' type becomes a factor.
        by_column: ``(C,)`` float64.
        factor: of the sum.
    """
    rows, columns = by_row.to(logits.dtype), by_column.to(logits.dtype)
    of_rows, of_columns = (
        ((rounded - exact).exp() * factor).to(logits.dtype) for rounded, exact in ((rows, by_row), (columns, by_column))
    )
    along_columns = (logits - columns).exp_().mul_(of_columns)
    return torch.addcmul(along_columns, logits.sub_(rows[:, None]).exp_(), of_rows[:, None], out=logits)


def softplus_sum(x: Tensor) -> Tensor:
    """Sum of ``log(1 + exp(x))`` over ``(R, C)``, for a quarter of the time: logarithms are most of it.

    Of 32 of them, one is taken: ``log(1 + a) + log(1 + b) = log(1 + a + b + ab)``, of positive numbers only, so that
    small ones keep their digits; with ``a = exp(-|x|) <= 1`` the product of 32 is at most 2^32.
    """
    small = x.abs().neg_().exp_()
    for _ in range(5):
        half = (len(small) + 1) // 2
        some, others = small[: len(small) - half], small[half:]
        some.addcmul_(some, others).add_(others)
        small = small[:half]
    return small.log1p_().sum() + x.clamp(min=0).sum()


@functools.lru_cache(maxsize=32)
def _log_once(images: int, texts: int, made: int, kept: int) -> None:
    """Tell once for every size what the memory budget came to."""
    logger.info(
        "%s images meet %s texts in %d tiles; %d are kept for the second round, %d computed again",
        f"{images:,}",
        f"{texts:,}",
        made,
        kept,
        made - kept,
    )


class FeatureGradients:
    """Adds up the gradients of the features, a tile of the logits' gradient at a time.

    Args:
        image: ``(B, E)`` this rank's.
        text: ``(B, E)``
        exchange: of the texts.
        unit: what the gradients that are added have to be multiplied by: cheaper once at the end than tile by tile.
    """

    def __init__(self, image: Tensor, text: Tensor, exchange: Exchange, unit: float = 1.0):
        self._own_image, self._exchange, self._unit = image, exchange, unit
        self._image = image.new_zeros(image.shape)
        self.of_texts = exchange.empty(text, 0.0)
        """To be carried by the round that adds tiles."""

    def add(self, block: Block, of_texts: Tensor, tile: Tile) -> None:
        """Add a tile that holds the gradient of its logits; ``of_texts`` is what the block carries."""
        add_product_(self._image[tile.rows], tile.logits, block.texts[tile.columns])
        add_product_(of_texts[tile.columns], tile.logits.T, self._own_image[tile.rows])

    def finish(self, loss: Tensor, scale: Tensor, bias: Tensor) -> Gradients:
        """Put together what ranks have found. A collective.

        Args:
            loss: () this rank's part of it.
            scale: () factor of the logits.
            bias: () this rank's part of its gradient, in units.
        """
        group = self._exchange.group
        # Every logit is the scale times a cosine, so the scale's gradient is what the images' says already.
        of_scale = (self._own_image * self._image).sum()
        numbers = torch.stack([loss.double(), of_scale.double() * self._unit, bias.double() * self._unit])
        loss, of_scale, of_bias = dist.reduce_(numbers, group=group).to(scale.dtype)
        factor = scale * (dist.world_size(group) * self._unit)
        of_text = self._exchange.collect_sum(self.of_texts).mul_(factor)
        return Gradients(loss, self._image.mul_(factor), of_text, of_scale, of_bias)


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already; derivatives of any other kind are refused."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *known: Tensor) -> Tensor:
        loss, *gradients = known
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # `once_differentiable` would let a second derivative pass as 0 where the loss itself is differentiated.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "impl: got a loss with known gradients (tiled or ring) and create_graph=True, expected impl='gather' "
                "for second derivatives"
            )
        return (*(grad * known for known in ctx.saved_tensors), *[None] * 5)


def attach_gradients(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, gradients: Gradients) -> Tensor:
    """The loss, () as a function of what it was computed from."""
    return _Known.apply(image, text, scale, bias, *gradients)
