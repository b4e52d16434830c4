"""Multinomial logistic regression with an L2 penalty, fitted by L-BFGS: deterministic, in blocks of rows.

Shapes: n samples, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vqclip.process import progress

BLOCK = 2**24
"""Most logits in memory: 64 MiB in fp32."""
ITERATIONS = 1000
"""Most iterations of a fit, as in CLIP's linear probes (Radford et al. 2021)."""


def fit(x: Tensor, labels: Tensor, classes: int, l2: float, start: Tensor | None = None) -> Tensor:
    """Minimise mean cross-entropy + ``l2`` / 2 · |weights|², without a penalty on the bias.

    Args:
        x: ``(n, D)`` float64.
        labels: ``(n,)`` int64.
        classes: K.
        l2: strength of the penalty.
        start: ``(K, D + 1)`` to begin with; None: zeros.

    Returns:
        ``(K, D + 1)``: weights, and the bias in the last column.

    Raises:
        StopRequested: this rank has been asked to stop (`vqclip.process.progress`).
    """
    weights = x.new_zeros(classes, x.shape[1] + 1) if start is None else start.clone()
    solver = torch.optim.LBFGS(
        [weights],
        max_iter=ITERATIONS,
        tolerance_grad=1e-5,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        value, gradient = _loss(weights, x, labels)
        penalised = weights[:, :-1]
        gradient[:, :-1] += l2 * penalised
        weights.grad = gradient
        return value + l2 / 2 * penalised.square().sum()

    solver.step(closure)
    return weights


def logits(weights: Tensor, x: Tensor) -> Tensor:
    """Return the logits ``(n, K)`` of ``x`` ``(n, D)``."""
    return torch.addmm(weights[:, -1], x, weights[:, :-1].T)


def loss(weights: Tensor, x: Tensor, labels: Tensor) -> float:
    """Return the mean cross-entropy."""
    return float(_loss(weights, x, labels)[0])


def blocks(x: Tensor, labels: Tensor, classes: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Split samples and labels into blocks whose logits fit into `BLOCK`."""
    rows = max(1, BLOCK // classes)
    return list(zip(x.split(rows), labels.split(rows), strict=True))


def _loss(weights: Tensor, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy and its gradient ``(K, D + 1)``."""
    total, gradient = x.new_zeros(()), torch.zeros_like(weights)
    for part, own in blocks(x, labels, len(weights)):
        progress.heartbeat()
        chances = logits(weights, part).log_softmax(dim=1)
        index = own[:, None]
        total -= chances.gather(1, index).sum()
        error = chances.exp_().scatter_add_(1, index, -part.new_ones(len(part), 1))
        gradient[:, :-1] += error.T @ part
        gradient[:, -1] += error.sum(dim=0)
    return total / len(x), gradient / len(x)
