"""The adversarial term: made images are to look real to a discriminator, which trains in the same step.

    generator       mean of -D(made)                                        gradient at the pixels only
    discriminator   mean of (max(0, 1 - D(real)) + max(0, 1 + D(made))) / 2   gradient at its own weights only

Hinge loss (Lim & Ye 2017, https://arxiv.org/abs/1705.02894; Miyato et al. 2018, https://arxiv.org/abs/1802.05957). Both
come from one pass of the discriminator over the made images, and are in one total, so that there is one backward.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import FREE, Config
from vqclip.config.bounds import MAX_WIDTH
from vqclip.errors import ConfigError, name_section
from vqclip.pixels.networks import FeatureNetwork, Layers, NetworkConfig, build_network
from vqclip.pixels.terms import PixelTermConfig

_SLOPE = 0.2
_PER_GROUP = 16


class Discriminator(nn.Module, ABC):
    """Judge of images, and its loss: a frozen part, which may be empty, and one that trains. No batch normalisation.

    Attributes:
        digest: of the frozen weights; None without any.
        lr_ratio: factor on the learning rate of its weights; the optimizer reads it.
    """

    digest: str | None = None
    lr_ratio: float = 1.0

    def frozen_features(self, images: Tensor) -> list[Tensor]:
        """``(B, 3, H, W)``, about 0..1 → inputs of `judge`, each ``(B, ...)``."""
        return [images]

    @abstractmethod
    def judge(self, features: Sequence[Tensor]) -> Tensor:
        """Features → ``(B, P)``, one number for each of P parts of the image."""

    @torch.enable_grad()
    def forward(self, pixels: Tensor, real: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the sums over the first ``count`` images.

        Args:
            pixels: ``(B, 3, H, W)`` made images, a leaf that requires a gradient.
            real: ``(B, 3, H, W)`` in 0..1.
            count: number of images that count.

        Returns:
            The sum of the generator, () float64, without graph; its gradient at the pixels; and the sum of the
            discriminator, () float64, with a graph to the discriminator's weights alone.
        """
        seen = self.frozen_features(pixels)
        inputs = [each.detach().requires_grad_() for each in seen]  # ends the discriminator's graph before the pixels
        made = self.judge(inputs)
        with torch.no_grad():
            seen_real = self.frozen_features(real)
        margins = (F.relu(1 - self.judge(seen_real)) + F.relu(1 + made)) / 2
        generator, discriminator = (each.mean(dim=1)[:count].double().sum() for each in (-made, margins))
        at_inputs = torch.autograd.grad(generator, inputs, retain_graph=True)
        (gradient,) = torch.autograd.grad(seen, pixels, at_inputs)
        return generator.detach(), gradient, discriminator


class _Patches(Discriminator):
    """Strided convolutions with group normalisation; each number looks at one patch."""

    def __init__(self, channels: int, layers: int):
        super().__init__()
        widths = [channels * min(2**number, 8) for number in range(layers + 1)]
        parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
        for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
            stride = 2 if number < layers else 1
            parts.append(nn.Conv2d(before, after, 4, stride=stride, padding=1, bias=False))
            parts += [nn.GroupNorm(max(1, after // _PER_GROUP), after), nn.LeakyReLU(_SLOPE)]
        self.network = nn.Sequential(*parts, nn.Conv2d(widths[-1], 1, 4, padding=1))

    def judge(self, features: Sequence[Tensor]) -> Tensor:
        return self.network(2 * features[0] - 1).flatten(1)


class PatchDiscriminatorConfig(Config):
    """Convolutions that judge overlapping patches (pix2pix, Isola et al. 2017, https://arxiv.org/abs/1611.07004)."""

    kind: Literal["patch"] = "patch"
    """Convolutions on patches."""
    channels: Annotated[int, Field(ge=16, le=MAX_WIDTH, multiple_of=16)] = 64
    """Channels of the first layer; each next one has twice as many, at most 8 times."""
    layers: int = Field(3, ge=1, le=8)
    """Layers that halve the image; a patch has 16, 34, 70, ... pixels for 1, 2, 3, ... layers."""

    def build(self, image_size: int) -> Discriminator:
        """Make the discriminator with random weights (torch's global generator).

        Raises:
            ConfigError: the images are too small for the layers.
        """
        if image_size // 2**self.layers < 3:
            raise ConfigError(
                f"discriminator.layers: got {self.layers}, which halve images of {image_size} pixels to fewer than 3; "
                "expected fewer layers"
            )
        with torch.inference_mode(False):
            return _Patches(self.channels, self.layers)


class _Heads(Discriminator):
    """A small network on each token of each layer of a frozen network."""

    def __init__(self, network: FeatureNetwork, width: int):
        super().__init__()
        self.network, self.digest = network, network.digest
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(channels, width), nn.LeakyReLU(_SLOPE), nn.Linear(width, 1))
            for channels in network.widths
        )

    def frozen_features(self, images: Tensor) -> list[Tensor]:
        return [F.layer_norm(each, each.shape[-1:]) for each in self.network(images)]

    def judge(self, features: Sequence[Tensor]) -> Tensor:
        return torch.cat([head(each).squeeze(-1) for head, each in zip(self.heads, features, strict=True)], dim=1)


class FeatureDiscriminatorConfig(Config):
    """Small heads on the features of a frozen network.

    After Projected GAN (Sauer et al. 2021), https://arxiv.org/abs/2111.01007; here a head looks at single tokens.
    """

    kind: Literal["features"] = "features"
    """Heads on frozen features."""
    network: Annotated[NetworkConfig, FREE]
    """The frozen network; it needs pretrained weights."""
    layers: Layers | None = None
    """Numbers of the network's blocks, from 0 at the input, negative from the output; null: all blocks."""
    width: int = Field(64, ge=1, le=MAX_WIDTH)
    """Hidden width of each head."""

    def build(self, image_size: int) -> Discriminator:
        """Make the discriminator; the heads have random weights (torch's global generator).

        Raises:
            ConfigError: the network cannot be loaded, has random weights or no such layers.
        """
        with name_section("discriminator"):
            return _Heads(build_network(self.network, self.layers), self.width)


DiscriminatorConfig = Annotated[PatchDiscriminatorConfig | FeatureDiscriminatorConfig, Field(discriminator="kind")]
"""Any discriminator, chosen by ``kind``."""


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

    def build(self, image_size: int) -> Discriminator:
        """Make the discriminator with random weights (torch's global generator).

        Raises:
            ConfigError: it does not fit the images, or its frozen network cannot be loaded.
        """
        made = self.discriminator.build(image_size)
        made.lr_ratio = self.lr_ratio
        return made
