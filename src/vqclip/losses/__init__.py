"""Losses over the global batch: one kind of loss a file, its config class beside it, one line in the union here."""

from typing import Annotated

from pydantic import Field

from vqclip.losses.contrastive import ContrastiveConfig, ContrastiveLoss
from vqclip.losses.distillation import DistillationLoss
from vqclip.losses.features import Positives, pair_keys
from vqclip.losses.sigmoid import SigmoidConfig, SigmoidLoss
from vqclip.losses.total import weighted_total

LossConfig = Annotated[ContrastiveConfig | SigmoidConfig, Field(discriminator="kind")]
"""Any kind of contrastive loss."""
Loss = ContrastiveLoss | SigmoidLoss
"""Any contrastive loss."""

__all__ = [
    "ContrastiveConfig",
    "ContrastiveLoss",
    "DistillationLoss",
    "Loss",
    "LossConfig",
    "Positives",
    "SigmoidConfig",
    "SigmoidLoss",
    "pair_keys",
    "weighted_total",
]
