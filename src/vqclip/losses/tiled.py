"""The losses of `contrastive`, `sigmoid` and `distillation` without the G × G matrix of logits.

The softmax loss, on each rank with its B images, and the texts from `vqclip.losses.exchange`:

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
operator returns the loss and its gradients, so that `torch.compile` keeps one graph;
`vqclip.losses.tiles.attach_gradients` connects them to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip import dist
from vqclip.losses.exchange import Block, Exchange, Gathered, Ring
from vqclip.losses.tiles import (
    KEPT_TILES,
    FeatureGradients,
    Gradients,
    Tiles,
    add_logsumexp_,
    attach_gradients,
    softmaxes,
    softplus_sum,
)

EXCHANGES: dict[str, type[Exchange]] = {"tiled": Gathered, "ring": Ring}
"""Name of the implementation → the exchange of texts between ranks."""


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
        kind: ``softmax``, ``sigmoid`` or ``distillation``.
        impl: name in `EXCHANGES`.
        image: see `vqclip.losses.ContrastiveLoss`; so are the other arguments.
        text: of the images.
        scale: factor of the logits.
        bias: added to the logits of ``sigmoid``.
        keys: of pairs that are not negatives of each other.
        teacher: for ``distillation`` the teacher's images, texts and scale.
        sizes: see `Loss.forward`.
    """
    scale = scale.to(image.dtype)
    bias = torch.zeros_like(scale) if bias is None else bias.to(image.dtype)
    inputs = (image, text, scale, bias)
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    detached = [tensor.detach() for tensor in inputs]
    found = torch.ops.vqclip.tiled_loss(*detached, keys, list(teacher), sizes, kind, impl, wants_grad)
    return attach_gradients(*inputs, Gradients(*found))


def _softmax(
    image: Tensor, text: Tensor, scale: Tensor, keys: Tensor | None, exchange: Exchange, wants_grad: bool
) -> Gradients:
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
    for block in exchange.blocks(*gradients.of_texts, constant=[exchange.to_carried(by_column)]):
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
) -> Gradients:
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
) -> Gradients:
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
    for block in exchange.blocks(*gradients.of_texts, constant=[*map(exchange.to_carried, columns)]):
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
    keys = None if keys is None else dist.all_gather(keys, exchange.sizes)
    if kind == "softmax":
        found = _softmax(image, text, scale, keys, exchange, wants_grad)
    elif kind == "sigmoid":
        found = _sigmoid(image, text, scale, bias, keys, exchange, wants_grad)
    else:
        found = _distill(image, text, scale, teacher, exchange, wants_grad)
    return found.separate()


@_operator.register_fake
def _like(image: Tensor, text: Tensor, scale: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (scale, image, text, scale, scale) if others[-1] else (scale,)
    return Gradients.of(*(like.new_empty(like.shape) for like in likes))
