"""The sigmoid loss of SigLIP (Zhai et al. 2023) over the global batch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.losses.features import (
    Implementation,
    Positives,
    check_implementation,
    check_keys,
    check_scalars,
    false_negatives,
    gather_features,
    to_full_precision,
)
from vqclip.losses.tiled import tiled_loss
from vqclip.nn.precision import full_precision


class SigmoidLoss(nn.Module):
    """Binary cross-entropy of every image with every text: do they belong together?

    Args:
        impl: see `ContrastiveLoss`.
        positives: how the ``keys`` of `forward` are computed; see `vqclip.losses.features.pair_keys`.

    Raises:
        ConfigError: unknown implementation.
    """

    name = "sigmoid"

    def __init__(self, impl: Implementation = "tiled", positives: Positives | None = None):
        super().__init__()
        check_implementation(impl)
        self.impl, self.positives = impl, positives

    def forward(
        self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, keys: Tensor | None = None
    ) -> Tensor:
        """Return the sum over all G² pairs of the global batch, divided by G. A collective.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``; row i is the text of image i.
            scale: () positive factor of the logits.
            bias: () added to the logits; SigLIP starts at -10.
            keys: ``(B,)`` int64; the image of one pair and the text of another with an equal key are left out. All
                ranks pass keys, or none.

        Returns:
            () float32, or float64 for float64 features.

        Raises:
            ShapeError: the features do not pair up.
            ConfigError: the bias is None.
        """
        if bias is None:
            raise ConfigError("the sigmoid loss needs a bias; set model.temperature.bias (SigLIP starts at -10)")
        check_keys(self.positives, keys)
        image, text = to_full_precision(image, text, keys)
        check_scalars(scale=scale, bias=bias)
        with full_precision(image.device):
            if self.impl != "gather":
                return tiled_loss("sigmoid", self.impl, image, text, scale, bias, keys)
            images, texts = gather_features(image, text)
            logits = scale.to(images.dtype) * images @ texts.T + bias.to(images.dtype)
            answers = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
            losses = -F.logsigmoid(answers * logits)
            if keys is not None:
                losses = losses.masked_fill(false_negatives(keys), 0)
            return losses.sum() / len(logits)

    def chance(self, batch_size: int) -> float:
        """Return the lowest loss of a global batch with equal logits and without keys."""
        count = batch_size
        return math.log(count) - (count - 1) * math.log1p(-1 / count)


class SigmoidConfig(Config):
    """SigLIP's sigmoid loss."""

    kind: Literal["sigmoid"] = "sigmoid"
    """The sigmoid loss."""
    impl: Implementation = "tiled"
    """Implementation; all give the same result. tiled: memory grows with the batch; ring: like tiled, without all texts
    on every rank; gather: memory grows with the square of the batch."""
    positives: Positives | None = None
    """Pairs of equal samples (sample_id) or equal texts (caption) are not negatives of each other; null: all are."""
    needs_bias: ClassVar[bool] = True
    """Whether the model must have `temperature.bias`."""

    def build(self) -> SigmoidLoss:
        """Make the loss."""
        return SigmoidLoss(self.impl, self.positives)
