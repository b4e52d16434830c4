"""The sigmoid loss of SigLIP (Zhai et al. 2023) over the global batch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip import dist
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
from vqclip.losses.tiled import tiled_sigmoid
from vqclip.nn.precision import full_precision


class SigmoidLoss(nn.Module):
    """Every pair of an image and a text is a yes-no question of its own: do they belong together?

    Args:
        impl: as of `ContrastiveLoss`.
        positives: what makes the ``keys`` of `forward`; see `vqclip.losses.features.pair_keys`.
        group: the ranks whose batches make the global one; all of them by default.

    Raises:
        ConfigError: there is no such implementation.
    """

    name = "sigmoid"

    def __init__(self, impl: Implementation = "tiled", positives: Positives | None = None, group: dist.Group = None):
        super().__init__()
        check_implementation(impl)
        self.impl, self.positives, self.group = impl, positives, group

    def forward(
        self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, keys: Tensor | None = None
    ) -> Tensor:
        """The sum over all pairs of the global batch, divided by the number of images G.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``, row by row the texts of the images.
            scale: () positive factor of the logits.
            bias: () added to the logits; SigLIP starts at -10.
            keys: ``(B,)`` int64; of two pairs with equal keys it is not asked whether they belong together. All ranks
                give them, or none.

        Returns:
            () float32, or float64 for float64 features.

        Raises:
            ShapeError: the features do not pair up.
            ConfigError: no bias was given.
        """
        if bias is None:
            raise ConfigError("the sigmoid loss needs a bias; set model.temperature.bias (SigLIP starts at -10)")
        check_keys(self.positives, keys)
        image, text = to_full_precision(image, text, keys)
        check_scalars(scale=scale, bias=bias)
        with full_precision(image.device):
            if self.impl != "gather":
                return tiled_sigmoid(image, text, scale, bias, keys, self.impl, self.group)
            images, texts = gather_features(image, text, self.group)
            logits = scale.to(images.dtype) * images @ texts.T + bias.to(images.dtype)
            answers = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
            losses = -F.logsigmoid(answers * logits)
            if keys is not None:
                losses = losses.masked_fill(false_negatives(keys, self.group), 0)
            return losses.sum() / len(logits)

    def chance(self, batch_size: int) -> float:
        """The lowest loss over a global batch of which all logits are equal, without keys."""
        count = batch_size
        return math.log(count) - (count - 1) * math.log1p(-1 / count)


class SigmoidConfig(Config):
    """SigLIP's sigmoid loss."""

    kind: Literal["sigmoid"] = "sigmoid"
    """The sigmoid loss."""
    impl: Implementation = "tiled"
    """How it is computed; all give the same. tiled: memory grows with the batch; ring: the same without all texts on
    every rank; gather: with the square of the batch."""
    positives: Positives | None = None
    """Pairs of one sample (sample_id), or of one text (caption), are no negatives of each other; null: all are."""
    needs_bias: ClassVar[bool] = True
    """Whether the model must have `temperature.bias`."""

    def build(self) -> SigmoidLoss:
        """Make the loss."""
        return SigmoidLoss(self.impl, self.positives)
