"""The softmax contrastive loss of CLIP (Radford et al. 2021) over the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.losses.features import Implementation, Loss, PairLossConfig, Positives
from vqclip.losses.tiled import tiled_loss


class ContrastiveLoss(Loss):
    """Symmetric cross-entropy of every image over all texts and of every text over all images: their mean.

    Args:
        impl: see `Loss`.
        label_smoothing: ε, 0 to 1: the target is 1 - ε for the partner, plus ε / G for each of the G (Szegedy et al.
            2016, https://arxiv.org/abs/1512.00567).
        positives: see `Loss`.

    Raises:
        ConfigError: unknown implementation, or label smoothing together with positives.
    """

    name = "contrastive"

    def __init__(
        self, impl: Implementation = "tiled", label_smoothing: float = 0.0, positives: Positives | None = None
    ):
        super().__init__(impl, positives)
        _check_smoothing(label_smoothing, positives is not None)
        self.label_smoothing = label_smoothing

    def chance(self, batch_size: int) -> float:
        """Return the loss of a global batch with equal logits and without keys: ``log G``."""
        return math.log(batch_size)

    def _check(self, bias: Tensor | None, keys: Tensor | None) -> None:
        if bias is not None:  # a softmax does not change with a constant
            raise ConfigError(
                "the softmax loss takes no bias; set model.temperature.bias to null, or loss.kind to sigmoid"
            )
        _check_smoothing(self.label_smoothing, keys is not None)

    def _compute_tiled(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        keys: Tensor | None,
        sizes: Sequence[int] | None,
    ) -> Tensor:
        loss = tiled_loss("softmax", self.impl, image, text, scale, keys=keys, sizes=sizes)
        return loss + self.label_smoothing * self._smoothing_term(image, text, scale) if self.label_smoothing else loss

    def _of_logits(self, logits: Tensor, bias: Tensor | None, left_out: Tensor | None) -> Tensor:
        logits = logits if left_out is None else logits.masked_fill(left_out, -torch.inf)
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


class ContrastiveConfig(PairLossConfig):
    """CLIP's softmax loss."""

    kind: Literal["contrastive"] = "contrastive"
    """The softmax loss."""
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the target that is spread evenly over all texts (images) of the global batch."""

    @model_validator(mode="after")
    def _smoothing_fits(self) -> ContrastiveConfig:
        _check_smoothing(self.label_smoothing, self.positives is not None)
        return self

    def build(self) -> ContrastiveLoss:
        """Make the loss."""
        return ContrastiveLoss(self.impl, self.label_smoothing, self.positives)
