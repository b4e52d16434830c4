"""Terms that compare made images with real ones, one number an image.

l1, l2       errors of pixels
perceptual   distance of the features that a frozen network computes
lpips        distance of VGG16 features that was fitted to people's judgements, from weights in local files
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import FREE, Config
from vqclip.errors import ConfigError
from vqclip.io.tensors import module_digest
from vqclip.pixels.networks import FeatureNetwork, Layers, NetworkConfig, build_network, make_constant
from vqclip.towers.weights import load_checkpoint


class PixelTerm(nn.Module, ABC):
    """Distance between made and real images: one number an image, so that sums over images add up.

    Attributes:
        digest: of the weights of its frozen network; None without one.
    """

    digest: str | None = None

    @abstractmethod
    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        """Return the distance ``(B,)`` of each image.

        Args:
            made: ``(B, 3, H, W)`` float, about 0..1, not clamped; B is at least 1.
            real: ``(B, 3, H, W)`` in 0..1, in the same dtype.
        """


class PixelTermConfig(Config):
    """Common keys of all terms."""

    if TYPE_CHECKING:
        kind: Any
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    start_step: int = Field(0, ge=0)
    """First step with this term, from 0."""

    def identity(self, digest: str | None) -> dict[str, Any]:
        """Return what defines the trajectory: the settings, with the digest of the weights in place of their source."""
        return self.trajectory() | ({} if digest is None else {"digest": digest})


class _PixelError(PixelTerm):
    def __init__(self, power: int):
        super().__init__()
        self.power = power

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        apart = made - real
        return (apart.square() if self.power == 2 else apart.abs()).mean(dim=(1, 2, 3))


class PixelErrorConfig(PixelTermConfig):
    """Mean over pixels in 0..1 and channels of the absolute error, or of its square."""

    kind: Literal["l1", "l2"] = "l1"
    """l1: mean absolute error. l2: mean squared error."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term."""
        return _PixelError(1 if self.kind == "l1" else 2)


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
    network: Annotated[NetworkConfig, FREE]
    """The frozen network; it needs pretrained weights."""
    layers: Layers | None = None
    """Numbers of the network's blocks, from 0 at the input, negative from the output; null: all blocks."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term.

        Raises:
            ConfigError: the network cannot be loaded, has random weights or no such layers.
        """
        return _Perceptual(build_network(self.network, self.layers))


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
        linear = nn.ModuleDict()
        for number, channels in enumerate(_LAYERS.values()):  # with their names in the published files
            head = nn.Sequential(nn.Identity(), nn.Conv2d(channels, 1, 1, bias=False))
            linear[f"lin{number}"] = nn.Sequential(OrderedDict(model=head))
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


class LPIPSConfig(PixelTermConfig):
    """LPIPS with VGG16 (Zhang et al. 2018), https://arxiv.org/abs/1801.03924, version 0.1.

    No weights come with vqclip, and none are fetched.
    """

    kind: Literal["lpips"] = "lpips"
    """LPIPS."""
    weight: float = Field(1.0, gt=0, le=1e6)
    """Factor of the term in the total loss."""
    trunk: Annotated[Path, FREE]
    """torchvision's weights of VGG16 (`vgg16-397923af.pth`), or the same tensors as safetensors."""
    heads: Annotated[Path, FREE]
    """Weights of the channels of each layer, by the names of the `lpips` package (its `weights/v0.1/vgg.pth`)."""

    def build(self, image_size: int) -> PixelTerm:
        """Make the term.

        Raises:
            ConfigError: a file is missing or damaged, has other tensors, or the images are smaller than 16 pixels.
        """
        if image_size < _SMALLEST:
            raise ConfigError(f"lpips: got images of {image_size} pixels; expected at least {_SMALLEST}")
        return _LPIPS(self.trunk, self.heads)
