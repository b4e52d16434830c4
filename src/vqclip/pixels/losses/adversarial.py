"""The adversarial term: made images are to look real to a discriminator, which trains in the same step.

    generator       mean of -D(made)                                        gradient at the pixels only
    discriminator   mean of (max(0, 1 - D(real)) + max(0, 1 + D(made))) / 2   gradient at its own weights only

Hinge loss (Lim & Ye 2017, https://arxiv.org/abs/1705.02894; Miyato et al. 2018, https://arxiv.org/abs/1802.05957). Both
come from one pass of the discriminator over the made images, and are in one total, so that there is one backward.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip.pixels.losses.base import PixelTermConfig
from vqclip.pixels.losses.discriminators import Discriminator, DiscriminatorConfig, PatchDiscriminatorConfig

__all__ = ["AdversarialConfig", "AdversarialSums", "Adversary", "adaptive_factor"]

_LARGEST_FACTOR = 1e4
"""Largest adaptive factor, as in VQGAN."""


class AdversarialSums(NamedTuple):
    """Sums over images."""

    generator: Tensor
    """() float64, without graph."""
    gradient: Tensor
    """Gradient of ``generator`` at the pixels."""
    discriminator: Tensor
    """() float64, with a graph to the discriminator's weights alone."""


class Adversary(nn.Module):
    """A discriminator and its loss.

    Args:
        discriminator: judge of images.
        lr_ratio: factor on the learning rate of its weights; the optimizer reads it.
    """

    def __init__(self, discriminator: Discriminator, lr_ratio: float = 1.0):
        super().__init__()
        self.discriminator, self.lr_ratio = discriminator, lr_ratio
        self.digest = discriminator.digest

    @torch.enable_grad()
    def forward(self, pixels: Tensor, real: Tensor, count: int) -> AdversarialSums:
        """Return the sums over the first ``count`` images.

        Args:
            pixels: ``(B, 3, H, W)`` made images, a leaf that requires a gradient.
            real: ``(B, 3, H, W)`` in 0..1.
            count: number of images that count.
        """
        judge = self.discriminator
        seen = judge.frozen_features(pixels)
        inputs = [each.detach().requires_grad_() for each in seen]  # ends the discriminator's graph before the pixels
        made = judge(inputs)
        with torch.no_grad():
            seen_real = judge.frozen_features(real)
        margins = (F.relu(1 - judge(seen_real)) + F.relu(1 + made)) / 2
        generator = -_sum(made, count)
        at_inputs = torch.autograd.grad(generator, inputs, retain_graph=True)
        (gradient,) = torch.autograd.grad(seen, pixels, at_inputs)
        return AdversarialSums(generator.detach(), gradient, _sum(margins, count))


def adaptive_factor(reconstruction: Tensor, generator: Tensor) -> Tensor:
    """Return the ratio of the norms of two gradients at the pixels, at most 10^4.

    VQGAN (Esser et al. 2021, https://arxiv.org/abs/2012.09841) takes the gradients at the decoder's last layer. The
    squared norms of those at the pixels add up over images, and so are equal for any split of the batch.

    Args:
        reconstruction: () sum of the squared gradient of the weighted other terms.
        generator: () the same of the generator's term.
    """
    smallest = torch.finfo(generator.dtype).tiny
    return (reconstruction / generator.clamp_min(smallest)).sqrt().clamp_max(_LARGEST_FACTOR)


def _sum(judged: Tensor, count: int) -> Tensor:
    return judged.mean(dim=1)[:count].double().sum()


class AdversarialConfig(PixelTermConfig):
    """Made images are to look real to a discriminator, which trains in the same step from `start_step` on."""

    kind: Literal["adversarial"] = "adversarial"
    """A discriminator and the hinge loss."""
    weight: float = Field(0.5, gt=0, le=1e6)
    """Factor of the term; with `adaptive`, its part in the gradient at the pixels, relative to all other terms."""
    start_step: int = Field(ge=0)
    """First step with this term; before it the discriminator does not train either. Half of the run is usual."""
    adaptive: bool = True
    """Multiply `weight` by the ratio of the other terms' gradient norm at the pixels to this term's."""
    discriminator: DiscriminatorConfig = PatchDiscriminatorConfig()
    """Network that judges the images."""
    lr_ratio: float = Field(1.0, gt=0, le=1000)
    """Factor on the learning rate of the discriminator."""

    def build(self, image_size: int) -> Adversary:
        """Make the discriminator with random weights (torch's global generator).

        Raises:
            ConfigError: it does not fit the images, or its frozen network cannot be loaded.
        """
        return Adversary(self.discriminator.build(image_size), self.lr_ratio)
