"""The softmax contrastive loss of CLIP (Radford et al. 2021) over the global batch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
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
from vqclip.losses.tiled import tiled_loss
from vqclip.nn.precision import full_precision


class ContrastiveLoss(nn.Module):
    """Symmetric cross-entropy of every image over all texts and of every text over all images.

    Every rank returns the same value; see `vqclip.dist` for the scale of its gradients.

    Args:
        impl: ``tiled``: memory grows with the batch; ``ring``: like ``tiled``, without all texts on every rank;
            ``gather``: the readable reference, which gathers all features with their gradients and computes one
            ``(G, G)`` matrix of logits.
        label_smoothing: ε, 0 to 1: the target is 1 - ε for the partner, plus ε / G for each of the G (Szegedy et al.
            2016, https://arxiv.org/abs/1512.00567).
        positives: how the ``keys`` of `forward` are computed; see `vqclip.losses.features.pair_keys`.

    Raises:
        ConfigError: unknown implementation, or label smoothing together with positives.
    """

    name = "contrastive"

    def __init__(
        self, impl: Implementation = "tiled", label_smoothing: float = 0.0, positives: Positives | None = None
    ):
        super().__init__()
        check_implementation(impl)
        _check_smoothing(label_smoothing, positives is not None)
        self.impl, self.label_smoothing, self.positives = impl, label_smoothing, positives

    def forward(
        self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss over the global batch. A collective; with ``gather`` its backward is one too.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``; row i is the text of image i.
            scale: () positive factor of the logits.
            bias: must be None: a softmax does not change with a constant.
            keys: ``(B,)`` int64; pairs with equal keys are left out of each other's sums. All ranks pass keys, or none.

        Returns:
            () float32, or float64 for float64 features.

        Raises:
            ShapeError: the features do not pair up.
            ConfigError: a bias was given, or keys with label smoothing.
        """
        if bias is not None:
            raise ConfigError(
                "the softmax loss takes no bias; set model.temperature.bias to null, or loss.kind to sigmoid"
            )
        check_keys(self.positives, keys)
        _check_smoothing(self.label_smoothing, keys is not None)
        image, text = to_full_precision(image, text, keys)
        check_scalars(scale=scale)
        with full_precision(image.device):
            if self.impl == "gather":
                return self._reference_loss(image, text, scale, keys)
            loss = tiled_loss("softmax", self.impl, image, text, scale, keys=keys)
            return (
                loss + self.label_smoothing * self._smoothing_term(image, text, scale) if self.label_smoothing else loss
            )

    def chance(self, batch_size: int) -> float:
        """Return the loss of a global batch with equal logits and without keys: ``log G``."""
        return math.log(batch_size)

    def _reference_loss(self, image: Tensor, text: Tensor, scale: Tensor, keys: Tensor | None) -> Tensor:
        images, texts = gather_features(image, text)
        logits = scale.to(images.dtype) * images @ texts.T
        if keys is not None:
            logits = logits.masked_fill(false_negatives(keys), -torch.inf)
        targets = torch.arange(len(logits), device=logits.device)
        by_row, by_column = (
            F.cross_entropy(scores, targets, label_smoothing=self.label_smoothing) for scores in (logits, logits.T)
        )
        return (by_row + by_column) / 2

    def _smoothing_term(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        """Return the mean logit of pairs minus the mean of all logits, which ε scales, without the (G, G) matrix."""
        count = image.new_full((1,), len(image))
        sums = torch.cat((image.sum(dim=0), text.sum(dim=0), (image * text).sum().view(1), count))
        images, texts, pairs, count = dist.replicated_sum(sums).split((*2 * [image.shape[1]], 1, 1))
        return scale.to(image.dtype) * (pairs / count - (images @ texts) / count.square()).squeeze()


def _check_smoothing(label_smoothing: float, has_keys: bool) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing: got {label_smoothing}, expected a number from 0 to 1")
    if label_smoothing and has_keys:
        raise ConfigError(
            f"label_smoothing: got {label_smoothing} together with positives, but smoothing needs all texts and "
            "positives leave some out; expected one of the two: set label_smoothing to 0, or "
            "positives to null"
        )


class ContrastiveConfig(Config):
    """CLIP's softmax loss."""

    kind: Literal["contrastive"] = "contrastive"
    """The softmax loss."""
    impl: Implementation = "tiled"
    """Implementation; all give the same result. tiled: memory grows with the batch; ring: like tiled, without all texts
    on every rank; gather: memory grows with the square of the batch."""
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the target that is spread evenly over all texts (images) of the global batch."""
    positives: Positives | None = None
    """Pairs of equal samples (sample_id) or equal texts (caption) are not negatives of each other; null: all are."""
    needs_bias: ClassVar[bool] = False
    """Whether the model must have `temperature.bias`."""

    @model_validator(mode="after")
    def _smoothing_fits(self) -> ContrastiveConfig:
        _check_smoothing(self.label_smoothing, self.positives is not None)
        return self

    def build(self) -> ContrastiveLoss:
        """Make the loss."""
        return ContrastiveLoss(self.impl, self.label_smoothing, self.positives)
