"""The losses without the G × G matrix of logits (Inf-CLIP: Cheng et al. 2024, https://arxiv.org/abs/2410.17243).

The softmax loss, on each rank with its B images, and the texts of all ranks (`vqclip.losses.exchange`):

    pairs = scale · <image_i, text_i>                                # kept apart from all other logits
    round 1: for tile in scale · images @ textsᵀ, pairs = -inf:      # pass over the tiles
        rows, columns = logaddexp with the tile's row and column log-sum-exp
    columns = log-sum-exp over ranks                                 # all-reduce, or already complete in the ring
    loss = Σ softplus(rows - pairs) + softplus(columns - pairs)      # divided by 2 G; summed over ranks in `finish`
    round 2: for tile again:
        dS = (softmax over row + softmax over column) / 2 G          # pairs: -(sigmoid + sigmoid) / 2 G
        dI += dS @ texts;  dT += dSᵀ @ images
    sum dT over ranks (reduce-scatter); dscale = Σ <images, dI>

The sigmoid loss needs one round; distillation passes over the student's and the teacher's tiles side by side. A custom
operator returns the loss and its gradients, so that `torch.compile` keeps one graph. Backward multiplies them by the
incoming gradient: it contains no collective, so it cannot wait for another rank or interfere with DDP's collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.losses.exchange import EXCHANGES, Block, Exchange
from vqclip.nn.precision import gpu_memory

TILE_BYTES = 2**22
"""Size of one tile on a CPU: small enough for its cache, large enough for fast products."""
KEPT_TILES = 4
"""Memory for tiles that the first round keeps for the second, in full tiles; the others are computed again."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""False if PyTorch was built without oneDNN; `torch.backends.mkldnn.enabled` turns it off."""
Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The loss () over the global batch and its gradients: of images and texts ``(B, E)``, multiplied by W (see
`vqclip.dist`), of the scale () and of the bias (); empty gradients if none are wanted."""


def tiled_loss(
    kind: str,
    impl: str,
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    teacher: Sequence[Tensor] = (),
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return a loss, (), from ``(B, E)`` features in fp32 or fp64.

    Args:
        kind: ``contrastive``, ``sigmoid`` or ``distillation``.
        impl: name in `EXCHANGES`.
        image: see `vqclip.losses.Loss.forward`; so are the other arguments.
        text: of the images.
        scale: factor of the logits.
        bias: added to the logits of ``sigmoid``.
        keys: of pairs that are not negatives of each other.
        teacher: for ``distillation`` the teacher's images, texts and scale.
        sizes: of all ranks.
    """
    scale = scale.to(image.dtype)
    bias = torch.zeros_like(scale) if bias is None else bias.to(image.dtype)
    inputs = (image, text, scale, bias)
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    detached = [tensor.detach() for tensor in inputs]
    found = torch.ops.vqclip.tiled_loss(*detached, keys, list(teacher), sizes, kind, impl, wants_grad)
    return _PrecomputedGradients.apply(*inputs, *found)


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


@torch.library.custom_op("vqclip::tiled_loss", mutates_args=())
def _operator(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    teacher: Sequence[Tensor],
    sizes: Sequence[int] | None,
    kind: str,
    impl: str,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    note = "" if keys is None else ", with keys"
    exchange = EXCHANGES[impl](torch.cat((text, teacher[1]), dim=1) if teacher else text, wants_grad, note, sizes)
    keys = None if keys is None else gather_keys(keys, exchange.sizes)
    if kind == "contrastive":
        return _softmax(image, text, scale, keys, exchange, wants_grad)
    if kind == "sigmoid":
        return _sigmoid(image, text, scale, bias, keys, exchange, wants_grad)
    return _distill(image, text, scale, teacher, exchange, wants_grad)


def gather_keys(keys: Tensor, sizes: Sequence[int] | None) -> Tensor | None:
    """Gather the keys of all ranks, ``(G,)``; None if no two are equal, on a CPU: the host does not wait for a GPU."""
    keys = dist.all_gather(keys, sizes)
    return None if keys.device.type == "cpu" and len(keys.unique()) == len(keys) else keys


@_operator.register_fake
def _like(image: Tensor, text: Tensor, scale: Tensor, *others: object) -> Result:
    loss, nothing = scale.new_empty(()), scale.new_empty(0)
    if not others[-1]:  # wants_grad
        return loss, nothing, nothing.clone(), nothing.clone(), nothing.clone()
    return loss, image.new_empty(image.shape), text.new_empty(text.shape), loss.clone(), loss.clone()


def _softmax(
    image: Tensor, text: Tensor, scale: Tensor, keys: Tensor | None, exchange: Exchange, wants_grad: bool
) -> Result:
    pairs = scale * (image * text).sum(dim=1)
    tiles = Tiles(image, exchange.start, scale, keys=keys, kept=KEPT_TILES if wants_grad else 0)

    # Row and column sums are kept as fp64 logarithms: with logits of 100, fp32 leaves 5 digits after the sum. The pairs
    # are kept apart: softplus(rest - pair) keeps its precision where a softmax is nearly 1.
    pairs = pairs.double()
    rows_rest = torch.full_like(pairs, -torch.inf)
    of_columns = exchange.empty(pairs, -torch.inf)
    for block in exchange.blocks(of_columns):
        (column,) = block.carried
        for tile in tiles.of(block):
            add_logsumexp_(rows_rest[tile.rows], tile.logits, dim=1)
            add_logsumexp_(column[tile.columns], tile.logits, dim=0)
    columns_rest = exchange.collect_logsumexp(of_columns)

    loss = (_softplus(rows_rest - pairs) + _softplus(columns_rest - pairs)).sum() / (2 * exchange.count)
    gradients = FeatureGradients(image, text, exchange, wants_grad)
    if not wants_grad:
        return gradients.finish(loss, scale)
    by_row, by_column = (torch.logaddexp(rest, pairs) for rest in (rows_rest, columns_rest))
    of_pairs = -((rows_rest - pairs).sigmoid() + (columns_rest - pairs).sigmoid()) / (2 * exchange.count)
    for block in exchange.blocks(*gradients.of_texts, constant=[exchange.share(by_column)]):
        (by_column,) = block.constant
        for tile in tiles.of(block):
            softmaxes(tile.logits, by_row[tile.rows], by_column[tile.columns], 1 / (2 * exchange.count))
            tile.set_pairs_(of_pairs)
            gradients.add(block, tile)
    return gradients.finish(loss, scale)


def _sigmoid(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    exchange: Exchange,
    wants_grad: bool,
) -> Result:
    pairs = scale * (image * text).sum(dim=1) + bias
    of_pairs = -(-pairs).sigmoid()
    loss, of_bias = _softplus(-pairs).sum() / exchange.count, torch.zeros_like(bias)
    tiles = Tiles(image, exchange.start, scale, bias, keys)
    gradients = FeatureGradients(image, text, exchange, wants_grad, unit=1 / exchange.count)
    for block in exchange.blocks(*gradients.of_texts):
        for tile in tiles.of(block):
            loss += softplus_sum(tile.logits) / exchange.count
            if wants_grad:
                tile.logits.sigmoid_()
                tile.set_pairs_(of_pairs)
                of_bias += tile.logits.sum()
                gradients.add(block, tile)
    return gradients.finish(loss, scale, of_bias)


def _distill(
    image: Tensor, text: Tensor, scale: Tensor, teacher: Sequence[Tensor], exchange: Exchange, wants_grad: bool
) -> Result:
    """``exchange`` holds the student's and the teacher's texts, concatenated along the width."""
    teacher_image, teacher_text, teacher_scale = teacher
    sides = [
        Tiles(images, exchange.start, factor, pairs_apart=False)
        for images, factor in ((image, scale), (teacher_image, teacher_scale))
    ]
    widths = (text.shape[1], teacher_text.shape[1])

    def halves(block: Block) -> tuple[Block, Block]:
        mine, theirs = block.texts.split(widths, dim=1)
        return block._replace(texts=mine), block._replace(texts=theirs)

    rows = [image.new_full((len(image),), -torch.inf, dtype=torch.float64) for _ in sides]
    of_columns = [exchange.empty(each, -torch.inf) for each in rows]
    for block in exchange.blocks(*of_columns):
        for side, half, row, column in zip(sides, halves(block), rows, block.carried, strict=True):
            for tile in side.of(half):
                add_logsumexp_(row[tile.rows], tile.logits, dim=1)
                add_logsumexp_(column[tile.columns], tile.logits, dim=0)
    columns = [exchange.collect_logsumexp(each) for each in of_columns]

    share = 1 / (2 * exchange.count)
    loss = share * (rows[0].sum() + columns[0].sum())
    gradients = FeatureGradients(image, text, exchange, wants_grad)
    for block in exchange.blocks(*gradients.of_texts, constant=[*map(exchange.share, columns)]):
        mine, theirs = halves(block)
        for tile, wanted in zip(sides[0].of(mine), sides[1].of(theirs), strict=True):
            target = softmaxes(wanted.logits, rows[1][wanted.rows], block.constant[1][wanted.columns], share)
            loss -= (target * tile.logits).sum()
            if wants_grad:
                softmaxes(tile.logits, rows[0][tile.rows], block.constant[0][tile.columns], share).sub_(target)
                gradients.add(mine, tile)
    return gradients.finish(loss, scale)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=20 if x.dtype == torch.float32 else 40)


def tile_side(features: Tensor) -> int:
    """Return the number of rows and columns of a tile, at least 1.

    On a GPU a tile takes up to a 1024th of the memory, since smaller ones leave it idle, in multiples of 256 rows.
    """
    memory = gpu_memory(features.device)
    side = math.isqrt((TILE_BYTES if memory is None else memory // 1024) // features.element_size())
    return max(1, side) if memory is None else max(256, side // 256 * 256)


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
        side, images, texts = self._side, self._images, block.texts
        for top, left in itertools.product(range(0, len(images), side), range(0, len(texts), side)):
            place = (block.columns.start + left, top)
            if place in self._kept:
                yield self._kept.pop(place)
                continue
            rows, columns = slice(top, min(top + side, len(images))), slice(left, min(left + side, len(texts)))
            logits = product(images[rows] * self._scale, texts[columns].T)
            if self._bias is not None:
                logits.add_(self._bias)
            if self._keys is not None:
                own, others = self._keys[self._start :][rows], self._keys[block.columns][columns]
                logits.masked_fill_(own[:, None] == others, -torch.inf)
            offset = self._start + top - block.columns.start - left
            if self._pairs_apart:
                logits.diagonal(offset).fill_(-torch.inf)
            tile = Tile(rows, columns, logits, offset)
            if self._room >= logits.nbytes:
                self._room -= logits.nbytes
                self._kept[place] = tile
            yield tile


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

    def finish(self, loss: Tensor, scale: Tensor, bias: Tensor | None = None) -> Result:
        """Sum the loss and the gradients over ranks. A collective.

        Args:
            loss: () this rank's part.
            scale: () factor of the logits.
            bias: () this rank's part of the bias's gradient, without ``unit``; None for a loss without one.
        """
        if self._image is None:
            loss = dist.reduce_(loss.double()).to(scale.dtype)
            return loss, loss.new_empty(0), loss.new_empty(0), loss.new_empty(0), loss.new_empty(0)
        bias = torch.zeros_like(scale) if bias is None else bias
        # Every logit is the scale times a cosine, so the scale's gradient follows from the images' gradient.
        of_scale = (self._own_image * self._image).sum()
        numbers = torch.stack([loss.double(), of_scale.double() * self._unit, bias.double() * self._unit])
        # Copies, because an operator may not return views of one tensor.
        loss, of_scale, of_bias = (each.clone() for each in dist.reduce_(numbers).to(scale.dtype))
        factor = scale * (dist.world_size() * self._unit)
        of_text = self._exchange.collect_sum(self.of_texts[0]).mul_(factor)
        return loss, self._image.mul_(factor), of_text, of_scale, of_bias


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


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``(M, K) @ (K, N)``, by oneDNN for fp32 on a CPU.

    There, PyTorch computes fp32 products with MKL, which does not use the 512-bit units of AMD's processors. oneDNN,
    which is part of PyTorch, takes half the time. It is called through the operator that `torch.compile` uses in its
    own CPU code; there is no public one. oneDNN caches one program per shape, and training has few shapes
    (ONEDNN_PRIMITIVE_CACHE_CAPACITY and PyTorch's LRU_CACHE_CAPACITY set the size of the cache).
    """
    return torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "") if _by_onednn(left) else left @ right


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``(M, K) @ (K, N)`` to ``total``, ``(M, N)``."""
    if _by_onednn(left):
        total.add_(product(left, right))
    else:
        total.addmm_(left, right)


def _by_onednn(x: Tensor) -> bool:
    return HAS_ONEDNN and bool(torch.backends.mkldnn.enabled) and x.device.type == "cpu" and x.dtype == torch.float32
