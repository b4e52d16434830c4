"""The machinery of the tiled losses: rows of logits a few at a time, gradients computed in forward.

No process ever holds the G × G logits (Inf-CLIP: Cheng et al. 2024, https://arxiv.org/abs/2410.17243). Each rank owns
the rows of its images and knows all texts; what a column needs of other ranks' rows is added up in vectors of G
numbers. As the gradient is worked out on the way, backward only multiplies it by a number: it holds no collective, so
it can neither wait for a rank nor get in the way of DDP's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vqclip import dist

TILE_BYTES = 2**24
"""Logits that are worked on at a time."""

KEPT_BYTES = 2**25
"""Logits that are kept from one pass for the next; the others are computed again."""


class Shares(NamedTuple):
    """The features of the global batch as one rank sees them."""

    image: Tensor
    """``(B, E)`` this rank's."""
    text: Tensor
    """``(B, E)`` this rank's, row by row the texts of the images."""
    texts: Tensor
    """``(G, E)`` of all ranks."""
    sizes: list[int]
    """Every rank's B."""
    start: int
    """Where this rank's texts begin among all."""


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


class Tile(NamedTuple):
    """Some rows of the logits, all columns of each."""

    rows: slice
    """Of this rank's images."""
    logits: Tensor
    """``(R, G)``, -inf for the pairs."""
    pairs: Tensor
    """``(R,)`` view of the logits of the pairs."""


class Tiles:
    """Goes through ``scale * image @ texts.T + bias`` from top to bottom, as often as one likes.

    Args:
        shares: the features.
        scale: () factor of the logits.
        bias: () added to them.
        kept_bytes: logits that the first round keeps for the second, which alone may then write into them.
    """

    def __init__(self, shares: Shares, scale: Tensor, bias: Tensor | None = None, kept_bytes: int = 0):
        self._images, self._texts, self._start, self._bias = shares.image * scale, shares.texts, shares.start, bias
        row_bytes = max(1, len(self._texts) * self._texts.element_size())
        self._height = max(1, TILE_BYTES // row_bytes)
        self._room = kept_bytes // (self._height * row_bytes)
        self._kept: dict[int, Tile] = {}

    def __iter__(self) -> Iterator[Tile]:
        for begin in range(0, len(self._images), self._height):
            tile = self._kept.pop(begin, None)
            if tile is None:
                tile = self._made(begin)
                if self._room > 0:
                    self._room -= 1
                    self._kept[begin] = tile
            yield tile

    def _made(self, begin: int) -> Tile:
        rows = slice(begin, min(begin + self._height, len(self._images)))
        logits = self._images[rows] @ self._texts.T
        if self._bias is not None:
            logits += self._bias
        pairs = logits[:, self._start + begin :].diagonal()
        pairs.fill_(-torch.inf)
        return Tile(rows, logits, pairs)


def share(image: Tensor, text: Tensor, group: dist.Group, wants_grad: bool) -> Shares:
    """Gather the texts. A collective.

    Raises:
        DistributedError: the ranks' features do not fit together, or only some of them want gradients.
    """
    with torch.enable_grad():
        sizes = dist.gather_sizes(text.detach().requires_grad_(wants_grad), group)
    texts = dist.all_gather(text.detach(), sizes, group)
    return Shares(image, text, texts, sizes, sum(sizes[: dist.rank(group)]))


class FeatureGradients:
    """Adds up the gradients of the features, a tile of the logits' gradient at a time."""

    def __init__(self, shares: Shares):
        self._shares = shares
        self._image = torch.empty_like(shares.image)
        self._texts = torch.zeros_like(shares.texts)

    def add(self, rows: slice, logits: Tensor) -> None:
        """``(R, G)`` gradient of some rows of the logits."""
        torch.mm(logits, self._shares.texts, out=self._image[rows])
        self._texts.addmm_(logits.T, self._shares.image[rows])

    def finish(self, loss: Tensor, scale: Tensor, bias: Tensor, group: dist.Group) -> Gradients:
        """Put together what ranks have found. A collective.

        Args:
            loss: () this rank's part of it.
            scale: () factor of the logits.
            bias: () this rank's part of its gradient.
            group: the ranks.
        """
        # Every logit is the scale times a cosine, so the scale's gradient is what the images' says already.
        numbers = torch.stack((loss, (self._shares.image * self._image).sum(), bias))
        loss, of_scale, of_bias = dist.reduce_(numbers, group=group)
        text = dist.reduce_scatter(self._texts, self._shares.sizes, group)
        factor = scale * dist.world_size(group)
        return Gradients(loss, self._image * factor, text * factor, of_scale, of_bias)


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *known: Tensor) -> Tensor:
        loss, *gradients = known
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(grad * known for known in ctx.saved_tensors), *[None] * 5)


def connected(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, gradients: Gradients) -> Tensor:
    """The loss, () as a function of what it was computed from."""
    return _Known.apply(image, text, scale, bias, *gradients)
