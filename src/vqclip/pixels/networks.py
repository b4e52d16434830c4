"""Frozen networks whose features compare images, for the perceptual term and for discriminators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError, VqclipError
from vqclip.io.tensors import first_names, module_digest, nonfinite_names
from vqclip.towers.base import rename_tower_errors
from vqclip.towers.blocks import block_names
from vqclip.towers.image import ImageTower, TimmTowerConfig
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig

Layers = Annotated[tuple[int, ...], Field(min_length=1)]
"""Numbers of blocks of a tower, from 0 at the input; negative ones count from the output."""


class TokenizerNetworkConfig(Config):
    """The image tower of an exported tokenizer."""

    kind: Literal["tokenizer"] = "tokenizer"
    """An exported tokenizer's image tower."""
    folder: str
    """Folder that `save_pretrained` or a run wrote, or a hub name (owner/name)."""

    def build(self) -> ImageTower:
        """Load the tower.

        Raises:
            ConfigError: the folder is missing or damaged, or has no image tokenizer.
        """
        import vqclip  # here, for loading builds on this package

        load: Any = vqclip.load_tokenizer
        try:
            return load(self.folder, "image").tower
        except VqclipError as error:
            raise ConfigError(f"tower.folder: {error}") from error


NetworkConfig = Annotated[
    TimmTowerConfig | OpenCLIPImageTowerConfig | TokenizerNetworkConfig, Field(discriminator="kind")
]
"""A pretrained network, chosen by ``kind``."""


class FeatureNetwork(nn.Module):
    """Features of a frozen image tower after some of its blocks; always in evaluation mode.

    Args:
        tower: made constant by this class.
        layers: numbers of blocks; None for all.

    Attributes:
        digest: SHA-256 of all weights, the image size and the layers.
        widths: channels of each layer's features.

    Raises:
        ConfigError: the tower has no such block, or a block does not return features of images.
    """

    def __init__(self, tower: ImageTower, layers: Sequence[int] | None = None):
        super().__init__()
        names = block_names(tower)
        if layers is not None:
            if wrong := [number for number in layers if not -len(names) <= number < len(names)]:
                raise ConfigError(
                    f"layers: got {wrong[0]}; this network has {len(names)} blocks, {names[0]} to {names[-1]}; "
                    f"expected 0 to {len(names) - 1}, or -{len(names)} to -1 from the output"
                )
            names = [names[number] for number in sorted({number % len(names) for number in layers})]
        self.digest = module_digest(tower, f"{tower.image_size} {names}")
        self.tower, self._caught = tower, list[Tensor]()
        self._channels_last = bool(getattr(tower.backbone, "channels_last", False))
        for name in names:
            tower.get_submodule(name).register_forward_hook(self._catch)
        make_constant(tower)
        self.float().eval()  # folders may contain half precision
        self.widths = self._measure(names)

    def forward(self, images: Tensor) -> list[Tensor]:
        """``(B, 3, H, W)``, about 0..1, of any size → features ``(B, P, C)`` of each layer; P may differ."""
        size = self.tower.image_size
        if images.shape[-1] != size or images.shape[-2] != size:
            images = F.interpolate(images, size=(size, size), mode="bicubic", antialias=True, align_corners=False)
        self._caught = []
        self.tower(images)
        features, self._caught = self._caught, []
        return [self._as_tokens(each) for each in features]

    def train(self, mode: bool = True) -> FeatureNetwork:
        """Stay in evaluation mode."""
        return super().train(False)

    def _catch(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._caught.append(output[0] if isinstance(output, tuple) else output)

    def _as_tokens(self, features: Tensor) -> Tensor:
        if features.ndim == 3:
            return features
        return features.flatten(1, 2) if self._channels_last else features.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def _measure(self, names: list[str]) -> list[int]:
        """Return the channels of each layer, from three black images."""
        found: list[Any] = []
        self._caught = found
        self.tower(self.tower.example().expand(3, -1, -1, -1))
        good = [isinstance(each, Tensor) and each.ndim in (3, 4) and len(each) == 3 for each in found]
        if len(found) != len(names) or not all(good):
            raise ConfigError(
                f"layers: the blocks {first_names(names)} of this network do not each return features of images once; "
                "expected another network"
            )
        return [self._as_tokens(each).shape[-1] for each in found]


def build_network(config: Any, layers: Sequence[int] | None) -> FeatureNetwork:
    """Load a network on the CPU.

    Args:
        config: a `NetworkConfig`.
        layers: numbers of blocks; None for all.

    Raises:
        ConfigError: it cannot be loaded, has random weights, or weights that contain NaN or infinity.
    """
    with rename_tower_errors("network"):
        if not isinstance(config, TokenizerNetworkConfig):
            if not config.is_pretrained:
                raise ConfigError(
                    "tower: got random weights, whose features say little about images; set pretrained or a "
                    "file of weights, or kind: tokenizer"
                )
            if config.train not in ("all", "none"):
                raise ConfigError("tower.train: got parts that train; expected none: this network is frozen")
            config = config.model_copy(update={"train": "none"})
        tower = config.build()
        if bad := nonfinite_names(tower.state_dict()):
            raise ConfigError(f"tower: the weights contain NaN or infinity: {first_names(bad)}")
    return FeatureNetwork(tower, layers)


def make_constant(module: nn.Module) -> None:
    """Turn all parameters and buffers into buffers that are moved by ``to`` but are in no state dict."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach(), persistent=False)
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(name, buffer, persistent=False)
