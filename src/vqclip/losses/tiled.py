"""The losses of `contrastive` and `sigmoid` without the G × G matrix of logits.

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

The sigmoid loss needs one round. Both are custom operators that return the loss and its gradients, so that
`torch.compile` keeps one graph; `vqclip.losses.tiles.attach_gradients` connects them to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip import dist
from vqclip.losses.exchange import Exchange, Gathered, Ring
from vqclip.losses.tiles import (
    KEPT_BYTES,
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


def tiled_softmax(
    image: Tensor, text: Tensor, scale: Tensor, keys: Tensor | None, impl: str, group: dist.Group = None
) -> Tensor:
    """Return the loss of `vqclip.losses.ContrastiveLoss`, (), from ``(B, E)`` features in fp32 or fp64."""
    return _run(torch.ops.vqclip.tiled_softmax, image, text, scale, torch.zeros_like(scale), keys, impl, group)


def tiled_sigmoid(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, keys: Tensor | None, impl: str, group: dist.Group = None
) -> Tensor:
    """Return the loss of `vqclip.losses.SigmoidLoss`, (), from ``(B, E)`` features in fp32 or fp64."""
    return _run(torch.ops.vqclip.tiled_sigmoid, image, text, scale, bias, keys, impl, group)


def _run(
    op: Callable[..., Any],
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    impl: str,
    group: dist.Group,
) -> Tensor:
    scale, bias = scale.to(image.dtype), bias.to(image.dtype)
    inputs = (image, text, scale, bias)
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    found = op(*(tensor.detach() for tensor in inputs), keys, impl, dist.group_name(group), wants_grad)
    return attach_gradients(*inputs, Gradients(*found))


def _softmax(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, keys: Tensor | None, exchange: Exchange, wants_grad: bool
) -> Gradients:
    pairs = scale * (image * text).sum(dim=1)
    tiles = Tiles(image, exchange.start, scale, keys=keys, kept_bytes=KEPT_BYTES if wants_grad else 0)

    # Row and column sums are kept as fp64 logarithms: with logits of 100, fp32 leaves 5 digits after the sum. The pairs
    # are kept apart: softplus(rest - pair) keeps its precision where a softmax is nearly 1.
    pairs = pairs.double()
    rows_rest = torch.full_like(pairs, -torch.inf)
    of_columns = exchange.empty(pairs, -torch.inf)
    for block in exchange.round(of_columns):
        (column,) = block.carried
        for tile in tiles.of(block):
            add_logsumexp_(rows_rest[tile.rows], tile.logits, dim=1)
            add_logsumexp_(column[tile.columns], tile.logits, dim=0)
    columns_rest = exchange.collect_logsumexp(of_columns)
    tiles.log_tiles()

    loss = (_softplus(rows_rest - pairs) + _softplus(columns_rest - pairs)).sum() / (2 * exchange.count)
    if not wants_grad:
        return without_gradients(dist.reduce_(loss, group=exchange.group).to(scale.dtype))
    by_row, by_column = (torch.logaddexp(rest, pairs) for rest in (rows_rest, columns_rest))
    of_pairs = -((rows_rest - pairs).sigmoid() + (columns_rest - pairs).sigmoid()) / (2 * exchange.count)
    gradients = FeatureGradients(image, text, exchange)
    for block in exchange.round(exchange.spread(by_column), gradients.of_texts):
        by_column, of_texts = block.carried
        for tile in tiles.of(block):
            softmaxes(tile.logits, by_row[tile.rows], by_column[tile.columns], 1 / (2 * exchange.count))
            tile.set_pairs_(of_pairs)
            gradients.add(block, of_texts, tile)
    return gradients.finish(loss, scale, torch.zeros_like(bias))


def _sigmoid(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, keys: Tensor | None, exchange: Exchange, wants_grad: bool
) -> Gradients:
    pairs = scale * (image * text).sum(dim=1) + bias
    of_pairs = -(-pairs).sigmoid()
    loss, of_bias = _softplus(-pairs).sum() / exchange.count, torch.zeros_like(bias)
    tiles = Tiles(image, exchange.start, scale, bias, keys)
    gradients = FeatureGradients(image, text, exchange, unit=1 / exchange.count) if wants_grad else None
    for block in exchange.round(*([] if gradients is None else [gradients.of_texts])):
        for tile in tiles.of(block):
            loss += softplus_sum(tile.logits) / exchange.count
            if gradients is not None:
                tile.logits.sigmoid_()
                tile.set_pairs_(of_pairs)
                of_bias += tile.logits.sum()
                gradients.add(block, block.carried[0], tile)
    if gradients is None:
        return without_gradients(dist.reduce_(loss, group=exchange.group))
    return gradients.finish(loss, scale, of_bias)


def without_gradients(loss: Tensor) -> Gradients:
    """Return the loss with empty gradients."""
    return Gradients(loss, *(loss.new_empty(0) for _ in range(4)))


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=20 if x.dtype == torch.float32 else 40)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Outputs of an operator: the fields of `Gradients`."""


def outputs_like(image: Tensor, text: Tensor, scale: Tensor, wants_grad: bool) -> Outputs:
    """Return empty tensors with the shapes and dtypes of an operator's outputs."""
    if not wants_grad:
        return without_gradients(torch.empty_like(scale))
    return Gradients(*(like.new_empty(like.shape) for like in (scale, image, text, scale, scale)))


def _run_operator(
    by: Callable[..., Gradients],
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    impl: str,
    group_name: str,
    wants_grad: bool,
) -> Outputs:
    note = "" if keys is None else ", with keys"
    exchange = EXCHANGES[impl](text, dist.group_by_name(group_name), wants_grad, note)
    keys = None if keys is None else dist.all_gather(keys, exchange.sizes, exchange.group)
    return by(image, text, scale, bias, keys, exchange, wants_grad).separate()


@torch.library.custom_op("vqclip::tiled_softmax", mutates_args=())
def _softmax_op(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    impl: str,
    group: str,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _run_operator(_softmax, image, text, scale, bias, keys, impl, group, wants_grad)


@torch.library.custom_op("vqclip::tiled_sigmoid", mutates_args=())
def _sigmoid_op(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    impl: str,
    group: str,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _run_operator(_sigmoid, image, text, scale, bias, keys, impl, group, wants_grad)


@_softmax_op.register_fake
@_sigmoid_op.register_fake
def _like(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    impl: str,
    group: str,
    wants_grad: bool,
) -> Outputs:
    return outputs_like(image, text, scale, wants_grad)
