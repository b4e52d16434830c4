"""The sigmoid loss of SigLIP (Zhai et al. 2023) over the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip.errors import ConfigError
from vqclip.losses.features import Loss, PairLossConfig
from vqclip.losses.tiled import tiled_loss


class SigmoidLoss(Loss):
    """Binary cross-entropy of every image with every text: do they belong together?

    The sum over all G² pairs of the global batch, divided by G. SigLIP's bias starts at -10. Arguments: see `Loss`.
    """

    name = "sigmoid"

    def chance(self, batch_size: int) -> float:
        """Return the lowest loss of a global batch with equal logits and without keys."""
        return math.log(batch_size) - (batch_size - 1) * math.log1p(-1 / batch_size)

    def _check(self, bias: Tensor | None, keys: Tensor | None) -> None:
        if bias is None:
            raise ConfigError("the sigmoid loss needs a bias; set model.temperature.bias (SigLIP starts at -10)")

    def _compute_tiled(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        keys: Tensor | None,
        sizes: Sequence[int] | None,
    ) -> Tensor:
        return tiled_loss("sigmoid", self.impl, image, text, scale, bias, keys, sizes=sizes)

    def _of_logits(self, logits: Tensor, bias: Tensor | None, left_out: Tensor | None) -> Tensor:
        assert bias is not None
        answers = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
        losses = -F.logsigmoid(answers * (logits + bias.to(logits.dtype)))
        return (losses if left_out is None else losses.masked_fill(left_out, 0)).sum() / len(logits)


class SigmoidConfig(PairLossConfig):
    """SigLIP's sigmoid loss."""

    kind: Literal["sigmoid"] = "sigmoid"
    """The sigmoid loss."""
    needs_bias: ClassVar[bool] = True
    """Whether the model must have `temperature.bias`."""

    def build(self) -> SigmoidLoss:
        """Make the loss."""
        return SigmoidLoss(self.impl, self.positives)
