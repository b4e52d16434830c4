"""The losses of `contrastive` and `sigmoid` without their square of logits; see `vqclip.losses.tiles`.

Both are custom operators with the gradients among their outputs, so that `torch.compile` keeps one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip import dist
from vqclip.losses.tiles import KEPT_BYTES, FeatureGradients, Gradients, Tiles, connected, share


def tiled_softmax(image: Tensor, text: Tensor, scale: Tensor, group: dist.Group = None) -> Tensor:
    """As `vqclip.losses.ContrastiveLoss`: () from ``(B, E)`` features in fp32 or fp64."""
    return _run(torch.ops.vqclip.tiled_softmax, image, text, scale, torch.zeros_like(scale), group)


def tiled_sigmoid(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, group: dist.Group = None) -> Tensor:
    """As `vqclip.losses.SigmoidLoss`: () from ``(B, E)`` features in fp32 or fp64."""
    return _run(torch.ops.vqclip.tiled_sigmoid, image, text, scale, bias, group)


def _run(op: Callable[..., Any], image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, group: dist.Group) -> Tensor:
    scale, bias = scale.to(image.dtype), bias.to(image.dtype)
    inputs = (image, text, scale, bias)
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    found = op(*(tensor.detach() for tensor in inputs), dist.group_name(group), wants_grad)
    return connected(*inputs, Gradients(*found)) if wants_grad else found[0]


def _softmax(image: Tensor, text: Tensor, scale: Tensor, group: dist.Group, wants_grad: bool) -> Gradients:
    shares = share(image, text, group, wants_grad)
    count, own = len(shares.texts), slice(shares.start, shares.start + len(image))
    pairs = scale * (image * text).sum(dim=1)

    # The pairs are kept apart: softplus(rest - pair) has digits left where a softmax is nearly 1.
    tiles = Tiles(shares, scale, kept_bytes=KEPT_BYTES if wants_grad else 0)
    rows_rest = pairs.new_empty(len(pairs))
    highest, total = pairs.new_full((count,), -torch.inf), pairs.new_zeros(count)
    for tile in tiles:
        rows_rest[tile.rows] = tile.logits.logsumexp(dim=1)
        higher = torch.maximum(highest, tile.logits.amax(dim=0))
        total.mul_((highest - _finite(higher)).exp_()).add_((tile.logits - _finite(higher)).exp_().sum(dim=0))
        highest = higher
    overall = dist.reduce_(highest.clone(), "max", group)
    total.mul_((highest - _finite(overall)).exp_())
    all_pairs = torch.zeros_like(total)
    all_pairs[own] = pairs
    total, all_pairs = dist.reduce_(torch.stack((total, all_pairs)), group=group)
    columns_rest = overall + total.log()

    loss = (_softplus(rows_rest - pairs) + _softplus(columns_rest[own] - pairs)).sum() / (2 * count)
    zero = torch.zeros_like(scale)
    if not wants_grad:
        return _without_gradients(dist.reduce_(loss, group=group))
    # exp(logit - this) is the gradient of a logit by its row, by its column.
    by_row = torch.logaddexp(rows_rest, pairs) + _log(2 * count)
    by_column = torch.logaddexp(columns_rest, all_pairs) + _log(2 * count)
    of_pairs = -((rows_rest - pairs).sigmoid() + (columns_rest[own] - pairs).sigmoid()) / (2 * count)
    gradients = FeatureGradients(shares)
    for tile in tiles:
        columns = (tile.logits - by_column).exp_()
        tile.logits.sub_(by_row[tile.rows, None]).exp_().add_(columns)
        tile.pairs.copy_(of_pairs[tile.rows])
        gradients.add(tile.rows, tile.logits)
    return gradients.finish(loss, scale, zero, group)


def _sigmoid(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, group: dist.Group, wants_grad: bool
) -> Gradients:
    shares = share(image, text, group, wants_grad)
    count = len(shares.texts)
    pairs = scale * (image * text).sum(dim=1) + bias
    of_pairs = -(-pairs).sigmoid() / count
    loss, of_bias = _softplus(-pairs).sum() / count, torch.zeros_like(bias)
    gradients = FeatureGradients(shares) if wants_grad else None
    for tile in Tiles(shares, scale, bias):
        loss += _softplus(tile.logits).sum() / count
        if gradients is not None:
            tile.logits.sigmoid_().div_(count)
            tile.pairs.copy_(of_pairs[tile.rows])
            of_bias += tile.logits.sum()
            gradients.add(tile.rows, tile.logits)
    if gradients is None:
        return _without_gradients(dist.reduce_(loss, group=group))
    return gradients.finish(loss, scale, of_bias, group)


def _without_gradients(loss: Tensor) -> Gradients:
    return Gradients(loss, *(loss.new_empty(0) for _ in range(4)))


def _finite(x: Tensor) -> Tensor:
    """0 for -inf, which a column without any other row has."""
    return x.masked_fill(x == -torch.inf, 0)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=20 if x.dtype == torch.float32 else 40)


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())


@torch.library.custom_op("vqclip::tiled_softmax", mutates_args=())
def _softmax_op(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, group: str, wants_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _fresh(_softmax(image, text, scale, dist.named_group(group), wants_grad))


@torch.library.custom_op("vqclip::tiled_sigmoid", mutates_args=())
def _sigmoid_op(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, group: str, wants_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _fresh(_sigmoid(image, text, scale, bias, dist.named_group(group), wants_grad))


def _fresh(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An operator may not return two views of one tensor."""
    loss, image, text, scale, bias = gradients
    return loss.clone(), image, text, scale.clone(), bias.clone()


@_softmax_op.register_fake
@_sigmoid_op.register_fake
def _like(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, group: str, wants_grad: bool) -> tuple[Tensor, ...]:
    loss = torch.empty_like(scale)
    return tuple(map(torch.empty_like, (scale, image, text, scale, bias))) if wants_grad else _without_gradients(loss)
