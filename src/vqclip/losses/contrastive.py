"""The softmax contrastive loss of CLIP (Radford et al. 2021) over the global batch."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.losses.features import Implementation, check_implementation, gathered, precise
from vqclip.losses.tiled import tiled_softmax
from vqclip.precision import full_precision


class ContrastiveLoss(nn.Module):
    """Symmetric cross-entropy of every image among all texts and every text among all images.

    Every rank returns the same value; see `vqclip.dist` for how its gradients are scaled.

    Args:
        impl: ``gather``, the readable reference: all features are gathered with their gradients and one ``(G, G)``
            matrix of logits is made; or ``tiled``, the same with memory that grows with the batch.
        group: the ranks whose batches make the global one; all of them by default.

    Raises:
        ConfigError: there is no such implementation.
    """

    name = "contrastive"

    def __init__(self, impl: Implementation = "tiled", group: dist.Group = None):
        super().__init__()
        check_implementation(impl)
        self.impl, self.group = impl, group

    def forward(self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """The mean loss over the global batch. A collective, like its backward with ``gather``.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``, row by row the texts of the images.
            scale: () positive factor of the logits.
            bias: must be None: a constant changes no softmax.

        Returns:
            () float32, or float64 for float64 features.

        Raises:
            ShapeError: the features do not pair up.
            ConfigError: a bias was given.
        """
        if bias is not None:
            raise ConfigError(
                "the softmax loss takes no bias; set model.temperature.bias to null, or loss.kind to sigmoid"
            )
        image, text = precise(image, text)
        with full_precision(image.device):
            if self.impl == "tiled":
                return tiled_softmax(image, text, scale, self.group)
            images, texts = gathered(image, text, self.group)
            logits = scale.to(images.dtype) * images @ texts.T
            targets = torch.arange(len(logits), device=logits.device)
            return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


class ContrastiveConfig(Config):
    """CLIP's softmax loss."""

    kind: Literal["contrastive"] = "contrastive"
    """The softmax loss."""
    impl: Implementation = "tiled"
    """How it is computed; all give the same. tiled: memory grows with the batch; gather: with its square."""
    needs_bias: ClassVar[bool] = False
    """Whether the model must have `temperature.bias`."""

    def build(self) -> ContrastiveLoss:
        """Make the loss."""
        return ContrastiveLoss(self.impl)
