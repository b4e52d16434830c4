"""Features of frozen towers in a training step: from the feature cache, or computed."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.nn.precision import Precision, autocast
from vqclip.tokenizer import Tokenizer


def run_frozen_tower(
    tokenizer: Tokenizer, inputs: Tensor, cached: Tensor | None, precision: Precision
) -> Tensor | None:
    """Return the tower's features of this rank's samples; None for a tower that is trained.

    Args:
        tokenizer: of either modality.
        inputs: ``(B, ...)``, images or token numbers of the whole context.
        cached: ``(B, N, D)`` from the feature cache, or None.
        precision: of the step.

    Returns:
        ``(B, N, D)`` in the dtype of the weights, on their device.
    """
    if cached is not None:
        return cached.to(tokenizer.device, non_blocking=True).to(tokenizer.pool.position.dtype)
    if not tokenizer.tower.is_frozen:
        return None
    with torch.no_grad(), autocast(tokenizer.device, precision):
        return tokenizer.tower_features(inputs)
