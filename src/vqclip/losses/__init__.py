"""Losses over the global batch: the embeddings of all ranks to one number.

After `vqclip.model`, which makes the embeddings; before the training step.

    contrastive.py   the losses, their configuration, and a readable reference of each: ``impl: gather``
    tiled.py         the default: the same numbers without the G × G matrix of logits; the texts of all ranks reach a
                     rank all at once (``tiled``), or in a ``ring``

Where the loss is summed over ranks: `tiled.FeatureGradients.finish`; ``gather`` needs no sum, because it collects all
features first.
"""

from vqclip.losses.contrastive import (
    ContrastiveConfig,
    ContrastiveLoss,
    DistillationLoss,
    Implementation,
    Loss,
    LossConfig,
    Positives,
    SigmoidConfig,
    SigmoidLoss,
    pair_keys,
    weighted_total,
)

__all__ = [
    "ContrastiveConfig",
    "ContrastiveLoss",
    "DistillationLoss",
    "Implementation",
    "Loss",
    "LossConfig",
    "Positives",
    "SigmoidConfig",
    "SigmoidLoss",
    "pair_keys",
    "weighted_total",
]
