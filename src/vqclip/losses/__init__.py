"""Losses over the global batch: the embeddings of all ranks to one number.

After `vqclip.model`, which makes the embeddings; before the training step.

Each kind is one file with its config class, and one line in the union `LossConfig`.

Where the loss is summed over ranks: `tiles.FeatureGradients.finish` (``tiled`` and ``ring``); ``gather`` needs no sum,
because `features.gather_features` collects all features first.
"""

from typing import Annotated

from pydantic import Field

from vqclip.losses.contrastive import ContrastiveConfig, ContrastiveLoss
from vqclip.losses.distillation import DistillationLoss
from vqclip.losses.features import Loss, Positives, pair_keys
from vqclip.losses.sigmoid import SigmoidConfig, SigmoidLoss
from vqclip.losses.total import weighted_total

LossConfig = Annotated[ContrastiveConfig | SigmoidConfig, Field(discriminator="kind")]
"""Configuration of any contrastive loss, chosen by ``kind``."""

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
