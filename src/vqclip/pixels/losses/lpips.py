"""LPIPS: the distance of VGG16 features that was fitted to people's judgements, from weights in local files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.io.tensors import module_digest
from vqclip.pixels.losses.base import PixelTerm, PixelTermConfig
from vqclip.pixels.losses.networks import make_constant
from vqclip.towers.weights import load_checkpoint

__all__ = ["LPIPSConfig"]

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Mean and deviation of pixels in -1..1, as LPIPS was fitted with."""
_LAYERS = {3: 64, 8: 128, 15: 256, 22: 512, 29: 512}
"""Layers of VGG16 (the last ReLU before each pooling) → their channels."""
_SMALLEST = 16
_EPS = 1e-10


class _LPIPS(PixelTerm):
    """Sum over layers of the mean over positions of Σ_c w_c (a_c - b_c)², for unit-length features a and b."""

    shift: Tensor
    scale: Tensor

    def __init__(self, trunk: Path, heads: Path):
        super().__init__()
        from torchvision.models import vgg16

        with torch.device("meta"):  # the classifier alone would take half a gigabyte
            vgg = vgg16(weights=None, init_weights=False)
        del vgg.classifier
        vgg.to_empty(device="cpu")
        load_checkpoint(vgg, trunk, ["classifier"], key="trunk")
        linear = nn.ModuleDict({f"lin{number}": _head(channels) for number, channels in enumerate(_LAYERS.values())})
        load_checkpoint(linear, heads, key="heads")
        self.trunk, self.heads = vgg.features[: max(_LAYERS) + 1], linear
        self.register_buffer("shift", torch.tensor(_SHIFT).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor(_SCALE).view(3, 1, 1))
        self.digest = module_digest(self)
        make_constant(self)

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            targets = self._features(real)
        apart = [(a - b).square() for a, b in zip(self._features(made), targets, strict=True)]
        parts = [head(each).mean(dim=(1, 2, 3)) for head, each in zip(self.heads.values(), apart, strict=True)]
        return torch.stack(parts).sum(dim=0)

    def _features(self, images: Tensor) -> list[Tensor]:
        """``(B, 3, H, W)`` in 0..1 → features ``(B, C, h, w)`` of unit length over C; 0 where a ReLU leaves nothing."""
        x, found = (2 * images - 1 - self.shift) / self.scale, []
        for number, layer in enumerate(self.trunk):
            x = layer(x)
            if number in _LAYERS:
                found.append(x * (x.square().sum(dim=1, keepdim=True) + _EPS).rsqrt())
        return found


def _head(channels: int) -> nn.Sequential:
    """Make the weights of a layer's channels, with their names in the published files: ``lin0.model.1.weight``."""
    return nn.Sequential(OrderedDict(model=nn.Sequential(nn.Identity(), nn.Conv2d(channels, 1, 1, bias=False))))


class LPIPSConfig(PixelTermConfig):
    """LPIPS with VGG16 (Zhang et al. 2018), https://arxiv.org/abs/1801.03924, version 0.1.

    No weights come with vqclip, and none are fetched.
    """

    kind: Literal["lpips"] = "lpips"
    """LPIPS."""
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    trunk: Path
    """torchvision's weights of VGG16 (`vgg16-397923af.pth`), or the same tensors as safetensors."""
    heads: Path
    """Weights of the channels of each layer, by the names of the `lpips` package (its `weights/v0.1/vgg.pth`)."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term.

        Raises:
            ConfigError: a file is missing or damaged, has other tensors, or the images are smaller than 16 pixels.
        """
        if image_size < _SMALLEST:
            raise ConfigError(f"lpips: got images of {image_size} pixels; expected at least {_SMALLEST}")
        return _LPIPS(self.trunk, self.heads)
