"""Distance of the features that a frozen network computes from the images."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vqclip.pixels.losses.base import PixelTerm, PixelTermConfig
from vqclip.pixels.losses.networks import FeatureNetwork, Layers, NetworkConfig, build_network

__all__ = ["PerceptualConfig"]


class _Perceptual(PixelTerm):
    """Mean over layers and positions of 1 - cosine of the two images' features."""

    def __init__(self, network: FeatureNetwork):
        super().__init__()
        self.network, self.digest = network, network.digest

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            targets = self.network(real)
        pairs = zip(self.network(made), targets, strict=True)
        return torch.stack([1 - F.cosine_similarity(a, b, dim=-1).mean(dim=1) for a, b in pairs]).mean(dim=0)


class PerceptualConfig(PixelTermConfig):
    """1 - cosine of features of a frozen network, at each position, the mean over layers and positions.

    After the perceptual loss of Johnson et al. (2016), https://arxiv.org/abs/1603.08155, with the normalisation over
    channels of LPIPS (Zhang et al. 2018), https://arxiv.org/abs/1801.03924. Images are resized to the network's size.
    """

    kind: Literal["perceptual"] = "perceptual"
    """Features of a frozen network."""
    weight: float = Field(0.1, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    network: NetworkConfig
    """The frozen network; it needs pretrained weights."""
    layers: Layers | None = None
    """Numbers of the network's blocks, from 0 at the input, negative from the output; null: all blocks."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term.

        Raises:
            ConfigError: the network cannot be loaded, has random weights or no such layers.
        """
        return _Perceptual(build_network(self.network, self.layers))
