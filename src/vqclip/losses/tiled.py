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

The sigmoid loss needs one round. A custom operator returns the loss and its gradients, so that `torch.compile` keeps
one graph; `vqclip.losses.tiles.attach_gradients` connects them to autograd.
"""

from __future__ import annotations

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
    return _run(image, text, scale, torch.zeros_like(scale), keys, "softmax", impl, group)


def tiled_sigmoid(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, keys: Tensor | None, impl: str, group: dist.Group = None
) -> Tensor:
    """Return the loss of `vqclip.losses.SigmoidLoss`, (), from ``(B, E)`` features in fp32 or fp64."""
    return _run(image, text, scale, bias, keys, "sigmoid", impl, group)


def _run(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    kind: str,
    impl: str,
    group: dist.Group,
) -> Tensor:
    scale, bias = scale.to(image.dtype), bias.to(image.dtype)
    inputs = (image, text, scale, bias)
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    detached = [tensor.detach() for tensor in inputs]
    found = torch.ops.vqclip.tiled_loss(*detached, keys, kind, impl, dist.group_name(group), wants_grad)
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
    for block in exchange.blocks(of_columns):
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
    for block in exchange.blocks(exchange.to_carried(by_column), gradients.of_texts):
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
    for block in exchange.blocks(*([] if gradients is None else [gradients.of_texts])):
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


@torch.library.custom_op("vqclip::tiled_loss", mutates_args=())
def _operator(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    kind: str,
    impl: str,
    group: str,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    note = "" if keys is None else ", with keys"
    exchange = EXCHANGES[impl](text, dist.group_by_name(group), wants_grad, note)
    keys = None if keys is None else dist.all_gather(keys, exchange.sizes, exchange.group)
    compute = {"softmax": _softmax, "sigmoid": _sigmoid}[kind]
    return compute(image, text, scale, bias, keys, exchange, wants_grad).separate()


@_operator.register_fake
def _like(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    kind: str,
    impl: str,
    group: str,
    wants_grad: bool,
) -> Outputs:
    return outputs_like(image, text, scale, wants_grad)
